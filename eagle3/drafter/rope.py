"""Rotary positions: the frequencies of a drafter's heads, scaled for long contexts where its config says so.

A target of DeepSeek's or Kimi's family carries YaRN, public drafters of Llama 3.1 carry `llama3`. The scaled
frequencies are transformers' own.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from eagle3.errors import Eagle3Error, first_fault

# Said elsewhere (the base) or meant for other engines; none of them changes a frequency.
_BESIDE = frozenset({"type", "rope_type", "rope_theta", "finetuned", "apply_yarn_scaling", "apply_scale"})


class RopeError(Eagle3Error, ValueError):
    """A rotary scaling that is not known here: a drafter would be computed otherwise than it is served."""


class RopeScaling(BaseModel):
    """`rope_scaling` of a config.json, or `rope_parameters` of a newer one, without the base."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float = Field(gt=0)
    original_max_position_embeddings: int | None = Field(None, gt=0)
    low_freq_factor: float | None = Field(None, gt=0)
    high_freq_factor: float | None = Field(None, gt=0)
    beta_fast: float | None = Field(None, gt=0)
    beta_slow: float | None = Field(None, gt=0)
    mscale: float | None = Field(None, ge=0)
    mscale_all_dim: float | None = Field(None, ge=0)
    attention_factor: float | None = Field(None, gt=0)

    @classmethod
    def of(cls, config: Mapping[str, Any], *, where: str) -> Self | None:
        """The scaling of a config.json; None where there is none. RopeError for one that is not known."""
        found = config.get("rope_scaling") or config.get("rope_parameters")
        if not found:
            return None
        if not isinstance(found, Mapping):
            raise RopeError(f"{where}: rope_scaling must be an object; it is {found!r:.80}")
        kind = found.get("rope_type", found.get("type", "default"))
        if kind == "default":
            return None
        if found.get("apply_yarn_scaling", True) is not True or found.get("apply_scale", True) is not True:
            raise RopeError(f"{where}: rope_scaling switches YaRN's scale of the attention off: that is not known here")
        kind = "yarn" if kind == "deepseek_yarn" else kind
        try:
            return cls.model_validate(
                {key: value for key, value in found.items() if key not in _BESIDE} | {"rope_type": kind}
            )
        except ValidationError as error:
            field, what = first_fault(error)
            raise RopeError(
                f"{where}: rope_scaling.{field}: {what}. Known are linear, llama3 and yarn: another scaling would be "
                "trained otherwise than it is served"
            ) from None

    def softmax_scale(self) -> float:
        """What multiplies the scores of DeepSeek's attention beside 1 / sqrt(d): mscale_all_dim's share, squared."""
        if self.rope_type != "yarn" or not self.mscale_all_dim or self.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2

    def to_config(self) -> dict[str, Any]:
        """As config.json holds it."""
        return self.model_dump(exclude_none=True)


def rotary_angles(
    positions: Tensor, dim: int, theta: float, scaling: RopeScaling | None, max_positions: int
) -> tuple[Tensor, float]:
    """Angles of positions [...] -> float64 [..., dim / 2], and what cos and sin are multiplied with."""
    if scaling is None:
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        return positions.double()[..., None] * theta**-exponent, 1.0
    frequencies, factor = _scaled(dim, theta, scaling, max_positions)
    return positions.double()[..., None] * frequencies.to(positions.device), factor


def _scaled(dim: int, theta: float, scaling: RopeScaling, max_positions: int) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=max_positions,
        rope_parameters=scaling.to_config() | {"rope_theta": theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    return frequencies.double(), float(factor)
