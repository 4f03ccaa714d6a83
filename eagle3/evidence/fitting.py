"""Where does a slot fit a candidate? Row by row, in the groups of rows that go wrong together, in each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.evidence.attributed import Candidate
from eagle3.evidence.matching import Matched, scaled_fit

MIN_ROWS = 8
"""Fewer rows decide nothing: neither a slot, nor a group of rows, nor a sample."""
HALF = 0.5
"""A group with a smaller share of fitting rows is spoilt as a whole."""
PARTS = ("prompts", "answers")
THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Fit:
    """A candidate, and how far each row [rows] is from it; NaN where a row tells nothing."""

    candidate: Candidate
    rows: torch.Tensor

    @property
    def error(self) -> float:
        return float(self.rows.nanmedian())


def plain_fits(slot: int, matched: Sequence[Matched], wanted: Sequence[Candidate]) -> list[Fit]:
    """Every unscaled candidate that enough rows can tell."""
    distances = torch.cat([m.distances[slot] for m in matched])  # [rows, C]
    fits = [Fit(candidate, distances[:, place]) for place, candidate in enumerate(wanted)]
    return [f for f in fits if not f.candidate.shift or int((~f.rows.isnan()).sum()) >= MIN_ROWS]


def scaled_fits(slot: int, matched: Sequence[Matched], wanted: Sequence[Candidate], least: float) -> list[Fit]:
    """Every unshifted candidate under the factor that fits best, where that is at least `least` away from 1."""
    fits = []
    for place, candidate in enumerate(wanted):
        if candidate.shift:
            break
        factor, rows = scaled_fit(matched, slot, place)
        if abs(factor) < torch.inf and abs(factor - 1) >= least:
            fits.append(Fit(candidate.model_copy(update={"scale": float(f"{factor:.4g}")}), rows))
    return fits


def groups_of(matched: Sequence[Matched]) -> dict[str, torch.Tensor]:
    """Masks [rows] of what goes wrong together; a group with too few rows is left out.

    The server computes a prompt in one pass and an answer token by token; a prefix cache or chunked prefill spoils the
    beginning of samples or most of them, a cut request their end.
    """
    answers = torch.cat([m.answers for m in matched])
    thirds = torch.cat([m.picks * 3 // (int(m.picks[-1]) + 1) for m in matched])
    masks = {name: thirds == third for third, name in enumerate(THIRDS)}
    if answers.any():
        masks = dict(zip(PARTS, (~answers, answers), strict=True)) | masks
    return {name: mask for name, mask in masks.items() if int(mask.sum()) >= MIN_ROWS}


@dataclass(frozen=True)
class Share:
    """Of `rows` rows that tell something, the share that fits."""

    fitting: float
    rows: int


def shares(rows: torch.Tensor, groups: Mapping[str, torch.Tensor], loose: float) -> dict[str, Share]:
    """Share of each group's rows that are at most `loose` away; of a group with too few rows nothing."""
    found = {}
    for name, mask in groups.items():
        telling = rows[mask & ~rows.isnan()]
        if len(telling) >= MIN_ROWS:
            found[name] = Share(float((telling <= loose).float().mean()), len(telling))
    return found


def fits_in_part(rows: torch.Tensor, groups: Mapping[str, torch.Tensor], bound: float) -> bool:
    """Whether in one group at least half of the rows are within the bound."""
    return any(share.fitting >= HALF for share in shares(rows, groups, bound).values())


def spoilt(share: Mapping[str, Share]) -> tuple[str, ...]:
    """The groups that are spoilt as a whole, by the division that tells most: prompts and answers, or thirds."""

    def contrast(names: Sequence[str]) -> float:
        found = [share[name].fitting for name in names if name in share]
        return max(found) - min(found) if found else 0.0

    names = max((PARTS, THIRDS), key=contrast)
    return tuple(name for name in names if name in share and share[name].fitting < HALF)


def elsewhere(slot: int, matched: Sequence[Matched], misfitting: torch.Tensor) -> list[tuple[int, float]]:
    """(place of a candidate, median distance) of the rows [rows] that do not fit, nearest first."""
    distances = torch.cat([m.distances[slot] for m in matched])[misfitting]
    if len(distances) < MIN_ROWS:
        return []
    telling = (~distances.isnan()).sum(0) >= MIN_ROWS
    medians = distances.nanmedian(0).values.nan_to_num(torch.inf)
    medians[~telling] = torch.inf
    order = medians.argsort(stable=True).tolist()
    return [(place, float(medians[place])) for place in order]
