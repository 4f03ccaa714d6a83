"""One sample of somebody else's dump, and what its tensors must look like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.dump.content import dtype_name
from eagle3.dump.manifest import DumpError
from eagle3.dump.slots import SlotSample

FINAL = "final"
ID_KEYS = ("input_ids", "token_ids", "tokens", "ids")
"""What others call token ids, the likeliest first."""
_MAX_JSON_BYTES = 64 * 2**20
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MissingIds(DumpError):
    """States without the token ids that they belong to."""


@dataclass(frozen=True)
class ForeignSample:
    """Slots `aux_0`, `aux_1`, ... and mostly `final`, each [T, H]; ids are None where the files hold none."""

    id: str
    where: str
    input_ids: torch.Tensor | None  # [T] int64
    states: Mapping[str, torch.Tensor]

    @property
    def rows(self) -> int:
        return len(next(iter(self.states.values())))

    def slots(self) -> SlotSample:
        """The sample for attribution; MissingIds where there is nothing to compute its states again from."""
        if self.input_ids is None:
            raise MissingIds(
                f"{self.where} has no token ids, and without them nothing can be computed again: `dump inspect` shows "
                "its shapes and norms. Give the ids with --ids FILE (JSON lines, each with `input_ids` and the "
                f"sample's `id`, here {self.id!r})"
            )
        return SlotSample(id=self.id, input_ids=self.input_ids, states=self.states)


def make_sample(sample_id: str, where: str, ids: Any, aux: Sequence[Any], final: Any | None) -> ForeignSample:
    """Check shapes and give the slots their labels. `ids` may have one token more than rows: the last was never read.

    Raises DumpError: a state that is no floating-point [T, H] or [1, T, H], rows or widths that differ, too few ids.
    """
    states = {f"aux_{i}": state_rows(state, f"{where}, aux_{i}") for i, state in enumerate(aux)}
    if final is not None:
        states[FINAL] = state_rows(final, f"{where}, {FINAL}")
    if not states:
        raise DumpError(f"{where} holds no hidden states")
    shapes = {label: list(state.shape) for label, state in states.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        found = ", ".join(f"{label} {shape}" for label, shape in shapes.items())
        raise DumpError(
            f"{where}: the slots must have the same shape [T, H]; found {found}. Rows are missing (a prefix cache or a "
            "truncation), or the parts belong to different requests"
        )
    rows = next(iter(shapes.values()))[0]
    return ForeignSample(sample_id, where, None if ids is None else token_ids(ids, rows, where), states)


def state_rows(value: Any, where: str) -> torch.Tensor:
    """A state as [T, H]; a batch dimension of one is taken off."""
    if not isinstance(value, torch.Tensor):
        raise DumpError(f"{where}: a tensor was expected, it is a {type(value).__name__}")
    state = value[0] if value.ndim == 3 and value.shape[0] == 1 else value
    if state.ndim != 2 or not state.numel() or state.dtype not in _STATE_DTYPES:
        raise DumpError(
            f"{where}: expected float32, bfloat16 or float16 [T, H] (or [1, T, H]), found {dtype_name(value.dtype)} "
            f"{list(value.shape)}"
        )
    return state


def split_width(value: Any, width: int, where: str) -> list[torch.Tensor]:
    """Slots that were concatenated along the hidden dimension, [T, k * H] -> k times [T, H]."""
    state = state_rows(value, where)
    if state.shape[1] % width:
        raise DumpError(
            f"{where} is {state.shape[1]} wide, which is no multiple of the final state's {width}: they are of "
            "different targets, or a part was cut"
        )
    return list(state.split(width, dim=1))


def ids_in(value: Any) -> Any:
    """The ids themselves: the value, or what it holds under one of `ID_KEYS`."""
    if isinstance(value, dict):
        return next((value[key] for key in ID_KEYS if key in value), None)
    return value


def read_json(path: Path) -> Any:
    """A small JSON file; DumpError where it is larger than any prompt, or broken."""
    with path.open("rb") as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise DumpError(f"{path} is larger than {_MAX_JSON_BYTES} bytes, which no token ids are")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is not valid JSON: {error}") from None


def token_ids(value: Any, rows: int, where: str) -> torch.Tensor:
    """Ids as int64 [rows]; one more id than rows is the last token, which was sampled and never read."""
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DumpError(f"{where}: the token ids are not numbers") from None
    ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DumpError(
            f"{where}: the token ids must be whole numbers [T]; found {dtype_name(ids.dtype)} {list(ids.shape)}"
        )
    if not rows <= len(ids) <= rows + 1:
        raise DumpError(
            f"{where}: {rows} rows for {len(ids)} token ids; expected as many, or one id more (the last token is never "
            "read). Rows are missing where a prefix cache answered or a request was cut"
        )
    ids = ids[:rows].long()
    if int(ids.min()) < 0:
        raise DumpError(f"{where}: there is no token id {int(ids.min())}")
    return ids
