"""Running the drafter: the unroll over whole sequences (training, simulation), and one token at a time with a cache.

Alignment. Row p pairs the target's state g_p with the embedding of token p+1; its target distribution is the target's
own after token p+1, which predicts token p+2. Step k takes step k-1's output in the place of g_p and everything else
one further to the left: ids a b c d e, step 0 and step 1:

    row 0:  g_a    emb(b) -> the token after b        h_0  emb(c) -> the token after c
    row 1:  g_b    emb(c) -> the token after c        h_1  emb(d) -> the token after d
    row 2:  g_c    emb(d) -> the token after d        h_2  emb(e) -> (no target state left)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3.drafter.attention import causal_document_mask, unroll_attention
from eagle3.drafter.model import Drafter


def unroll(
    drafter: Drafter, embeds: Tensor, aux: Tensor, document: Tensor, positions: Tensor, *, start: int, num_steps: int
) -> Iterator[Tensor]:
    """Yield every step's hidden state (before `norm`) for the rows from `start` on: float32 [B, R, H], R = S - start.

    embeds [B, >= S + num_steps, H]: embeddings of the tokens, column c of token c (row c uses column c+1+k at step k);
    aux [B, S, K*H]; document int64 [B, S], -1 for padding; positions int64 [B, S] inside the document. Rows before
    `start` are context: they only give keys at step 0, so nothing else is computed for them.
    """
    columns = document.shape[1]
    mask = causal_document_mask(document, start)  # [B, 1, R, S]
    hidden = drafter.fuse(aux)  # [B, S, H]
    x, hidden = drafter.attention_input(embeds[:, 1 : columns + 1], hidden)
    k0, v0 = drafter.key_value(x, drafter.rope(positions))
    x, hidden, positions = x[:, start:], hidden[:, start:], positions[:, start:]

    later_k: list[Tensor] = []
    later_v: list[Tensor] = []
    for k in range(num_steps):
        cos_sin = drafter.rope(positions + k)
        if k > 0:
            embed = embeds[:, start + 1 + k : columns + 1 + k]  # teacher forced
            x, hidden = drafter.attention_input(embed, drafter.next_hidden(hidden))
            key, value = drafter.key_value(x, cos_sin)
            later_k.append(key)
            later_v.append(value)
        attended = unroll_attention(drafter.query(x, cos_sin), k0, v0, later_k, later_v, mask)
        hidden = drafter.finish(hidden, attended)
        yield hidden


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
    x, residual = drafter.attention_input(embed, hidden)
    cos_sin = drafter.rope(torch.tensor([[position]], device=embed.device))
    key, value = drafter.key_value(x, cos_sin)
    cache.keys.append(key)
    cache.values.append(value)
    keys, values = torch.cat(cache.keys, dim=2), torch.cat(cache.values, dim=2)  # [1, Hkv, n, D]
    everything = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device=embed.device)
    attended = unroll_attention(drafter.query(x, cos_sin), keys, values, [], [], everything)
    return drafter.finish(residual, attended)
