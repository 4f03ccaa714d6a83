"""What the target's boundaries really are: computed by the target itself, or read from a probe."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import TargetIdentity
from eagle3.dump.probe import Probe
from eagle3.dump.slots import SlotSample
from eagle3.errors import Eagle3Error
from eagle3.evidence.calibration import coarser_arithmetic
from eagle3.target import Target
from eagle3.target.states import decoder_parts

__all__ = ["ProbeReference", "Reference", "SlotSample", "TargetReference", "WrongTarget", "check_identity"]


class WrongTarget(Eagle3Error, ValueError):
    """The target is not the one whose states a dump holds."""


class Reference(Protocol):
    """The target's own states, in a space of D numbers a row: the hidden states themselves, or projections of them."""

    name: str
    """`target` or `probe`."""
    num_layers: int

    @property
    def sample_ids(self) -> Collection[str] | None:
        """The samples whose states it knows; None: any sequence can be computed."""

    def states(self, sample_id: str, input_ids: torch.Tensor) -> Mapping[CapturePoint, torch.Tensor] | None:
        """Every capture point of that sequence, each [t, D] float32, t <= T first rows; None: not known here."""

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] into the reference's space [n, D]."""

    def norm(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The final norm of reference rows [n, D]; None where it cannot be applied (projections)."""


@runtime_checkable
class CalibratedReference(Reference, Protocol):
    """A reference that can also say how far its states move under coarser arithmetic."""

    dtype: torch.dtype
    """The arithmetic of the reference itself."""

    def coarse_states(
        self, input_ids: torch.Tensor, dtype: str, *, int8: bool = True
    ) -> Mapping[CapturePoint, torch.Tensor]:
        """Every capture point, for a 16-bit `dtype` in 16-bit arithmetic, and with `int8` with weights in int8; each
        [T, D]."""


class TargetReference:
    """A Hugging Face target on this machine. The model is loaded when the first sequence is asked for.

    `dtype` is the arithmetic of the reference: float32 unless the machine's memory forbids it. A loaded `model` may
    be given instead.
    """

    name = "target"
    sample_ids: Collection[str] | None = None

    def __init__(self, target: Target, model: Any = None, dtype: torch.dtype = torch.float32) -> None:
        self.target, self.num_layers = target, target.num_layers
        self._model, self.dtype = model, dtype

    @property
    def model(self) -> Any:
        """The transformers model; TargetError where it cannot be loaded."""
        if self._model is None:
            self._model = self.target.load_model(self.dtype)
        return self._model

    def check(self, identity: TargetIdentity) -> None:
        """Raise WrongTarget where this target is not the one that `identity` names."""
        check_identity(self.target, identity)

    def states(self, sample_id: str, input_ids: torch.Tensor) -> Mapping[CapturePoint, torch.Tensor] | None:
        outside = input_ids[(input_ids < 0) | (input_ids >= self.target.vocab_size)]
        if len(outside):
            raise WrongTarget(
                f"sample {sample_id!r} holds token id {int(outside[0])}, and {self.target.path} has ids 0 ... "
                f"{self.target.vocab_size - 1}: the dump is of another target. Give the folder that was served."
            )
        states = self.target.hidden_states(self.model, input_ids)
        return {point: state.float().cpu() for point, state in states.items()}

    def coarse_states(
        self, input_ids: torch.Tensor, dtype: str, *, int8: bool = True
    ) -> Mapping[CapturePoint, torch.Tensor]:
        with coarser_arithmetic(self.model, self.num_layers, dtype, int8=int8):
            states = self.target.hidden_states(self.model, input_ids)
        return {point: state.float().cpu() for point, state in states.items()}

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @torch.no_grad()
    def norm(self, rows: torch.Tensor) -> torch.Tensor | None:
        _, norm = decoder_parts(self.model, self.num_layers)
        weight = next(norm.parameters(), None)
        moved = rows if weight is None else rows.to(device=weight.device, dtype=weight.dtype)
        result: torch.Tensor = norm(moved)
        return result.float().cpu()


class ProbeReference:
    """A probe as the reference of an attribution: projections, no target.

    It knows the first rows of the dump's samples that it holds. Nothing can be normed in projections.
    """

    name = "probe"

    def __init__(self, probe: Probe) -> None:
        self.probe, self.num_layers = probe, probe.info.num_layers
        self._spans = {sequence.id: span for sequence, span in probe.spans() if sequence.kind == "sample"}

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The samples of the dump whose first rows are known."""
        return tuple(self._spans)

    def states(self, sample_id: str, input_ids: torch.Tensor) -> Mapping[CapturePoint, torch.Tensor] | None:
        """Every point [t, D] of the sample's first t tokens; None where it is not in the probe, or has other tokens."""
        span = self._spans.get(sample_id)
        if span is None:
            return None
        known = self.probe.input_ids[span][: len(input_ids)]
        if not torch.equal(known, input_ids[: len(known)]):
            return None
        end = span.start + len(known)
        return {p: self.probe.projections[i, span.start : end] for i, p in enumerate(self.probe.info.points)}

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        return self.probe.project(rows)

    def norm(self, _rows: torch.Tensor) -> torch.Tensor | None:
        return None


def check_identity(target: Target, identity: TargetIdentity) -> None:
    """Raise WrongTarget where a target is not the one that `identity` names. Its name and revision are labels."""
    expected = identity.model_dump(exclude={"name", "revision"})
    found = target.identity().model_dump(exclude={"name", "revision"})
    differences = [
        f"{field} is {str(found[field])[:16]} here and {str(value)[:16]} in the dump"
        for field, value in expected.items()
        if found[field] != value
    ]
    if differences:
        raise WrongTarget(
            f"{target.path} is not the target whose states the dump holds ({identity.name}): "
            f"{'; '.join(differences)}. Give the folder that was served, or the dump's own probe."
        )
