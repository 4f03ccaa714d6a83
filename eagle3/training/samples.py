"""What the trainer works on: plain tensors, wherever they come from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.drafter.config import DrafterConfig
from eagle3.errors import Eagle3Error
from eagle3.target import Target

NORM = CapturePoint("norm")


class TrainingError(Eagle3Error, ValueError):
    """Samples, target parts or settings that cannot be trained on, or a training that went astray."""


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and its answer: T rows of states for T+1 tokens (the last token has no row)."""

    id: str
    input_ids: Tensor  # int64 [T + 1]
    aux: Tensor  # [T, K*H]: the captured slots side by side, in the contract's order
    final: Tensor  # [T, H]: the target's final state
    loss_mask: Tensor  # bool [T + 1]: True where the token itself is part of the answer

    @property
    def num_rows(self) -> int:
        return len(self.aux)


@dataclass(frozen=True)
class TargetParts:
    """The parts of the target that the trainer needs; all frozen. Any float type."""

    embedding: Tensor  # [V_target, H]
    head: Tensor  # [V_target, H]
    final_norm: Tensor  # [H], the weight of a plain RMSNorm
    rms_norm_eps: float
    num_layers: int
    last_layer: Mapping[str, Tensor] | None = None  # the last decoder layer, names from `input_layernorm.weight` on

    @classmethod
    def of(cls, target: Target, *, latent: bool = False) -> Self:
        """Read selectively from the target's folder. `latent`: for a drafter with latent attention (MLA)."""
        return cls(
            embedding=target.embedding_table(),
            head=target.head(),
            final_norm=target.final_norm(),
            rms_norm_eps=target.rms_norm_eps,
            num_layers=target.num_layers,
            last_layer=target.last_layer(latent=latent) or None,
        )

    def to(self, device: torch.device) -> "TargetParts":
        """The tables on another device; the last layer, which is read once, stays where it is."""
        tables = {name: getattr(self, name).to(device) for name in ("embedding", "head", "final_norm")}
        return replace(self, **tables)

    def normed(self, final: Tensor, point: CapturePoint) -> Tensor:
        """The state that the head reads, float32 like `final` [..., H], on the parts' device.

        The final norm is applied exactly once: here, unless the state was captured after it (`norm`).
        """
        final = final.to(self.final_norm.device).float()
        if point == NORM:
            return final
        return F.rms_norm(final, self.final_norm.shape, self.final_norm.float(), self.rms_norm_eps)


def check_final_point(parts: TargetParts, point: CapturePoint) -> None:
    """Refuse a final state from which the target's distribution cannot be computed."""
    last = CapturePoint.at_boundary(parts.num_layers)
    if point not in (NORM, last):
        raise TrainingError(
            f"the samples' final state was captured at {point}; the target's distribution follows only from `norm` or "
            f"{last}. Extract with one of them as the final point"
        )


def check_parts(parts: TargetParts, config: DrafterConfig) -> None:
    """Refuse parts whose shapes are not those of the drafter's target."""
    table = (config.target_vocab_size, config.target_hidden_size)
    expected = {"embedding": table, "head": table, "final_norm": (config.target_hidden_size,)}
    for name, shape in expected.items():
        found = tuple(getattr(parts, name).shape)
        if found != shape:
            raise TrainingError(
                f"the target's {name} is {list(found)}, the drafter is shaped for {list(shape)}: they belong to "
                "different targets"
            )


def check_sample(sample: TrainingSample, config: DrafterConfig, num_steps: int) -> None:
    """Refuse a sample whose tensors do not fit each other or the drafter, or that holds NaN or inf; names it."""
    rows, where = sample.num_rows, f"sample {sample.id}"
    expected = {
        "input_ids": (rows + 1,),
        "aux": (rows, config.num_slots * config.target_hidden_size),
        "final": (rows, config.target_hidden_size),
        "loss_mask": (rows + 1,),
    }
    for name, shape in expected.items():
        found = tuple(getattr(sample, name).shape)
        if found != shape:
            raise TrainingError(f"{where}: {name} is {list(found)}, expected {list(shape)} for {rows} rows")
    if rows + num_steps > config.max_positions:
        raise TrainingError(f"{where}: {rows} rows; a drafter of {config.max_positions} positions cannot hold them")
    if int(sample.input_ids.min()) < 0 or int(sample.input_ids.max()) >= config.target_vocab_size:
        raise TrainingError(f"{where}: token ids outside 0 ... {config.target_vocab_size - 1}: another target's dump")
    for name in ("aux", "final"):
        finite = getattr(sample, name).isfinite().all(dim=-1)
        if not bool(finite.all()):
            bad = (~finite).nonzero()[:, 0]
            raise TrainingError(
                f"{where}: {name} holds NaN or inf in {len(bad)} of {rows} rows, first in row {int(bad[0])}. Validate "
                "the dump and extract the sample again"
            )
