"""Attention of the unroll (training-time test) over packed documents, without a dense mask.

At step k a row sees the keys of step 0 of its own document up to its own row, as in causal attention, and of each later
step only **its own** key (the diagonal): what the drafter wrote there was drafted from that row, and belongs to no
other row's past. So a step is one causal attention merged with k single scores per query: O(T^2) once and O(kT).

A fused kernel gives the causal part with its log-sum-exp l. The softmax over both parts has the log-sum-exp

    L = logsumexp(l, s_1, ..., s_k)        out = exp(l - L) * causal + sum_j exp(s_j - L) * v_j

and handing the merged `out` and L to the kernel's own backward gives the gradients of its part, as in ring attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.drafter import attention_kernels

_BLOCK = 512  # rows merged at a time: what is passed over several times stays in a core's cache


@dataclass(frozen=True)
class Document:
    """One of the packed documents: `context` rows that only give keys, followed by `rows` that are computed."""

    context: int
    rows: int


def unroll_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    later_k: Sequence[Tensor],
    later_v: Sequence[Tensor],
    documents: Sequence[Document],
) -> Tensor:
    """One softmax over the step-0 keys up to the own row and the query's own key of every later step.

    N is the sum of the documents' rows, C of their context. q [1, Hq, N, D]; k0, v0 and each of later_k, later_v
    [1, Hkv, N, D]; context_k, context_v [1, Hkv, C, D]. Query head h uses key-value head h // (Hq / Hkv).
    -> [1, Hq, N, D]
    """
    if not attention_kernels.supported(q):
        return dense_unroll_attention(q, k0, v0, context_k, context_v, later_k, later_v, documents)
    parts = [t[0].transpose(0, 1) for t in (q, k0, v0, context_k, context_v, *later_k, *later_v)]  # [N, h, D]
    return _Merged.apply(tuple(documents), *parts).transpose(0, 1)[None]


class _Merged(torch.autograd.Function):
    """All tensors [rows, heads, D]."""

    @staticmethod
    def forward(
        ctx: Any, documents: tuple[Document, ...], q: Tensor, k0: Tensor, v0: Tensor,
        context_k: Tensor, context_v: Tensor, *later: Tensor,
    ) -> Tensor:  # fmt: skip
        num_later, scale = len(later) // 2, q.shape[-1] ** -0.5
        out, total = attention_kernels.forward(q, k0, v0, context_k, context_v, documents)
        kept = [torch.empty_like(total) for _ in range(num_later)]  # p_j [N, Hq]
        for rows in _blocks(len(q)) if num_later else ():
            _merge(q[rows], [t[rows] for t in later], scale, out[rows], total[rows], [p[rows] for p in kept])
        ctx.save_for_backward(q, k0, v0, context_k, context_v, out, total, *later, *kept)
        ctx.documents, ctx.num_later = documents, num_later
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, context_k, context_v, out, total, *rest = ctx.saved_tensors
        grad, n = grads[0].contiguous(), ctx.num_later
        later, kept = rest[: 2 * n], rest[2 * n :]
        dq, *into_keys = attention_kernels.backward(grad, q, k0, v0, context_k, context_v, out, total, ctx.documents)
        into_later = [torch.empty_like(t) for t in later]
        for rows in _blocks(len(q)) if n else ():
            _merge_backward(
                grad[rows], q[rows], out[rows], [t[rows] for t in later], [p[rows] for p in kept],
                dq[rows], [t[rows] for t in into_later],
            )  # fmt: skip
        return (None, dq, *into_keys, *into_later)


def _blocks(rows: int) -> list[slice]:
    return [slice(first, first + _BLOCK) for first in range(0, rows, _BLOCK)]


def _merge(
    q: Tensor, later: Sequence[Tensor], scale: float, out: Tensor, total: Tensor, kept: Sequence[Tensor]
) -> None:
    """Into `out` [n, Hq, D] and `total` [n, Hq], which hold the causal part; the weights p_j into `kept`."""
    keys, values = later[: len(kept)], later[len(kept) :]
    grouped = _grouped(q, keys[0])
    merged = total.clone()
    for key, p in zip(keys, kept, strict=True):
        p.copy_((grouped * key[:, :, None]).sum(-1, dtype=total.dtype).flatten(1).mul_(scale))
        torch.logaddexp(merged, p, out=merged)
    result = out.mul(total.sub_(merged).exp_()[..., None])  # in the type of `total`
    for value, p in zip(values, kept, strict=True):
        p.sub_(merged).exp_()
        _grouped(result, value).addcmul_(_grouped(p, value)[..., None], value[:, :, None].to(result.dtype))
    out.copy_(result)
    total.copy_(merged)


def _merge_backward(
    grad: Tensor, q: Tensor, out: Tensor, later: Sequence[Tensor], kept: Sequence[Tensor],
    dq: Tensor, into_later: Sequence[Tensor],
) -> None:  # fmt: skip
    """Adds to dq, fills the gradients of the diagonal's keys and values."""
    n, scale = len(kept), q.shape[-1] ** -0.5
    keys, values, into_keys, into_values = later[:n], later[n:], into_later[:n], into_later[n:]
    grouped_q, grouped_grad = _grouped(q, keys[0]), _grouped(grad, keys[0])  # [n, Hkv, G, D]
    delta = _grouped((grad * out).sum(-1, dtype=kept[0].dtype), keys[0])  # [n, Hkv, G]
    for key, value, p, into_key, into_value in zip(keys, values, kept, into_keys, into_values, strict=True):
        weight = _grouped(p, key)  # [n, Hkv, G]
        ds = (grouped_grad * value[:, :, None]).sum(-1, dtype=p.dtype).sub_(delta).mul_(weight).mul_(scale)
        ds, weight = ds[..., None].to(q.dtype), weight[..., None].to(q.dtype)
        _grouped(dq, key).addcmul_(ds, key[:, :, None])
        _sum_group(ds, grouped_q, into_key)
        _sum_group(weight, grouped_grad, into_value)


def _sum_group(weight: Tensor, x: Tensor, into: Tensor) -> None:
    if x.shape[2] == 1:
        torch.mul(weight[:, :, 0], x[:, :, 0], out=into)
    else:
        torch.sum(weight * x, dim=2, out=into)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[n, Hq, ...] -> [n, Hkv, G, ...]: a view."""
    return x.unflatten(1, (like.shape[1], -1))


def dense_unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, context_k: Tensor, context_v: Tensor,
    later_k: Sequence[Tensor], later_v: Sequence[Tensor], documents: Sequence[Document],
) -> Tensor:  # fmt: skip
    """The same by definition, with every key and a dense mask [N, C + N + k*N]: for tests, and where no kernel runs."""
    group, rows = q.shape[1] // k0.shape[1], q.shape[2]
    keys = torch.cat([context_k, k0, *later_k], dim=2).repeat_interleave(group, dim=1)  # [1, Hq, C + N + k*N, D]
    values = torch.cat([context_v, v0, *later_v], dim=2).repeat_interleave(group, dim=1)
    number = torch.arange(len(documents), device=q.device)
    of_row = number.repeat_interleave(torch.tensor([d.rows for d in documents], device=q.device))
    of_context = number.repeat_interleave(torch.tensor([d.context for d in documents], device=q.device))
    own_context = of_row[:, None] == of_context  # [N, C]
    own_past = (of_row[:, None] == of_row).tril()  # [N, N]
    diagonal = torch.eye(rows, dtype=torch.bool, device=q.device)
    visible = torch.cat([own_context, own_past, *[diagonal] * len(later_k)], dim=1)
    scores = (q @ keys.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1).to(values.dtype) @ values
