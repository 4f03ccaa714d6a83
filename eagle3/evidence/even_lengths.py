"""Rows that were normalised one by one: each has the direction of a tensor's row, and all have one length."""

from collections.abc import Sequence

import torch

from eagle3.evidence.attributed import Candidate
from eagle3.evidence.fitting import Fit
from eagle3.evidence.matching import FARTHEST, Matched

EVEN = 0.02
"""Nine of ten rows may be at most this much longer or shorter than the median one. Storage in bfloat16 moves a length
by less than 0.004; the lengths of a residual stream differ by 5% and more."""
EVEN_SHARE = 0.9


def evened_fits(slot: int, matched: Sequence[Matched], wanted: Sequence[Candidate], least: float) -> list[Fit]:
    """The slot against every point with each row scaled to the slot's own one length; empty where lengths differ.

    Points whose rows have that length already, to within `least` in the median, are left out.

    In a probe's projection lengths are not what they were, so nothing is found there.
    """
    dots = torch.cat([m.dots[slot] for m in matched])  # [rows, C'], as are the next two
    squares = torch.cat([m.squares[slot] for m in matched])
    lengths = (torch.cat([m.lengths for m in matched]) / squares.sqrt())[:, -1]  # |row|, from any candidate
    length = float(lengths.nanmedian())
    uneven = ((lengths / length - 1).abs().nan_to_num(torch.inf) > EVEN).float().mean()
    if not 0 < length < torch.inf or float(uneven) > 1 - EVEN_SHARE:
        return []
    moved = (1 / squares.sqrt() - 1).abs().nanmedian(dim=0).values  # |row| / |candidate|, [C']
    cosines = dots / squares.sqrt()
    distances = (1 - cosines.square()).clamp(min=0).sqrt().masked_fill(cosines < 0, 1.0).nan_to_num(FARTHEST)
    return [
        Fit(candidate.model_copy(update={"length": float(f"{length:.4g}")}), distances[:, place].float())
        for place, candidate in enumerate(wanted[: distances.shape[1]])
        if not candidate.norms and float(moved[place]) >= least
    ]
