"""Running the drafter: the unroll over whole sequences (training, simulation), and one token at a time with a cache.

Alignment. Row p pairs the target's state g_p with the embedding of token p+1; its target distribution is the target's
own after token p+1, which predicts token p+2. Step k takes step k-1's output in the place of g_p and everything else
one further to the left: ids a b c d e, step 0 and step 1:

    row 0:  g_a    emb(b) -> the token after b        h_0  emb(c) -> the token after c
    row 1:  g_b    emb(c) -> the token after c        h_1  emb(d) -> the token after d
    row 2:  g_c    emb(d) -> the token after d        h_2  emb(e) -> (no target state left)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.drafter.attention import Document, unroll_attention
from eagle3.drafter.model import Drafter
from eagle3.drafter.packing import PackedBatch


def unroll(
    drafter: Drafter,
    embedding: Tensor,
    batch: PackedBatch,
    num_steps: int,
    *,
    attention: Callable[..., Tensor] = unroll_attention,
) -> Iterator[Tensor]:
    """Yield every step's hidden state (before `norm`) of the packed rows: float32 [1, N, H].

    embedding [V_target, H], on the batch's device. `attention`: `dense_unroll_attention` is the yardstick.
    """
    rows = batch.num_rows
    none = batch.context_aux.shape[0] == 0
    context = _context(drafter, embedding, batch) if not none else None
    embeds = drafter.embedding_side(F.embedding(batch.ids[: rows + num_steps - 1], embedding)[None])
    hidden = drafter.fuse(batch.aux[None])

    keys: list[Tensor] = []
    values: list[Tensor] = []
    for k in range(num_steps):
        x, residual = drafter.attention_input(embeds.step(k, rows), drafter.next_hidden(hidden) if k else hidden)
        cos_sin = drafter.rope(batch.positions[None] + k)
        q = drafter.query(x, cos_sin)
        key, value = drafter.key_value(x, cos_sin)
        keys.append(key)
        values.append(value)
        context_k, context_v = context or (key[:, :, :0], value[:, :, :0])
        attended = attention(q, keys[0], values[0], context_k, context_v, keys[1:], values[1:], batch.documents)
        hidden = drafter.finish(residual, attended)
        yield hidden


def _context(drafter: Drafter, embedding: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Keys and values of the context, [1, Hkv, C, D]."""
    side = drafter.embedding_side(F.embedding(batch.context_ids, embedding)[None])
    x, _ = drafter.attention_input(side.step(0, len(batch.context_ids)), drafter.fuse(batch.context_aux[None]))
    return drafter.key_value(x, drafter.rope(batch.context_positions[None]))


@dataclass
class DraftCache:
    """Keys and values of one sequence so far, [1, Hkv, n, D] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def copy(self) -> "DraftCache":
        """A branch: what is drafted on it does not touch this one (the rollback after a verification)."""
        return DraftCache(list(self.keys), list(self.values))


def decode_step(drafter: Drafter, cache: DraftCache, embed: Tensor, hidden: Tensor, position: int) -> Tensor:
    """One row as serving runs it: write its key and value, attend to the cache -> hidden before `norm`, [1, 1, H].

    embed [1, 1, H] of the token after the row's own; hidden [1, 1, H]: `drafter.fuse(...)` for a row of the target, or
    `drafter.next_hidden(...)` of the previous step.
    """
    x, residual = drafter.attention_input(drafter.embedding_side(embed).step(0, 1), hidden)
    cos_sin = drafter.rope(torch.tensor([[position]], device=embed.device))
    key, value = drafter.key_value(x, cos_sin)
    past_k, past_v = (torch.cat([t[:, :, :0], *past], dim=2) for t, past in ((key, cache.keys), (value, cache.values)))
    cache.keys.append(key)
    cache.values.append(value)
    query, document = drafter.query(x, cos_sin), Document(context=past_k.shape[2], rows=1)
    attended = unroll_attention(query, key, value, past_k, past_v, [], [], [document])
    return drafter.finish(residual, attended)
