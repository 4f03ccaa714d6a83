"""The decoder layer's input [norm(embedding), norm(hidden)] and the matrices that read it, without writing it out.

Such a matrix W is [W_e, W_h], and W x = W_e norm(e) + W_h norm(h). Step k of the unroll reads the embeddings one token
further than step k-1, so the first term is computed once for all steps and shifted; and as the embeddings are frozen,
no gradient goes there but into W_e and the norm's weight. That saves a tenth of a step's arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """In float32 at least: the type of the residual stream, norms and logits, whatever autocast makes of the rest."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class EmbeddingSide:
    """The embeddings' half for all the columns that the steps read."""

    def __init__(self, embeds: Tensor, norm_weight: Tensor, eps: float) -> None:
        """embeds [1, C, H], any float type, frozen or not; norm_weight [H] of the norm before the layer."""
        embeds = wide(embeds)
        self._unit = embeds * torch.rsqrt(embeds.square().mean(-1, keepdim=True) + eps)
        self._norm_weight = norm_weight
        self._halves: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

    def step(self, first: int, rows: int) -> Callable[[Tensor], "LayerInput"]:
        """For a step whose row i reads column first + i: what joins its normed hidden state [1, rows, H] to them."""
        return partial(LayerInput, self, first, rows)

    def project(self, linear: nn.Linear, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """-> (W_e norm(e) [rows, out], W_h [out, H])"""
        if linear not in self._halves:
            into_embedding, into_hidden = linear.weight.chunk(2, dim=1)
            projected = F.linear(self._unit[0], into_embedding * self._norm_weight)
            self._halves[linear] = projected, into_hidden
        projected, into_hidden = self._halves[linear]
        return projected[first : first + rows], into_hidden


@dataclass(frozen=True)
class LayerInput:
    """Twice H wide, for T rows; never written out."""

    side: EmbeddingSide
    first: int
    rows: int
    normed: Tensor  # [1, T, H]

    def through(self, linear: nn.Linear) -> Tensor:
        """linear(x): [1, T, out]. The linear has no bias."""
        embedding_part, into_hidden = self.side.project(linear, self.first, self.rows)
        return torch.addmm(embedding_part, self.normed[0], into_hidden.T)[None]
