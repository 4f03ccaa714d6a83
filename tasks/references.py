"""What a dump's slots are attributed with: the target where it fits this machine, else the dump's probe."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3.dump.manifest import DumpError, Manifest
from eagle3.errors import Eagle3Error
from eagle3.target.files import TargetError

if TYPE_CHECKING:
    from eagle3.evidence.references import Reference, TargetReference
    from eagle3.target import Target

MEMORY_SHARE = 0.5
"""Of the free memory, for the weights: activations, the dump's pages and a neighbour need the rest."""


class NoReference(Eagle3Error):
    """What was named cannot be the reference of an attribution here."""


@dataclass(frozen=True)
class Chosen:
    """A reference, or why there is none."""

    reference: "Reference | None"
    why_none: str = ""


def choose_reference(
    kind: Literal["auto", "target", "probe"], target: "Target", folder: Path, manifest: Manifest
) -> Chosen:
    """The reference for the dump in `folder`. `auto`: the target itself where it can be computed here, else the
    dump's probe, else none and why. Raises NoReference or TargetError where what was asked for by name is not there.
    """
    if kind == "target":
        return Chosen(load_target(target))
    why_not_the_target = ""
    if kind == "auto":
        try:
            return Chosen(load_target(target))
        except (NoReference, TargetError) as error:
            why_not_the_target = str(error)
    probe = _probe(folder, manifest)
    if probe is not None:
        return Chosen(probe)
    if kind == "probe":
        raise NoReference(
            "the dump has no probe: extract again, or validate with the target itself (reference: target)"
        )
    return Chosen(None, f"{why_not_the_target.rstrip('.')}, and the dump has no probe that could stand in for it")


def load_target(target: "Target") -> "TargetReference":
    """The target as a reference, its model loaded. NoReference where it does not fit; TargetError as transformers says.

    In float32 where that fits into half of the free memory, else in the dtype of its weights.
    """
    import psutil
    import torch

    from eagle3.dump.content import DTYPES
    from eagle3.evidence.references import TargetReference

    stored = sum(path.stat().st_size for path in target.weights.paths())
    free = psutil.virtual_memory().available
    own = DTYPES.get(target.dtype, torch.bfloat16)
    for dtype in dict.fromkeys((torch.float32, own)):
        if stored * dtype.itemsize / own.itemsize <= MEMORY_SHARE * free:
            reference = TargetReference(target, dtype=dtype)
            _ = reference.model
            return reference
    raise NoReference(
        f"the target's weights ({stored / 1e9:.1f} GB) do not fit into half of this machine's free memory "
        f"({free / 1e9:.1f} GB)"
    )


def _probe(folder: Path, manifest: Manifest) -> "Reference | None":
    """The dump's probe; None where there is none, or a broken one, of which the check `probe` speaks."""
    from eagle3.dump.probe import read_dump_probe
    from eagle3.evidence.references import ProbeReference

    try:
        probe = read_dump_probe(folder, manifest)
    except DumpError:
        return None
    return None if probe is None else ProbeReference(probe)
