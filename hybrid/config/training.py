"""The `hybrid` section of the configuration file: everything DeepSpeed has no key for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RecomputeConfig(_Section):
    """What the forward pass does not keep but computes again in backward; a bare string is the granularity."""

    granularity: Literal["none", "selective", "full"] = "none"
    """`selective`: the cheap, large intermediates of a layer; `full`: all but its input. Default none."""
    num_layers: int | None = Field(default=None, ge=1)
    """The first so many decoder layers of each pipeline rank recompute. Default: all of them."""


class DataConfig(_Section):
    """Where the tokens come from."""

    source: str | list[str] = "demo"
    """`demo` (text of the standard library); a text file, folder or glob; the prefix of a token file; or several of
    them, also as a blend `["0.7", "a", "0.3", "b"]`. Default demo."""
    seq_length: int = Field(default=512, ge=1)
    """Tokens per sample. Default 512."""
    text_key: str = "text"
    """Field of a .jsonl or .parquet row that holds the text. Default text."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents held out for evaluation. Default 0.05."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the documents held out from training and evaluation, for `launch/evaluate.py --split test`. Default
    0."""
    reset_attention: bool = False
    """Documents in one sample do not see each other, and positions start anew with each. Default false."""
    cache_dir: str | None = None
    """Folder for prepared tokens. Default: a folder in the user's cache."""

    @field_validator("test_fraction")
    @classmethod
    def _leaves_something(cls, value: float, info: ValidationInfo) -> float:
        held_out = info.data.get("eval_fraction", 0.0)
        if value + held_out >= 1:
            raise PydanticCustomError(
                "held_out", "below {rest}, what eval_fraction leaves: the rest is for training", {"rest": 1 - held_out}
            )
        return value


class LrScheduleConfig(_Section):
    """The learning rate as a fraction of the optimizer's `lr`, by step."""

    type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: down to min_lr_ratio at train_steps (cosine, linear), constant, or wsd: constant, then down
    in the last decay_steps (Hu et al. 2024). Default cosine."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise; the last of them has the full rate. Default 0."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Fraction that is left after the decay. Default 0.1."""
    decay_steps: int | None = Field(default=None, ge=1)
    """wsd: the last steps of the run, in which the rate falls linearly. Default: a tenth of train_steps."""


class BatchRampupConfig(_Section):
    """A global batch that grows at the start of training, up to DeepSpeed's `train_batch_size`."""

    start: int = Field(ge=1)
    """Samples of the first step."""
    increment: int = Field(ge=1)
    """Samples by which it grows at a time."""
    samples: int = Field(ge=0)
    """Samples over which it grows, at even distances."""


class TrainingConfig(_Section):
    """The course of a run."""

    train_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the whole run, those before a resume included. Default 100."""
    seed: int = Field(default=1234, ge=0)
    """Seeds weights, sample order and dropout. Default 1234."""
    output_dir: str = Field(default="output", min_length=1)
    """Folder for metrics, checkpoints and the final model. Default output."""
    lr_schedule: LrScheduleConfig | None = LrScheduleConfig()
    """Learning-rate schedule; null where DeepSpeed's `scheduler` section is used instead. Default cosine."""
    batch_rampup: BatchRampupConfig | None = None
    """Growth of the global batch. Default: none."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out data; 0 never evaluates. Default 0."""
    eval_batches: int = Field(default=4, ge=1)
    """Global batches per evaluation. Default 4."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end. Default 0."""
    log_every: int = Field(default=1, ge=1)
    """Steps between console lines; metrics.jsonl has every step. Default 1."""
    resume: str = "auto"
    """`auto`: the newest complete checkpoint in output_dir, or a fresh start where there is none; `latest`: the same,
    but one must be there; `none`: a fresh start; or a checkpoint folder, or the folder of a run. Default auto."""
    stop_after_steps: int | None = Field(default=None, ge=1)
    """This launch saves and ends after so many steps; schedule and train_steps stay. Default: none, run to the end."""
    max_wall_time: float | None = Field(default=None, gt=0)
    """Seconds, or "H:MM:SS", after which this launch saves and ends with exit code 75; leave time for the save before
    the scheduler's limit. Default: no limit."""
    max_skipped_steps: int = Field(default=20, ge=1)
    """Steps in a row that may be skipped for non-finite gradients before the run stops. Default 20."""

    @field_validator("max_wall_time", mode="before")
    @classmethod
    def _clock_time(cls, value: object) -> object:
        if isinstance(value, str) and re.fullmatch(r"(\d+:)?\d+:\d\d(:\d\d)?", value.replace("-", ":")):
            fields = [int(field) for field in value.replace("-", ":").split(":")]
            return float(sum(field * unit for field, unit in zip(reversed(fields), (1, 60, 3600, 86400), strict=False)))
        if not isinstance(value, str):
            return value
        if not re.fullmatch(r"\d+(\.\d*)?", value):
            raise PydanticCustomError("wall_time", "seconds, or H:MM:SS as in 1:30:00")
        return float(value)


class CheckpointConfig(_Section):
    """How checkpoints are written and which are kept."""

    asynchronous: bool = Field(default=True, alias="async")
    """Write in the background: training waits for the copy to host memory only. Default true."""
    keep_last: int = Field(default=0, ge=0)
    """Delete all but the newest so many checkpoints; 0 keeps all. Default 0."""
    keep_every: int = Field(default=0, ge=0)
    """Never delete those of a multiple of so many steps; 0 protects none. Default 0."""
    max_failures: int = Field(default=3, ge=1)
    """Checkpoints in a row that may fail to be written, for a full disk say, before the run stops. Default 3."""


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(_Section):
    """Low-rank adapters on frozen weights (Hu et al. 2021): W x + alpha / r B A x, with A and B trained only."""

    r: int = Field(default=8, ge=1)
    """Rank: rows of A, columns of B. Default 8."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's output is scaled by alpha / r. Default 16."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an element of the adapter's input is dropped in training. Default 0."""
    targets: list[LoraTarget] = Field(default_factory=lambda: list(get_args(LoraTarget)))
    """Projections that get an adapter, in every layer. Default: all seven."""

    @field_validator("targets")
    @classmethod
    def _each_once(cls, value: list[LoraTarget]) -> list[LoraTarget]:
        if not value or len(set(value)) < len(value):
            raise PydanticCustomError("targets", "at least one projection, and each named once")
        return value


class FinetuneConfig(_Section):
    """How conversations become samples; read by launch/finetune.py only."""

    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Shape of a row; auto: by the keys of the first one. Default auto."""
    eval_data: str | list[str] | None = None
    """Held-out rows. Default: `hybrid.data.eval_fraction` of the data."""
    chat_template: str | None = None
    """`none` (prompt and answer as they are); chatml, llama2, llama3, mistral or zephyr; or a file. Default: the
    tokenizer's own."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's turns are learnt. Default all."""
    packing: bool = True
    """Several samples in a row, none of which sees another; otherwise one, padded. Default true."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to samples of more than seq_length tokens. Default error."""
    resize_vocab: bool = False
    """Give the model rows for tokens of the tokenizer it has none for: the mean of its rows. Default false."""
    keep_best: bool = True
    """Keep the model of the lowest validation loss in output_dir/best. Default true."""


class HybridOptimizerConfig(_Section):
    """How the distributed optimizer communicates; what it computes is DeepSpeed's `optimizer` section."""

    gradient_sharding: Literal["auto", "step", "microbatch"] = "auto"
    """Under stage 2: reduce gradients every microbatch (least memory) or once a step (least traffic). `auto` takes the
    second only if there are several microbatches and `memory_gib` holds it. Default auto."""
    memory_gib: float | None = Field(default=None, gt=0)
    """GiB of a device that weights, gradients and optimizer states may take, for `auto`. Default: not known."""
    overlap: bool = True
    """Communicate while computing. `zero_optimization.overlap_comm` means the same. Default true."""


class ProfileConfig(_Section):
    """What is watched more closely than every step allows."""

    steps: list[Annotated[int, Field(ge=1)]] = []
    """Steps with a torch.profiler trace and a recorded pipeline timeline on every rank, for Perfetto and the run
    report: output_dir/profile and output_dir/timeline. Default none."""
    straggler_every: int = Field(default=100, ge=0)
    """Steps between lines that name the slowest rank and its stage; 0 for none. Default 100."""


class HybridConfig(_Section):
    """The `hybrid` section."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every layer's matrices. Default 1."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks the decoder layers are cut over, a stage each. Default 1."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence. Default false."""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """`interleaved`: each pipeline rank holds several smaller stages instead of one, which divides the idle time by
    their number and multiplies the sends by it (Narayanan et al. 2021). Default 1f1b."""
    pipeline_chunks: int | None = Field(default=None, ge=2)
    """Stages that each rank holds under `interleaved`, 2 unless given. Default: not given."""
    pipeline_split: list[int] | None = None
    """Decoder layers of each stage. Default: balanced, with the embedding and the head weighed in."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activation recomputation. Default none."""
    kernels: Literal["auto", "torch", "liger", "compile"] = "auto"
    """Operators of RMSNorm, SwiGLU and RoPE. `liger`: Liger's of the first two. `compile`: torch's, fused by
    torch.compile. `auto`: Liger's on a CUDA device where liger-kernel is installed, else torch's. Default auto."""
    model: str | dict[str, Any] = "demo"
    """Preset name, folder with a config.json, JSON file, name on the Hugging Face hub, or the content of a config.json.
    Default demo."""
    tokenizer: str | None = None
    """Folder or name of a Hugging Face tokenizer. Default: that of the model folder, or of the demo data."""
    init_from: str | None = None
    """Weights to start from: a Hugging Face folder or hub name, or a sharded or training checkpoint.
    Default: fresh weights."""
    data: DataConfig = DataConfig()
    """Data."""
    training: TrainingConfig = TrainingConfig()
    """Course of the run."""
    optimizer: HybridOptimizerConfig = HybridOptimizerConfig()
    """Communication of the optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights. Default: train the weights."""
    finetune: FinetuneConfig = FinetuneConfig()
    """Fine-tuning data."""
    profile: ProfileConfig = ProfileConfig()
    """Profiles, timelines and slow ranks."""

    @property
    def num_chunks(self) -> int:
        """Stages that each pipeline rank holds."""
        return (self.pipeline_chunks or 2) if self.pipeline_schedule == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        """Stages the decoder layers are cut into, over all pipeline ranks."""
        return self.pipeline_model_parallel_size * self.num_chunks

    @field_validator("recompute", mode="before")
    @classmethod
    def _bare_granularity(cls, value: object) -> object:
        return {"granularity": value} if isinstance(value, str) else value


def hybrid_paths() -> set[str]:
    """The dotted path of every key of the section, sections included."""

    def walk(model: type[BaseModel], prefix: str) -> set[str]:
        paths = set()
        for name, field in model.model_fields.items():
            name = field.alias or name
            paths.add(prefix + name)
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    paths |= walk(kind, f"{prefix}{name}.")
        return paths

    return walk(HybridConfig, "hybrid.")
