"""Are the values finite, and how large are they? One pass over the row norms answers both."""

from itertools import pairwise
from math import sqrt

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.content import DTYPES
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.evidence.examination import Findings
from eagle3.evidence.report import Check, PointStatistics

NEAR_MAX = 0.5
"""Share of the dtype's largest number from which a value counts as near to overflow."""

BINS_PER_OCTAVE, LOWEST_OCTAVE, OCTAVES = 32, -40, 104
SHRINKS = 0.8
"""A deeper slot whose median norm is below this share of a shallower one's is worth a look."""


class RowNorms:
    """`finite` and `norms`, and the statistics of the report.

    Norms inform and warn, they never fail a dump: a free alarm for gross errors (swapped slots, a scale). Neighbouring
    layers differ by 4-14%, so a right norm proves nothing.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._dtype = manifest.dtype
        self._points = {point: _Norms(manifest.target.hidden_size) for point in manifest.spec.points}
        self._limit = NEAR_MAX * torch.finfo(DTYPES[manifest.dtype]).max
        self._nonfinite, self._near_max = Findings(), Findings()
        self._blamed: dict[CapturePoint, None] = {}  # a set that keeps its order

    def see(self, sample: Sample) -> None:
        for point, norms in self._points.items():
            state = sample.states[point]
            row_norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32)  # [rows]
            # Only a row whose norm is large or not finite can hold a value that is: the others are not looked at again.
            suspects = (~(row_norms < self._limit)).nonzero().flatten().tolist()
            bad = [row for row in suspects if not bool(state[row].isfinite().all())]
            for row in suspects:
                where = f"sample {sample.id!r}, row {row}, {point}"
                if row in bad:
                    self._nonfinite.add(where)
                    self._blamed.setdefault(point)
                elif bool((state[row].abs() >= self._limit).any()):
                    self._near_max.add(where)
                    self._blamed.setdefault(point)
            finite = torch.ones(len(row_norms), dtype=torch.bool)
            finite[bad] = False
            norms.add(row_norms[finite], len(bad))

    def statistics(self) -> tuple[PointStatistics, ...]:
        return tuple(norms.statistics(point) for point, norms in self._points.items())

    def conclude(self) -> list[Check]:
        return [self._finite(), self._norms()]

    def _finite(self) -> Check:
        sentence = "Every value is finite, none near the largest number of its dtype."
        if self._nonfinite.count:
            sentence = (
                f"NaN or infinity in {self._nonfinite}. A float16 overflow, an uninitialised buffer or a failing "
                "device: look whether these samples are special (length, padding), serve the target in bfloat16, and "
                "extract them again."
            )
        elif self._near_max.count:
            sentence = (
                f"Values near the largest {self._dtype} in {self._near_max}: others may have overflowed and been "
                "clipped. Serve and store the target in bfloat16."
            )
        return Check(
            name="finite",
            verdict="fail" if self._nonfinite.count else "warn" if self._near_max.count else "pass",
            value=f"{self._nonfinite.count} rows not finite, {self._near_max.count} near the maximum",
            threshold=f"0; 0 above {NEAR_MAX:g} of the largest {self._dtype}",
            sentence=sentence,
            points=tuple(self._blamed),
        )

    def _norms(self) -> Check:
        found = [s for s in self.statistics() if s.point.boundary is not None and s.median_norm is not None]
        found.sort(key=lambda s: s.point.boundary or 0)
        shrinking = [
            (shallow, deep)
            for shallow, deep in pairwise(found)
            if (deep.median_norm or 0) < SHRINKS * (shallow.median_norm or 0)
        ]
        what = "; ".join(
            f"{deep.point} ({deep.median_norm:.3g}) is smaller than {shallow.point} ({shallow.median_norm:.3g})"
            for shallow, deep in shrinking
        )
        sentence = "The norms grow with depth, as the residual stream's usually do. They inform; they prove no layer."
        if shrinking:
            sentence = (
                f"The norms do not grow with depth: {what}. Some targets do this; otherwise two slots "
                "are exchanged, a slot is the embedding, or it was scaled. Compare with the target's own states."
            )
        return Check(
            name="norms",
            verdict="warn" if shrinking else "pass",
            value=", ".join(f"{s.point} {s.median_norm:.3g}" for s in found) or "no finite rows",
            threshold=f"median norm of a deeper slot at least {SHRINKS:g} of a shallower one's",
            sentence=sentence,
            points=tuple(dict.fromkeys(s.point for pair in shrinking for s in pair)),
        )


class _Norms:
    """Moments and a fine logarithmic histogram of the row norms of one point, in constant memory."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._count, self._nonfinite = 0, 0
        self._sum, self._squares = 0.0, 0.0
        self._min, self._max = float("inf"), 0.0
        self._histogram = torch.zeros(OCTAVES * BINS_PER_OCTAVE, dtype=torch.int64)

    def add(self, norms: torch.Tensor, nonfinite: int) -> None:
        """Row norms [rows] float32; a norm that overflowed float32 counts as float32's largest number."""
        self._nonfinite += nonfinite
        if not len(norms):
            return
        norms = norms.clamp(max=torch.finfo(torch.float32).max).double()
        self._count += len(norms)
        self._sum += float(norms.sum())
        self._squares += float(norms.square().sum())
        self._min, self._max = min(self._min, float(norms.min())), max(self._max, float(norms.max()))
        bins = ((norms.log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).clamp(0, len(self._histogram) - 1).long()
        self._histogram += torch.bincount(bins, minlength=len(self._histogram))

    def statistics(self, point: CapturePoint) -> PointStatistics:
        if not self._count:
            return PointStatistics(
                point=point,
                rows=0,
                nonfinite_rows=self._nonfinite,
                **dict.fromkeys(_MEASURES, None),
            )
        mean = self._sum / self._count
        return PointStatistics(
            point=point,
            rows=self._count,
            nonfinite_rows=self._nonfinite,
            mean_norm=mean,
            std_norm=sqrt(max(0.0, self._squares / self._count - mean**2)),
            min_norm=self._min,
            max_norm=self._max,
            p05_norm=self._quantile(0.05),
            median_norm=self._quantile(0.5),
            p95_norm=self._quantile(0.95),
            mean_rms=mean / sqrt(self._hidden_size),
        )

    def _quantile(self, share: float) -> float:
        """The middle of the bin in which that share of the rows is reached."""
        reached = int((self._histogram.cumsum(0) >= share * self._count).nonzero()[0])
        middle = 2.0 ** ((reached + 0.5) / BINS_PER_OCTAVE + LOWEST_OCTAVE)
        return min(max(middle, self._min), self._max)


_MEASURES = (
    "mean_norm",
    "std_norm",
    "min_norm",
    "max_norm",
    "p05_norm",
    "median_norm",
    "p95_norm",
    "mean_rms",
)
