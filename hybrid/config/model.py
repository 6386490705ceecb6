"""The LLaMA architecture, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from hybrid.config.errors import ConfigError, closest, shown
from hybrid.config.hub import download, is_repository_name
from hybrid.config.rope import RopeConfig, read_rope

_LOGGER = logging.getLogger(__name__)

PRESETS = Path(__file__).parent / "presets"

Size = Annotated[int, Field(gt=0)]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_DEFER = "defer_shape_checks"


class LlamaConfig(BaseModel):
    """A LLaMA, under the names of transformers' LlamaConfig."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: Size
    """Rows of the embedding, without the padding that tensor parallelism adds."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width of the gated MLP."""
    num_hidden_layers: Size
    """Decoder layers."""
    num_attention_heads: Size
    """Query heads."""
    num_key_value_heads: Size = Field(default_factory=lambda known: known["num_attention_heads"])
    """Key/value heads, each shared by a group of query heads. Default: as many as query heads."""
    head_dim: Size = Field(default_factory=lambda known: max(1, known["hidden_size"] // known["num_attention_heads"]))
    """Width of a head. Default: hidden_size / num_attention_heads."""
    max_position_embeddings: Size = 2048
    """Longest sequence the model is made for, in tokens."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square in every RMSNorm."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of fresh weights."""
    tie_word_embeddings: bool = False
    """The output head is the embedding."""
    attention_bias: bool = False
    """Biases on q, k, v and o projections."""
    mlp_bias: bool = False
    """Biases on gate, up and down projections."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an attention weight is dropped in training."""
    bos_token_id: int | None = 1
    """Beginning of a document."""
    eos_token_id: int | list[int] | None = 2
    """End of a document, or of a turn where there are several."""
    pad_token_id: int | None = None
    """Padding of short samples."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding."""

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {key: value for key, value in values.items() if value is not None or key.endswith("_token_id")}
        return values

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> LlamaConfig:
        if not (info.context or {}).get(_DEFER) and (found := self.problems()):
            raise ValueError("; ".join(found))
        return self

    def problems(self) -> list[str]:
        """What does not fit together, each with its remedy."""
        found = []
        if "head_dim" not in self.model_fields_set and self.hidden_size % self.num_attention_heads:
            found.append(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}: "
                "change one of them, or set head_dim"
            )
        elif self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd: RoPE rotates pairs of dims")
        if self.num_attention_heads % self.num_key_value_heads:
            valid = [n for n in range(1, self.num_attention_heads + 1) if self.num_attention_heads % n == 0]
            found.append(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_key_value_heads "
                f"{self.num_key_value_heads}: valid key/value head counts are {', '.join(map(str, valid))}"
            )
        return found + self.rope.problems()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """The model of a config.json, in the style of transformers 4 or 5.

        Raises:
            ConfigError: it is not a model this package runs exactly; lists every reason.
        """
        parsed = parse_hf(raw)
        parsed.log_warnings()
        if parsed.problems or parsed.config is None:
            raise ConfigError(parsed.problems, "the model config")
        return parsed.config

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 read alike: what they name differently stands under both names.

        Args:
            dtype: of the weights beside it, `bf16` or `bfloat16` and so on.
        """
        dtype = _DTYPES.get(dtype, dtype)
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)} or {', '.join(_DTYPES.values())}")
        shape = self.model_dump(exclude={"rope"})
        head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True}
        return {**head, **shape, **self.rope.to_hf(), "torch_dtype": dtype, "dtype": dtype}


def num_parameters(config: LlamaConfig) -> int:
    """Parameters of the model; tied embeddings count once, vocabulary padding not at all."""
    h, d = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    attention = h * (q + 2 * kv) + q * h
    if config.attention_bias:
        attention += q + 2 * kv + h
    mlp = 3 * h * config.intermediate_size
    if config.mlp_bias:
        mlp += 2 * config.intermediate_size + h
    embeddings = config.vocab_size * h * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.num_hidden_layers * (attention + mlp + 2 * h) + h


@dataclass(frozen=True)
class ParsedModel:
    """What a config.json holds: the model as far as it can be read, and all that is wrong with it."""

    config: LlamaConfig | None
    """Set whenever the fields have the right types, even if they do not fit together."""
    problems: list[str] = field(default_factory=list)
    """Reasons why this is not a model the package runs exactly."""
    warnings: list[str] = field(default_factory=list)
    """Keys that nothing reads."""

    def log_warnings(self) -> None:
        """Say what is ignored."""
        for warning in self.warnings:
            _LOGGER.warning("model config: %s", warning)


_FIELDS = frozenset(LlamaConfig.model_fields) - {"rope"}

_READ_ELSEWHERE = frozenset(
    "model_type hidden_act pretraining_tp sliding_window quantization_config rope_theta rope_scaling "
    "rope_parameters".split()
)

HF_KEYS = _FIELDS | _READ_ELSEWHERE
"""The keys of a config.json that decide what the model computes."""

_HARMLESS = frozenset(
    "architectures transformers_version torch_dtype dtype use_cache _name_or_path name_or_path _commit_hash "
    "_attn_implementation attn_implementation _attn_implementation_autoset output_attentions output_hidden_states "
    "return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward "
    "is_decoder is_encoder_decoder is_llama_config id2label label2id problem_type finetuning_task "
    "task_specific_params tokenizer_class prefix decoder_start_token_id forced_bos_token_id forced_eos_token_id "
    "suppress_tokens bad_words_ids begin_suppress_tokens max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty num_return_sequences "
    "output_scores remove_invalid_values sep_token_id unsloth_version unsloth_fixed".split()
)
"""Keys that do not change what the model computes."""

_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
"""What transformers' MistralConfig takes where a file is silent, as far as it differs from LlamaConfig."""


def parse_hf(raw: Mapping[str, Any]) -> ParsedModel:
    """Read a config.json without stopping at the first fault."""
    values = {**_MISTRAL_DEFAULTS, **raw} if raw.get("model_type") == "mistral" else dict(raw)
    problems = _unsupported(values)
    warnings = []
    for key in sorted(values.keys() - HF_KEYS - _HARMLESS):
        near = closest(key, HF_KEYS)
        warnings.append(f"unknown key {key} = {shown(values[key])} is ignored" + (f"; meant {near}?" if near else ""))
    arguments = {key: value for key, value in values.items() if key in _FIELDS}
    rope = read_rope(values, problems, warnings)
    if rope["rope_type"] in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings", 2048))
    try:
        config = LlamaConfig.model_validate({**arguments, "rope": rope}, context={_DEFER: True})
    except ValidationError as error:
        for detail in error.errors():
            if detail["type"] != "default_factory_not_called":
                problems.append(_field_problem(detail["loc"], detail["type"], detail["msg"], detail["input"]))
        return ParsedModel(None, problems, warnings)
    return ParsedModel(config, problems + config.problems(), warnings)


def _field_problem(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    name = ".".join(str(part) for part in loc)
    if kind == "missing":
        return f"{name} is missing"
    return f"{name} = {shown(value)} " + message.replace("Input should", "must")


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """Settings under which the model would compute something this package does not."""
    found = []
    model_type = values.get("model_type", "llama")
    if model_type not in ("llama", "mistral"):
        found.append(f"model_type {shown(model_type)} is not supported: llama is, and mistral without a sliding window")
    if (act := values.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act {shown(act)} is not supported: the MLP is SwiGLU, whose activation is silu")
    if (pretraining_tp := values.get("pretraining_tp")) not in (None, 1):
        found.append(
            f"pretraining_tp {shown(pretraining_tp)} is not supported: set it to 1 (the weights are the same; it only "
            "splits the matrix products to repeat the rounding of the original training)"
        )
    window, positions = values.get("sliding_window"), values.get("max_position_embeddings", 2048)
    if window is not None and (not isinstance(positions, int) or not isinstance(window, int) or window < positions):
        found.append(
            f"sliding_window {shown(window)} is shorter than max_position_embeddings {shown(positions)}, and windowed "
            f"attention is not supported: set max_position_embeddings to at most {shown(window)}, where the window has "
            "no effect"
        )
    if (quantization := values.get("quantization_config")) is not None:
        found.append(f"quantization_config {shown(quantization)} is not supported: use the unquantized weights")
    return found


def preset_names() -> list[str]:
    """Names `load_model_config` knows."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_model_json(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that `source` names: a preset, a folder that holds one, a file, a repository of the Hugging Face
    hub, or the content itself.

    Raises:
        ConfigError: there is none of these, or it is not a JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source).expanduser()
    if source in preset_names():
        path = PRESETS / f"{source}.json"
    elif path.is_dir():
        path = path / "config.json"
    elif is_repository_name(source) and not path.parent.exists():
        path = _of_hub(source)
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = closest(source, preset_names())
        hint = f": did you mean {near}?" if near else ""
        raise ConfigError(
            [
                f"model {source!r} is neither a preset nor a folder or file that holds a config.json{hint} "
                f"(presets: {', '.join(preset_names())})"
            ]
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"model {source!r}: {path} cannot be read as JSON: {error}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"model {source!r}: {path} holds {shown(raw)}, not a JSON object"])
    return raw


def _of_hub(repository: str) -> Path:
    def get(cached: bool) -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repository, "config.json", local_files_only=cached)

    return download(repository, get, lambda sentence: ConfigError([f"model {repository!r}: {sentence}"]))


def load_model_config(source: str | Mapping[str, Any]) -> LlamaConfig:
    """The model of whatever `read_model_json` takes.

    Raises:
        ConfigError: `source` does not exist, or is not a model this package runs exactly.
    """
    return LlamaConfig.from_hf(read_model_json(source))
