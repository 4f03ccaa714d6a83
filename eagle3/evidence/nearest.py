"""Which boundary of a probe some rows are, in the probe's projection, and what was done to them where they are none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.probe import Probe
from eagle3.evidence.attributed import Candidate
from eagle3.evidence.attribution import MARGIN, MIN_SCALING, NOWHERE, RESOLUTION, loosely, told_apart
from eagle3.evidence.calibration import UNCALIBRATED, UNCALIBRATED_SHARE
from eagle3.evidence.matching import SHIFTS

UNDEFINED = 1e6
"""Stands for a distance to rows of zeros, NaN or infinity."""


@dataclass(frozen=True)
class Nearest:
    """Which boundary of the probe some rows are. Errors: median over rows of |row - boundary| / |row|."""

    claimed: CapturePoint
    point: CapturePoint
    error: float
    runner_up: CapturePoint
    runner_up_error: float
    claimed_error: float
    bound: float
    """The largest error that noise explains."""
    least_fitting: float
    """The smallest share of rows near `point` that noise explains."""
    fitting: float = 1.0
    """Share of the rows that are near `point` one by one."""
    altered: Candidate | None = None
    """What the rows are where they are a boundary's, shifted or multiplied."""

    @property
    def fits(self) -> bool:
        return self.is_one and self.point == self.claimed and told_apart(self.error, self.runner_up_error)

    @property
    def is_one(self) -> bool:
        """These rows are a boundary's as they are."""
        return self.altered is None and self.error <= NOWHERE * self.bound and not self.scattered

    @property
    def scattered(self) -> bool:
        """Too many rows are not near what the others are."""
        return self.altered is None and self.error <= NOWHERE * self.bound and self.fitting < self.least_fitting

    @property
    def untold(self) -> bool:
        """What was claimed is within noise, and so is another boundary: the two are nearly equal in this target."""
        within = self.altered is None and self.claimed_error <= self.bound
        return within and not self.fits and not told_apart(self.error, self.claimed_error)


def nearest(
    projected: torch.Tensor, claimed: CapturePoint, boundaries: torch.Tensor, probe: Probe, lengths: Sequence[int]
) -> Nearest:
    """Rows [n, D], in the probe's projection, against every boundary [N+2, n, D] of the same tokens.

    `lengths`: the rows of each sequence, in order, n in all. Of equals the claimed boundary is the nearest.
    """
    points, bound = probe.info.points, UNCALIBRATED[probe.info.dtype]
    distances = _distances(boundaries, projected)
    errors = distances.median(dim=1).values.tolist()
    first, second = sorted(range(len(points)), key=lambda place: (errors[place], points[place] != claimed))[:2]
    return Nearest(
        claimed=claimed,
        point=points[first],
        error=errors[first],
        runner_up=points[second],
        runner_up_error=errors[second],
        claimed_error=errors[points.index(claimed)],
        bound=bound,
        least_fitting=UNCALIBRATED_SHARE[probe.info.dtype],
        fitting=float((distances[first] <= loosely(bound, errors[second])).float().mean()),
        altered=None
        if errors[first] <= RESOLUTION
        else _altered(projected, boundaries, points, lengths, min(bound, MARGIN * errors[first])),
    )


def _altered(
    rows: torch.Tensor,
    boundaries: torch.Tensor,
    points: Sequence[CapturePoint],
    lengths: Sequence[int],
    limit: float,
) -> Candidate | None:
    """The shift or the factor that brings the rows within `limit` of a boundary; None where none does."""
    found: list[tuple[float, Candidate]] = []
    for shift in SHIFTS[1:]:
        places = _shifted(lengths, shift)
        kept = places >= 0
        if not kept.any():
            continue
        errors = _distances(boundaries[:, places[kept]], rows[kept]).median(dim=1).values
        place = int(errors.argmin())
        found.append((float(errors[place]), Candidate(point=points[place], shift=shift)))
    squares = boundaries.square().sum(-1)  # [N+2, n]
    factors = ((boundaries * rows).sum(-1) / squares).nanmedian(dim=1).values.nan_to_num()  # [N+2]
    errors = _distances(factors[:, None, None] * boundaries, rows).median(dim=1).values
    for place in errors.argsort().tolist():
        factor = float(factors[place])
        if abs(factor - 1) >= MIN_SCALING:
            found.append((float(errors[place]), Candidate(point=points[place], scale=float(f"{factor:.4g}"))))
            break
    error, best = min(found, key=lambda pair: pair[0], default=(UNDEFINED, None))
    return best if error <= limit else None


def _shifted(lengths: Sequence[int], shift: int) -> torch.Tensor:
    """For every row the row `shift` further on in its own sequence; -1 where there is none."""
    places, start = [], 0
    for length in lengths:
        row = torch.arange(length) + shift
        places.append(torch.where((row >= 0) & (row < length), row + start, -1))
        start += length
    return torch.cat(places)


def _distances(boundaries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """|row - boundary| / |row|, [N+2, n]."""
    return ((boundaries - rows).norm(dim=-1) / rows.norm(dim=-1)).nan_to_num(UNDEFINED, UNDEFINED)
