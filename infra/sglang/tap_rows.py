"""The rows that the tap keeps of a request, and how they leave a forward pass. Part of the tap: torch alone."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .tap_probe import Walk


class Capture:
    """The rows of one request, in the order of their positions, in the host's memory."""

    def __init__(self, *, probe: bool = False) -> None:
        self.rows = 0
        self.failure: str | None = None
        self.names = ("aux_hidden_states", "final_hidden_state", *(["boundaries"] if probe else []))
        self.probe = probe
        # (position, ids [rows], the states of `names`, each [rows, ...])
        self._parts: list[tuple[int, torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def write(self, position: int, ids: torch.Tensor, *states: torch.Tensor) -> None:
        """Put rows at `position` and after; what stood there is replaced (retraction, rejected drafts)."""
        if position > self.rows:
            self.fail(
                f"rows {self.rows} to {position - 1} were not computed while this request ran (a hit in the prefix "
                "cache, or a CUDA graph, which runs no hook)"
            )
            return
        self.rewind(position)
        self._parts.append((position, ids, states))
        self.rows = position + len(ids)

    def rewind(self, rows: int) -> None:
        """Forget every row at position `rows` and after."""
        while self._parts and self._parts[-1][0] >= rows:
            self._parts.pop()
        if self._parts:
            position, ids, states = self._parts[-1]
            keep = rows - position
            if keep < len(ids):
                self._parts[-1] = (position, ids[:keep], tuple(state[:keep] for state in states))
        self.rows = min(self.rows, rows)

    def fail(self, why: str) -> None:
        """This request cannot be published any more: the first reason is kept, the rows are let go."""
        self.failure = self.failure or why
        self.rewind(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the request's file holds: `input_ids` and the states by name."""
        states = {name: torch.cat([part[2][i] for part in self._parts]) for i, name in enumerate(self.names)}
        return states | {"input_ids": torch.cat([part[1] for part in self._parts]).to(torch.int64)}


class Marked(list):
    """A list of the forward batch that also carries what is captured of it.

    SGLang copies a forward batch field by field: an attribute of our own on it would be lost, its lists are handed on.
    `rids` reaches the logits processor in an eager run, `extend_seq_lens_cpu` also where a prefill graph builds a batch
    of its own (read in SGLang's source, not run: launch.py keeps these graphs off). A drafter's batches stay unmarked.
    """

    def __init__(self, items: Iterable[Any], captures: list[tuple[int, Capture]], walk: "Walk | None") -> None:
        super().__init__(items)
        self.captures = captures  # (place in the batch, capture)
        self.walk = walk  # on every rank, also on one that keeps no rows


def mark(forward_batch: Any, captures: list[tuple[int, Capture]], walk: "Walk | None") -> None:
    """Note on a forward batch which of its requests are captured, and who looks at its boundaries."""
    forward_batch.rids = Marked(forward_batch.rids, captures, walk)
    if forward_batch.extend_seq_lens_cpu is not None:
        forward_batch.extend_seq_lens_cpu = Marked(forward_batch.extend_seq_lens_cpu, captures, walk)


def mark_of(forward_batch: Any) -> Marked | None:
    lists = (getattr(forward_batch, name, None) for name in ("rids", "extend_seq_lens_cpu"))
    return next((marked for marked in lists if isinstance(marked, Marked)), None)


def collect(
    captures: list[tuple[int, Capture]],
    input_ids: Any,
    hidden_states: Any,
    logits_metadata: Any,
    walk: "Walk | None" = None,
    **more: Any,
) -> None:
    """Copy the captured requests' rows out of a forward pass: the engine uses the memory of every tensor again.

    `walk` has looked at every boundary of this pass, where a probe is among the requests.
    """
    aux = more.get("aux_hidden_states")
    if aux is None or len(aux) == 0:
        raise ValueError("the model captures no layers: the server runs without --enable-return-aux-hidden-states")
    every = spans_of(logits_metadata)
    spans = [every[index] for index, _ in captures]
    layers = [aux] if isinstance(aux, torch.Tensor) else aux  # packed, or a list of one tensor per layer
    tensors = (
        rows_of(logits_metadata.positions, spans),
        rows_of(input_ids, spans),
        torch.cat([rows_of(layer, spans) for layer in layers], dim=-1),
        rows_of(hidden_states, spans),
    )
    lengths = [end - start for start, end in spans]
    # One transfer per tensor. A sequence that is sharded over ranks has too few rows, which split refuses.
    split = [tensor.cpu().split(lengths) for tensor in tensors]
    for (index, capture), positions, *rows in zip(captures, *split, strict=True):
        where = positions.tolist()
        if where != list(range(where[0], where[0] + len(where))):
            capture.fail("its rows are not consecutive positions: a draft tree, or a sequence sharded over ranks")
            continue
        # A view would keep the rows of the whole batch in memory.
        own = rows if len(spans) == 1 else [part.clone() for part in rows]
        if capture.probe:
            if walk is None or walk.failure:
                capture.fail(f"no probe: {walk.failure if walk else 'its boundaries were not looked at'}")
                continue
            own = [*own, walk.rows(index)]
        capture.write(where[0], *own)


def spans_of(forward_batch: Any) -> list[tuple[int, int]]:
    """First and last row of every request of the batch in its packed tensors."""
    mode, size = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_target_verify():
        lengths: Sequence[int] = [forward_batch.spec_info.draft_token_num] * size
    elif mode.is_decode():
        lengths = [1] * size
    elif mode.is_extend():
        lengths = forward_batch.extend_seq_lens_cpu
    else:
        raise ValueError(f"a batch of mode {mode.name} is not known to the tap")
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def rows_of(packed: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """The rows of the spans, joined, as a tensor of their own."""
    return torch.cat([packed[start:end] for start, end in spans])
