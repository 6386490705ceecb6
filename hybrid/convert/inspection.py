"""What a checkpoint directory holds, and what is wrong with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hybrid.config.errors import ConfigError
from hybrid.config.model import LlamaConfig, num_parameters
from hybrid.config.training import LoraConfig
from hybrid.convert.adapters import adapter_shapes, stored_adapters
from hybrid.convert.common import dtype_name, tied_head_problems, vocabulary_problems
from hybrid.convert.files import COMPANIONS
from hybrid.convert.integrity import checksum_problems
from hybrid.convert.manifest import SHARDED, Manifest
from hybrid.convert.names import EMBEDDING, FINAL_NORM, HEAD, is_state_key
from hybrid.convert.sources import Checkpoint, open_checkpoint, weight_problems

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

_ENDS = {EMBEDDING: "embedding", FINAL_NORM: "final norm", HEAD: "head"}


@dataclass
class Report:
    """Lines for people, and what is wrong, each with its remedy."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.problems:
            return "\n".join([*self.lines, "", "nothing is wrong with it"])
        faults = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return "\n".join([*self.lines, "", "what is wrong with it:", *faults])


def inspect_checkpoint(source: str, *, checksums: bool = False) -> Report:
    """Describe a directory of any format; faults are reported, not raised.

    Args:
        checksums: read every byte of a directory with a manifest, and compare.
    """
    report = Report([f"checkpoint  {source}"])
    try:
        checkpoint = open_checkpoint(source)
    except ConfigError as error:
        report.problems += error.violations
        return report
    report.lines.append(f"format      {checkpoint.kind}")
    if checkpoint.manifest is not None:
        report.lines.append(f"layout      {checkpoint.manifest.layout}")
    try:
        config, adapters = checkpoint.config(), stored_adapters(checkpoint)
    except ConfigError as error:
        report.problems += error.violations
    else:
        report.lines += [*_model(config, checkpoint.manifest), *_adapters(adapters)]
        problems, ignored = weight_problems(checkpoint.store, config, adapter_shapes(checkpoint, adapters))
        if not problems and config.tie_word_embeddings and HEAD in checkpoint.store:
            problems += tied_head_problems(checkpoint.store)
        report.problems += [*problems, *vocabulary_problems(checkpoint.path, config)]
        if ignored:
            report.lines.append(f"ignored     {len(ignored)} tensors the model does not need, as {ignored[0]}")
    report.lines += _contents(checkpoint)
    if checkpoint.manifest is not None:
        if checkpoint.manifest.format == SHARDED:
            report.lines += ["", *_files(checkpoint.manifest)]
        if checksums:
            report.problems += checksum_problems(checkpoint.path, checkpoint.manifest)
    report.lines += ["", _bytes_read(checkpoint.manifest, checksums=checksums)]
    return report


def _bytes_read(manifest: Manifest | None, *, checksums: bool) -> str:
    if manifest is None:
        return "bytes       not read, only headers: it has no manifest.json, hence no checksums to compare with"
    if checksums:
        return "bytes       all read, and compared with the checksums of the manifest"
    return "bytes       not read, only headers: --checksums reads all of them and compares them with the manifest"


def _model(config: LlamaConfig, manifest: Manifest | None) -> list[str]:
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} key/value heads of {config.head_dim}"
    extras = [
        "tied embeddings" if config.tie_word_embeddings else "",
        "attention biases" if config.attention_bias else "",
        "MLP biases" if config.mlp_bias else "",
    ]
    padded = f", padded to {manifest.padded_vocab_size:,} in the ranks" if manifest is not None else ""
    return [
        f"model       {num_parameters(config):,} parameters: {config.num_hidden_layers} layers, hidden "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {heads}",
        f"            RoPE {config.rope.rope_type}, theta {config.rope.rope_theta:g}; norm eps {config.rms_norm_eps:g}"
        + "".join(f"; {extra}" for extra in extras if extra),
        f"vocabulary  {config.vocab_size:,}{padded}",
    ]


def _adapters(lora: LoraConfig | None) -> Iterator[str]:
    if lora is not None:
        yield (
            f"adapters    LoRA of rank {lora.r}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}; "
            "to-hf and --init_from merge them into the weights"
        )


def _contents(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.store.tensors
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if not is_state_key(name):
            sizes[dtype_name(tensor.dtype)] += tensor.nbytes
    states = [name for name in tensors if is_state_key(name)]
    dtypes = ", ".join(f"{size / 1e6:,.1f} MB {dtype}" for dtype, size in sizes.most_common())
    lines = [f"weights     {len(tensors) - len(states)} tensors: {dtypes}"]
    if states:
        total = sum(tensors[name].nbytes for name in states)
        lines.append(f"optimizer   {len(states)} tensors: {total / 1e6:,.1f} MB")
    beside = [name for name in COMPANIONS if (checkpoint.path / name).exists()]
    return [*lines, f"beside it   {', '.join(beside) or 'nothing'}"]


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _files(manifest: Manifest) -> Iterator[str]:
    """A line for each file of tensors: its decoder layers, what else it holds, and its size."""
    yield f"{'file':36} {'layers':>9} {'tensors':>8} {'MB':>12}  also"
    for name, record in manifest.files.items():
        if record.tensors:
            layers = {int(found[1]) for key in record.tensors if (found := _LAYER.search(key))}
            span = _span(min(layers), max(layers) + 1) if layers else "-"
            also = [label for key, label in _ENDS.items() if any(key in tensor for tensor in record.tensors)]
            size = f"{record.size / 1e6:,.1f}"
            yield f"{name:36} {span:>9} {len(record.tensors):>8} {size:>12}  {', '.join(also)}".rstrip()
