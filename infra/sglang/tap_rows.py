"""The rows that the tap keeps of a request, and how they leave a forward pass. Part of the tap: torch alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, ids, states in self._parts for tensor in (ids, *states))

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What the request's file holds, each as parts along its rows: `input_ids`, then the states by name."""
        ids = torch.cat([part[1] for part in self._parts]).to(torch.int64)
        return {"input_ids": [ids]} | {name: [part[2][i] for part in self._parts] for i, name in enumerate(self.names)}


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


@dataclass
class Pass:
    """A forward pass that is over: its packed tensors, and which rows of them belong to whom.

    Made in the scheduler's thread, which only takes hold of tensors; `keep` copies, and may run in another one. What
    the engine would write over in between is a copy: token ids and positions (overlap scheduling), and everything on a
    GPU, where the copy is queued behind the pass and `ready` tells when it is there. On a CPU every pass makes its
    states anew, and they live as long as somebody holds them.
    """

    captures: list[tuple[int, Capture]]  # (place in the batch, capture)
    spans: list[tuple[int, int]]  # of each capture
    positions: torch.Tensor
    input_ids: torch.Tensor
    layers: list[torch.Tensor]  # one per layer, or all of them in one
    final: torch.Tensor
    walk: "Walk | None"
    ready: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.layers, self.final))

    def keep(self) -> None:
        """Give every capture its rows, in memory of their own: a view would keep the whole pass."""
        if self.ready is not None:
            self.ready.synchronize()
        states = [tensor.cpu() for tensor in (*self.layers, self.final)]  # one transfer each
        places, ids = self.positions.tolist(), self.input_ids.cpu()
        for (index, capture), (start, end) in zip(self.captures, self.spans, strict=True):
            where = places[start:end]
            if where != list(range(where[0], where[0] + len(where))):
                capture.fail("its rows are not consecutive positions: a draft tree, or a sequence sharded over ranks")
                continue
            *layers, final = [state[start:end] for state in states]
            own = [torch.cat(layers, dim=-1) if len(layers) > 1 else layers[0].clone(), final.clone()]
            if capture.probe:
                if self.walk is None or self.walk.failure:
                    why = self.walk.failure if self.walk else "its boundaries were not looked at"
                    capture.fail(f"no probe: {why}")
                    continue
                own.append(self.walk.rows(index))
            capture.write(where[0], ids[start:end].clone(), *own)


def collect(
    captures: list[tuple[int, Capture]],
    input_ids: Any,
    hidden_states: Any,
    logits_metadata: Any,
    walk: "Walk | None" = None,
    **more: Any,
) -> Pass:
    """Take hold of the captured requests' rows of a forward pass: `keep()` of what is returned gives them out.

    `walk` has looked at every boundary of this pass, where a probe is among the requests.
    """
    aux = more.get("aux_hidden_states")
    if aux is None or len(aux) == 0:
        raise ValueError("the model captures no layers: the server runs without --enable-return-aux-hidden-states")
    every = spans_of(logits_metadata)
    spans = [every[index] for index, _ in captures]
    layers = [aux] if isinstance(aux, torch.Tensor) else list(aux)  # packed, or a list of one tensor per layer
    shortest = min(len(tensor) for tensor in (logits_metadata.positions, input_ids, hidden_states, *layers))
    if shortest < spans[-1][1]:
        raise ValueError(f"{shortest} rows for {spans[-1][1]} tokens: the sequence is scattered over ranks")
    positions, ids, states, ready = logits_metadata.positions, input_ids, [*layers, hidden_states], None
    if not hidden_states.is_cpu:
        positions, ids, *states = [rows_of(tensor, spans) for tensor in (positions, ids, *states)]
        spans = spans_of_lengths(end - start for start, end in spans)
        if hidden_states.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        else:
            states = [tensor.cpu() for tensor in states]
    else:
        positions, ids = positions.clone(), ids.clone()
    return Pass(captures, spans, positions, ids, states[:-1], states[-1], walk, ready)


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
    return spans_of_lengths(lengths)


def spans_of_lengths(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """[2, 3] -> [(0, 2), (2, 5)]."""
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def rows_of(packed: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """The rows of the spans, joined, as a tensor of their own."""
    return torch.cat([packed[start:end] for start, end in spans])
