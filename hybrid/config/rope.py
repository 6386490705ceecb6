"""Rotary position embedding settings, in the two styles transformers 4 and 5 write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from hybrid.config.errors import shown

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

DEFAULT_THETA = 10000.0

_USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each type reads besides the base."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class RopeConfig(BaseModel):
    """How the rotation frequencies are computed; names and meanings as in transformers' `rope_parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rope_type: RopeType = "default"
    """`default` (Su et al. 2021), or a way to stretch it to longer sequences."""
    rope_theta: float = Field(default=DEFAULT_THETA, gt=0)
    """Base of the geometric sequence of wavelengths. Default 10000."""
    factor: float | None = Field(default=None, ge=1)
    """How many times longer the sequences become; every type but `default` needs it."""
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    """Positions the model saw before it was stretched (yarn, llama3). Default: max_position_embeddings."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths above original_max_position_embeddings / this are stretched in full."""
    high_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths below original_max_position_embeddings / this stay as they are."""
    attention_factor: float | None = Field(default=None, ge=0)
    """yarn: scale of cos and sin. Default: 0.1 ln(factor) + 1, or from the two mscale values."""
    beta_fast: float | None = Field(default=None, gt=0)
    """yarn: rotations over the original length from which a dim is left alone. Default 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """yarn: rotations over the original length below which a dim is stretched in full. Default 1."""
    mscale: float | None = None
    """yarn: numerator of the inferred attention_factor, used together with mscale_all_dim."""
    mscale_all_dim: float | None = None
    """yarn: denominator of the inferred attention_factor, used together with mscale."""
    truncate: bool | None = None
    """yarn: round the range of blended dims to whole dims. Default true."""

    def problems(self) -> list[str]:
        """What the type needs and does not find."""
        found = [f"RoPE type {self.rope_type} needs {k}" for k in _REQUIRED[self.rope_type] if getattr(self, k) is None]
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and high <= low:
            found.append(f"RoPE high_freq_factor {high} must be greater than low_freq_factor {low}")
        return found

    @property
    def reads_max_positions(self) -> bool:
        """Whether the frequencies follow from the model's max_position_embeddings."""
        return self.rope_type == "dynamic"  # yarn and llama3 have the original one, which is filled in from it

    def max_positions(self, max_position_embeddings: int) -> float:
        """The longest sequence the settings are meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return max_position_embeddings * (self.factor or 1.0)
        original = self.original_max_position_embeddings or 0
        return max(max_position_embeddings, original * (self.factor or 1.0))

    def to_hf(self) -> dict[str, Any]:
        """`rope_theta`, `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5), saying the same."""
        used = {k: getattr(self, k) for k in _USED[self.rope_type] if getattr(self, k) is not None}
        scaling = {"rope_type": self.rope_type, **used} if self.rope_type != "default" else None
        parameters = {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **used}
        return {"rope_theta": self.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def read_rope(raw: Mapping[str, Any], problems: list[str], warnings: list[str]) -> dict[str, Any]:
    """`RopeConfig` arguments from a config.json of either style; what is wrong is added to the lists.

    A file that holds both styles must say the same in both: readers of the two styles would otherwise run
    different models.
    """
    new = raw.get("rope_parameters")
    old = raw.get("rope_scaling")
    theta = raw.get("rope_theta")
    outer = DEFAULT_THETA if theta is None else theta
    if new is None:
        return {"rope_theta": outer, **_read(old, "rope_scaling", problems, warnings)}
    result = _read(new, "rope_parameters", problems, warnings)
    inner = result.setdefault("rope_theta", outer)
    if theta is not None and inner != theta:
        problems.append(
            f"rope_theta is {shown(theta)} but rope_parameters.rope_theta is {shown(inner)}: "
            "transformers 4 reads the first, transformers 5 the second; make them equal"
        )
    if "rope_scaling" in raw:
        other = {"rope_theta": inner, **_read(old, "rope_scaling", problems, [])}
        for key in sorted(result.keys() | other.keys()):
            if result.get(key) != other.get(key):
                problems.append(
                    f"rope_scaling has {key} {shown(other.get(key))} but rope_parameters has {shown(result.get(key))}: "
                    "transformers 4 reads the first, transformers 5 the second; make them equal"
                )
    return result


def _read(values: Any, where: str, problems: list[str], warnings: list[str]) -> dict[str, Any]:
    """One style's dict as RopeConfig arguments, only those its type uses."""
    if values is None:
        return {"rope_type": "default"}
    if not isinstance(values, Mapping):
        problems.append(f"{where} is {shown(values)}: it must be an object or null")
        return {"rope_type": "default"}
    given = {key: value for key, value in values.items() if value is not None}
    old_name, name = given.pop("type", None), given.pop("rope_type", None)
    if old_name is not None and name is not None and old_name != name:
        problems.append(f"{where}.type is {shown(old_name)} but {where}.rope_type is {shown(name)}: make them equal")
    rope_type = name or old_name or "default"
    if rope_type not in get_args(RopeType):
        problems.append(f"{where}.rope_type {shown(rope_type)} is not supported: {', '.join(get_args(RopeType))} are")
        return {"rope_type": "default"}
    if (partial := given.pop("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"{where}.partial_rotary_factor {shown(partial)} is not supported: every dim of a head rotates")
    result: dict[str, Any] = {"rope_type": rope_type}
    for key, value in given.items():
        if key == "rope_theta" or key in _USED[rope_type]:
            result[key] = value
        else:
            warnings.append(f"{where}.{key} is ignored: RoPE type {rope_type} does not read it")
    return result
