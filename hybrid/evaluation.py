"""Loss of a model on data, and completions of prompts, at any layout."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybrid.agreement import RemoteError, rank_zero_first, refuse
from hybrid.build import build_module
from hybrid.config.run import RunConfig
from hybrid.config.training import HybridConfig
from hybrid.data.build import DataModule, build_data
from hybrid.data.cache import default_cache_dir
from hybrid.data.chat.build import build_chat_data
from hybrid.data.chat.formats import detect_format
from hybrid.data.chat.masks import ChatEncoder
from hybrid.data.chat.rows import read_rows
from hybrid.data.chat.tokenizer import ChatTokenizer, load_chat_tokenizer
from hybrid.data.loader import EvalLoader
from hybrid.data.samples import SampleSource
from hybrid.data.spec import text_spec
from hybrid.data.tokenizer import check_vocabulary
from hybrid.environment import init_distributed, set_up_logging
from hybrid.finetune.data import chat_spec
from hybrid.generate.decode import generate
from hybrid.generate.sampling import Sampling
from hybrid.generate.stages import evaluate_loss
from hybrid.grid import Grid, build_grid
from hybrid.pipeline.module import LlamaPipeline

logger = logging.getLogger(__name__)

Split = Literal["all", "train", "eval", "test"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to find out about a model."""

    loss: bool
    """The loss on the data of the run."""
    split: Split = "all"
    """Which of the data: all, or the set that a run with the same fractions trains on, evaluates on or leaves out."""
    prompts: tuple[str, ...] = ()
    """Texts to be completed; a tokenizer with a chat template gets each as what a user says."""
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """All that comes from files and arguments."""

    grid: Grid
    module: LlamaPipeline
    data: SampleSource | None
    tokenizer: ChatTokenizer | None
    prompts: list[list[int]]


def run_evaluation(run: RunConfig, request: Request) -> dict[str, Any] | None:
    """Start the process group, evaluate, and end it.

    Returns:
        The results, alike on every rank; None where files, data or prompts are refused, which has been said then.
    """
    device = init_distributed()
    set_up_logging(dist.get_rank())
    try:
        try:
            prepared = _prepare(run, request, device)
        except (ValueError, OSError, RemoteError) as error:
            refuse(error)
            return None
        return _evaluate(run, request, prepared)
    finally:
        dist.destroy_process_group()


def evaluate(run: RunConfig, request: Request, device: torch.device) -> dict[str, Any]:
    """`loss`, `perplexity` and `tokens`, and `completions`, as far as they are asked for; a collective call.

    Raises:
        ValueError: data, tokenizer and model do not go together, or a prompt has no token.
    """
    return _evaluate(run, request, _prepare(run, request, device))


def _prepare(run: RunConfig, request: Request, device: torch.device) -> _Prepared:
    """Open what is needed, the model last; a collective call."""
    # No schedule here: a stage a rank, as many layers on each as in training.
    run = replace(run, layers_per_stage=run.layers_per_rank)
    grid = build_grid(run.parallel, run.model.num_key_value_heads)
    data = rank_zero_first(lambda: _open_data(run, request.split)) if request.loss else None
    tokenizer = rank_zero_first(lambda: _tokenizer(run)) if request.prompts else None
    prompts = rank_zero_first(lambda: _encode_prompts(request.prompts, tokenizer)) if tokenizer is not None else []
    module = build_module(run, grid, device)
    return _Prepared(grid=grid, module=module, data=data, tokenizer=tokenizer, prompts=prompts)


def _evaluate(run: RunConfig, request: Request, prepared: _Prepared) -> dict[str, Any]:
    grid, module, tokenizer = prepared.grid, prepared.module, prepared.tokenizer
    results: dict[str, Any] = {}
    if prepared.data is not None:
        loader = EvalLoader(
            prepared.data,
            micro_batch_size=run.micro_batch_size,
            dp_rank=grid.data_rank,
            dp_size=run.parallel.data_parallel_size,
            reads=grid.is_first_stage or grid.is_last_stage,
        )
        loss, tokens = evaluate_loss(module, grid, loader)
        results |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
    if tokenizer is not None:
        warn_of_length(run, prepared.prompts, request.max_new_tokens)
        completions = generate(
            module,
            grid,
            prepared.prompts,
            max_new_tokens=request.max_new_tokens,
            stop_ids=_stop_ids(run, tokenizer),
            sampling=request.sampling,
            seed=request.seed,
        )
        results["completions"] = [
            {"prompt": prompt, "completion": tokenizer.renderer.decode(ids, skip_special_tokens=True)}
            for prompt, ids in zip(request.prompts, completions, strict=True)
        ]
    return results


def _open_data(run: RunConfig, split: Split) -> SampleSource:
    """The set that is asked for.

    Raises:
        ValueError: also if the configuration holds nothing out for it.
    """
    hybrid = run.hybrid
    if split == "all":
        undivided = hybrid.data.model_copy(update={"eval_fraction": 0.0, "test_fraction": 0.0})
        finetune = hybrid.finetune.model_copy(update={"eval_data": None})
        run = replace(run, hybrid=hybrid.model_copy(update={"data": undivided, "finetune": finetune}))
    conversations = reads_conversations(hybrid)
    data: DataModule
    logger.info("evaluating on %s: %s", "conversations" if conversations else "text", hybrid.data.source)
    if conversations:
        data = build_chat_data(chat_spec(run))
    else:
        data = build_data(replace(text_spec(run), train_samples=1))  # one pass, not those of the run
    sets = {"all": data.train, "train": data.train, "eval": data.eval, "test": data.test}
    found = sets[split]
    if found is None:
        raise ValueError(
            f"there is no {split} set: hybrid.data.{split}_fraction leaves it nothing; set it to what the model was "
            "trained with"
        )
    return found


def reads_conversations(hybrid: HybridConfig) -> bool:
    """Whether the source is read as fine-tuning data: a format is named, or its rows have one. `demo` alone is text."""
    return hybrid.finetune.format != "auto" or holds_conversations(hybrid.data.source)


def holds_conversations(source: str | Sequence[str]) -> bool:
    """Whether the first row of a source is a conversation; text, token files and blends of them are not."""
    first = source if isinstance(source, str) else source[0]
    try:
        row = next(iter(read_rows(first)), None)
        return row is not None and bool(detect_format(row.fields, row.where))
    except ValueError:
        return False


def _tokenizer(run: RunConfig) -> ChatTokenizer:
    name = run.hybrid.tokenizer
    if name is None:
        raise ValueError("no tokenizer is named, and prompts need one: set --tokenizer (a folder, a name, or 'demo')")
    folder = run.hybrid.data.cache_dir or default_cache_dir()
    tokenizer = load_chat_tokenizer(name, folder, run.hybrid.finetune.chat_template)
    check_vocabulary(tokenizer, run.model.vocab_size)
    return tokenizer


def _encode_prompts(prompts: Sequence[str], tokenizer: ChatTokenizer) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        ValueError: there is none to start a completion from.
    """
    encoder = ChatEncoder(tokenizer)
    encoded = [encoder.encode_prompt(prompt) for prompt in prompts]
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True), start=1):
        if not ids:
            raise ValueError(
                f"--prompt: text {number} is {prompt!r}, which has no token: a completion needs one to start from; "
                "leave it out or give it text"
            )
    return encoded


def warn_of_length(run: RunConfig, prompts: Sequence[Sequence[int]], new: int) -> None:
    """Say that a completion may pass the positions the model is made for; no error, since it may end before."""
    longest, limit = max(map(len, prompts)), run.model.rope.max_positions(run.model.max_position_embeddings)
    if longest + new > limit:
        logger.warning(
            "a prompt of %d tokens and --max_new_tokens %d are more than the %d positions the model is made for: "
            "expect nothing of what lies beyond, or lower --max_new_tokens",
            longest, new, limit,
        )  # fmt: skip


def _stop_ids(run: RunConfig, tokenizer: ChatTokenizer) -> frozenset[int]:
    own = run.model.eos_token_id
    ids = own if isinstance(own, list) else [own]
    return frozenset(token for token in (*ids, tokenizer.eos_id) if token is not None)
