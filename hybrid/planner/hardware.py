"""GPUs as data: what their datasheets promise, and the few measured fractions of it that training reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hybrid.config.errors import ConfigError, closest, shown
from hybrid.metrics.flops import peak_flops

_TABLE = Path(__file__).parent / "gpus.json"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What kernels and collectives reach of a datasheet: one set for all GPUs, models and layouts.

    `gemm` and `attention` are fitted to the published steps whose layout is stated (published.py), but for the two that
    this package could not run alike (OFF in the tests). The rest are round numbers, neither fitted nor measured.
    """

    gemm: float = 0.75
    """Of the matrix peak, by large GEMMs."""
    attention: float = 0.35
    """Of the matrix peak, by blockwise attention, half of the square counted."""
    gemm_latency: float = 8e-6
    """Seconds a GEMM takes whatever its size: launch, and tiles that fill the device badly."""
    memory: float = 0.80
    """Of the memory's bandwidth, by elementwise kernels."""
    link: float = 0.75
    """Of the links' and the network's bandwidth, by large collectives."""
    latency: float = 15e-6
    """Seconds to start a collective, plus `hop` for each further rank of its ring."""
    hop: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual server; bandwidths are per GPU and one way."""

    name: str
    matrix_flops: float
    """Dense bf16 peak per second."""
    memory_gib: float
    memory_gb_per_second: float
    link_gb_per_second: float
    """Between the GPUs of a node."""
    network_gb_per_second: float
    """Between nodes."""
    gpus_per_node: int
    source: str
    efficiency: Efficiency = field(default_factory=Efficiency)


def gpu_names() -> list[str]:
    """The GPUs of the table."""
    return list(json.loads(_TABLE.read_text(encoding="utf-8")))


def load_gpu(name: str) -> Gpu:
    """A GPU of the table, or of a JSON file with the same keys and `bf16_tflops`.

    Raises:
        ConfigError: there is neither, or the file lacks a number.
    """
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    if name.lower() in table:
        values = table[name.lower()]
        peak = peak_flops(values.pop("device_name"), "bf16")
        assert peak is not None, "the table of peaks has every GPU of this table"
        return Gpu(name=name.lower(), matrix_flops=peak, **values)
    path = Path(name).expanduser()
    if not path.is_file():
        near = closest(name, table)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError([f"there is no GPU {name}: {hint}known are {', '.join(table)}, or give a JSON file"])
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"it is not JSON: {error}"], name) from None
    return _custom(path, values)


_NUMBERS = (
    "bf16_tflops", "memory_gib", "memory_gb_per_second", "link_gb_per_second", "network_gb_per_second", "gpus_per_node",
)  # fmt: skip


def _custom(path: Path, values: Any) -> Gpu:
    if not isinstance(values, Mapping):
        raise ConfigError([f"it holds {shown(values)}: it must be an object"], str(path))
    problems = [
        f"{key} is {shown(values.get(key))}: it must be a positive number"
        for key in _NUMBERS
        if isinstance(values.get(key), bool) or not isinstance(values.get(key), int | float) or values[key] <= 0
    ]
    fractions = values.get("efficiency", {})
    known = {f.name for f in fields(Efficiency)}
    problems += [
        f"efficiency.{key} is not known: the keys are {', '.join(sorted(known))}"
        for key in fractions
        if key not in known
    ]
    problems += [
        f"unknown key {key}: the keys are {', '.join([*_NUMBERS, 'source', 'efficiency'])}"
        for key in values
        if key not in (*_NUMBERS, "source", "efficiency")
    ]
    if problems:
        raise ConfigError(problems, str(path))
    numbers = {key: values[key] for key in _NUMBERS if key != "bf16_tflops"}
    return Gpu(
        name=path.stem,
        matrix_flops=values["bf16_tflops"] * 1e12,
        **{**numbers, "gpus_per_node": int(values["gpus_per_node"])},
        source=str(values.get("source", path)),
        efficiency=Efficiency(**fractions),
    )
