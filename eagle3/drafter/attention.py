"""Attention of the unroll (training-time test).

At step k a row sees the keys of step 0 of all rows up to its own, as in plain causal attention, and of each later step
only **its own** key (the diagonal): what the drafter wrote there was drafted from that row, and belongs to no other
row's past. So a step is one causal attention over S keys and k single scores per query: O(S^2) once and O(kS), never a
dense [S, (k+1)S] mask.

Documents share a batch through `document`: a row sees rows of its own document only. Padding is a document of its own
(-1), so padding rows have a key to look at and no real row ever sees them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_document_mask(document: Tensor, start: int) -> Tensor:
    """Which step-0 keys each query sees: earlier or equal columns of the same document.

    document: int64 [B, S]; queries are the columns from `start` on -> bool [B, 1, R, S] with R = S - start.
    """
    columns = torch.arange(document.shape[1], device=document.device)
    causal = columns[None, :] <= columns[start:, None]  # [R, S]
    same = document[:, start:, None] == document[:, None, :]  # [B, R, S]
    return (causal & same)[:, None]


def unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, later_k: Sequence[Tensor], later_v: Sequence[Tensor], mask: Tensor
) -> Tensor:
    """One softmax over the step-0 keys under `mask` and the query's own key of every later step.

    q [B, Hq, R, D]; k0, v0 [B, Hkv, S, D]; each of later_k, later_v [B, Hkv, R, D]; mask bool [B, 1, R, S].
    Query head h uses key-value head h // (Hq / Hkv). -> [B, Hq, R, D]
    """
    batch, heads, rows, dim = q.shape
    kv_heads, columns = k0.shape[1], k0.shape[2]
    group = heads // kv_heads
    q = q.reshape(batch, kv_heads, group * rows, dim) * dim**-0.5  # the query heads of one kv head, stacked as rows
    shape = (batch, kv_heads, group, rows)

    scores = (q @ k0.mT).view(*shape, columns).float()
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    own = [(q.view(*shape, dim) * k[:, :, None]).sum(-1, keepdim=True).float() for k in later_k]  # [B, Hkv, G, R, 1]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(v0.dtype)  # [B, Hkv, G, R, S + k]

    past = weights[..., :columns].reshape(batch, kv_heads, group * rows, columns)
    out = (past @ v0).view(*shape, dim)
    for j, v in enumerate(later_v):
        out = out + weights[..., columns + j, None] * v[:, :, None]
    return out.reshape(batch, heads, rows, dim)


def dense_unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, later_k: Sequence[Tensor], later_v: Sequence[Tensor], mask: Tensor
) -> Tensor:
    """The same by definition, with every key and a dense mask [R, S + k*R]: the yardstick for faster forms."""
    group, rows = q.shape[1] // k0.shape[1], q.shape[2]
    keys = torch.cat([k0, *later_k], dim=2).repeat_interleave(group, dim=1)  # [B, Hq, S + k*R, D]
    values = torch.cat([v0, *later_v], dim=2).repeat_interleave(group, dim=1)
    diagonal = torch.eye(rows, dtype=torch.bool, device=mask.device).expand(*mask.shape[:2], rows, rows)
    visible = torch.cat([mask, *[diagonal] * len(later_k)], dim=-1)  # [B, 1, R, S + k*R]
    scores = (q @ keys.mT).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1).to(values.dtype) @ values
