"""Causal attention over packed documents by torch's fused kernels: output and log-sum-exp, and the backward pass.

Tensors are [rows, heads, D]; documents lie one after the other, their context rows in tensors of their own. The
log-sum-exp is [rows, Hq], float32 (float64 for float64 inputs). The backward pass takes output and log-sum-exp as they
are after a merge with other keys.

On the CPU a call takes neighbouring documents of one length, so nothing is padded. On CUDA one call takes them all, by
their cumulative lengths. The operators are those behind `scaled_dot_product_attention`, which does not hand out the
log-sum-exp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_HEAD_DIM = 256  # at most


class Lengths(Protocol):
    """A document's rows: see `eagle3.drafter.attention.Document`."""

    @property
    def context(self) -> int: ...
    @property
    def rows(self) -> int: ...


def supported(q: Tensor) -> bool:
    """Whether a fused kernel takes these queries [..., D]."""
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _CUDA_HEAD_DIM


def forward(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, documents: Sequence[Lengths]
) -> tuple[Tensor, Tensor]:
    """-> output [N, Hq, D] and log-sum-exp [N, Hq]."""
    if q.is_cuda:
        return _cuda_forward(q, k, v, context_k, context_v, documents)
    group = q.shape[1] // k.shape[1]
    k, v, context_k, context_v = (_widened(t, group) for t in (k, v, context_k, context_v))
    outs, totals = [], []
    for run in _runs(documents):
        queries = run.rows_of(q)
        out, lse = _CPU_FORWARD(queries, run.rows_of(k), run.rows_of(v), 0.0, True)
        if run.context:
            before, lse_before = _CPU_FORWARD(queries, run.context_of(context_k), run.context_of(context_v), 0.0, False)
            both = torch.logaddexp(lse, lse_before)
            out = out * (lse - both).exp()[..., None] + before * (lse_before - both).exp()[..., None]
            out, lse = out.to(q.dtype), both
        outs.append(_packed(out))
        totals.append(_packed(lse[..., None])[..., 0])
    return _joined(outs), _joined(totals)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, out: Tensor, total: Tensor,
    documents: Sequence[Lengths],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of q, k, v, context_k, context_v; `out` and `total` as they are after the merge."""
    if q.is_cuda:
        return _cuda_backward(grad, q, k, v, context_k, context_v, out, total, documents)
    group = q.shape[1] // k.shape[1]
    k, v, context_k, context_v = (_widened(t, group) for t in (k, v, context_k, context_v))
    into: list[list[Tensor]] = [[], [], [], [], []]
    for run in _runs(documents):
        queries, g, o = run.rows_of(q), run.rows_of(grad), run.rows_of(out)
        lse = run.rows_of(total[..., None])[..., 0].contiguous()
        dq, dk, dv = _CPU_BACKWARD(g, queries, run.rows_of(k), run.rows_of(v), o, lse, 0.0, True)
        if run.context:
            before = run.context_of(context_k), run.context_of(context_v)
            more, dck, dcv = _CPU_BACKWARD(g, queries, *before, o, lse, 0.0, False)
            dq = dq + more
            into[3].append(_packed(dck))
            into[4].append(_packed(dcv))
        for place, part in enumerate((dq, dk, dv)):
            into[place].append(_packed(part))
    dq, dk, dv = (_joined(parts) for parts in into[:3])
    dck, dcv = (_joined(parts) if parts else torch.zeros_like(context_k) for parts in into[3:])
    return dq, *(_narrowed(t, group) for t in (dk, dv, dck, dcv))


@dataclass(frozen=True)
class _Run:
    """Neighbouring documents of one length: a call for all of them."""

    number: int
    rows: int  # of each
    context: int  # of each
    first_row: int
    first_context: int

    def rows_of(self, x: Tensor) -> Tensor:
        """[N, h, D] -> [documents, h, rows, D]: a view."""
        part = x[self.first_row : self.first_row + self.number * self.rows]
        return part.unflatten(0, (self.number, self.rows)).transpose(1, 2)

    def context_of(self, x: Tensor) -> Tensor:
        part = x[self.first_context : self.first_context + self.number * self.context]
        return part.unflatten(0, (self.number, self.context)).transpose(1, 2)


def _runs(documents: Sequence[Lengths]) -> Iterator[_Run]:
    row, before = 0, 0
    for (rows, context), same in groupby((d.rows, d.context) for d in documents):
        number = len(list(same))
        yield _Run(number, rows, context, row, before)
        row, before = row + number * rows, before + number * context


def _packed(x: Tensor) -> Tensor:
    """[documents, h, rows, D] -> [documents * rows, h, D]"""
    return x.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _widened(x: Tensor, group: int) -> Tensor:
    """A key-value head for each query head."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _narrowed(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)


class _Packed:
    """Keys of context and rows side by side, as the variable-length kernels read them, and where each came from."""

    def __init__(self, documents: Sequence[Lengths], device: torch.device) -> None:
        rows = torch.tensor([d.rows for d in documents])
        every = rows + torch.tensor([d.context for d in documents])
        self.max_rows, self.max_keys = int(rows.max()), int(every.max())
        self.rows, self.keys = (
            torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]).to(device, torch.int32) for n in (rows, every)
        )
        self.order: Tensor | None = None  # of the rows in cat(context, rows)
        if int(every.sum()) > int(rows.sum()):
            own, before, order = int((every - rows).sum()), 0, []
            for d in documents:
                order += [*range(before, before + d.context), *range(own, own + d.rows)]
                own, before = own + d.rows, before + d.context
            self.order = torch.tensor(order, device=device)

    def join(self, context: Tensor, own: Tensor) -> Tensor:
        return own.contiguous() if self.order is None else torch.cat([context, own])[self.order]

    def part(self, joined: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """-> (context, own) of what `join` laid side by side."""
        if self.order is None:
            return torch.empty_like(context), joined
        parted = torch.empty_like(joined)
        parted[self.order] = joined
        return parted[: len(context)], parted[len(context) :]


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, documents: Sequence[Lengths]
) -> tuple[Tensor, Tensor]:
    packed = _Packed(documents, q.device)
    # Of unequal lengths the last query sees the last key: context lies before the rows.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.contiguous(), packed.join(context_k, k), packed.join(context_v, v), packed.rows, packed.keys,
        packed.max_rows, packed.max_keys, 0.0, True, False,
    )  # fmt: skip
    return out, lse.T.contiguous()  # lse [Hq, N]


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, out: Tensor, total: Tensor,
    documents: Sequence[Lengths],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    packed = _Packed(documents, q.device)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is not
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q.contiguous(), packed.join(context_k, k), packed.join(context_v, v), out,
        total.T.contiguous(), packed.rows, packed.keys, packed.max_rows, packed.max_keys, 0.0, True, unused, unused,
    )  # fmt: skip
    (dck, dk), (dcv, dv) = packed.part(dk, context_k), packed.part(dv, context_v)
    return dq, dk, dv, dck, dcv
