"""What a training needs to go on where it stopped, on disk: bit by bit on the CPU.

A folder holds `step-00000120/` and its like, each `tensors.safetensors` (weights, moments of the optimiser, the best
weights so far, the random generator) and `state.json` (the rest). A state is written beside its place, flushed and then
renamed, so a folder by that name is whole; the last few are kept.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.digests import sha256_file
from eagle3.dump.order import Cursor
from eagle3.errors import first_fault
from eagle3.training.samples import TrainingError

_TENSORS, _STATE = "tensors.safetensors", "state.json"


class TrainingState(BaseModel):
    """Where a training stands, without its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str  # digest of all that decides the training: settings, shape, vocabulary, samples
    step: int
    rows: int
    seconds: float
    cpu_seconds: float
    cursor: Cursor | None
    length_before: float | None = None
    best_step: int = 0
    best: AcceptanceFigure | None = None
    last_length: float | None = None
    evaluations_without_gain: int = 0
    history: list[dict[str, Any]] = []
    tensors_sha256: str = ""


def save_state(folder: Path, state: TrainingState, tensors: Mapping[str, Tensor], *, keep: int) -> Path:
    """Write a state and remove the oldest beyond `keep`. TrainingError where the disk is full: what is there stays."""
    place, partial = folder / f"step-{state.step:08d}", folder / f".partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / _TENSORS)
        _flush(partial / _TENSORS)
        state = state.model_copy(update={"tensors_sha256": sha256_file(partial / _TENSORS)})
        (partial / _STATE).write_text(state.model_dump_json())
        _flush(partial / _STATE)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, and resume: the states before it are whole" if full else "the states before it stay"
        raise TrainingError(
            f"step {state.step}: its state cannot be written to {folder} ({error}); {advice}"
        ) from error
    for old in _states(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def load_state(folder: Path, run: str) -> tuple[TrainingState, dict[str, Tensor]] | None:
    """The newest whole state; None where there is none. TrainingError for a state of another training.

    A damaged state is passed over for the one before it.
    """
    for left in folder.glob(".partial-*"):  # of killed processes: resuming comes before any of ours is written
        shutil.rmtree(left, ignore_errors=True)
    faults = []
    for place in reversed(_states(folder)):
        try:
            state, tensors = _read(place)
        except (OSError, ValueError, SafetensorError) as error:
            faults.append(f"{place.name}: {error}")
            continue
        if state.run != run:
            raise TrainingError(
                f"{folder} holds the state of another training (step {state.step}, run {state.run[:16]} instead of "
                f"{run[:16]}): its settings, shape, vocabulary or samples were others. Resume with those, or name "
                "another folder"
            )
        return state, tensors
    if faults:
        raise TrainingError(f"no state under {folder} can be read: {'; '.join(faults)}. Remove it to begin anew")
    return None


def _read(place: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    try:
        state = TrainingState.model_validate_json((place / _STATE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{_STATE}: {first_fault(error)[1]}") from None
    if sha256_file(place / _TENSORS) != state.tensors_sha256:
        raise ValueError(f"{_TENSORS} is not the file that was written")
    return state, load_file(place / _TENSORS)


def _states(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-[0-9]*"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
