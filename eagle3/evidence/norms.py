"""Are the values finite, and how large are they? One pass over the rows answers both."""

from itertools import pairwise

from eagle3.capture import CapturePoint
from eagle3.dump.content import DTYPES
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.evidence.examination import Findings
from eagle3.evidence.report import Check
from eagle3.evidence.row_measure import NEAR_MAX, RowMeasure
from eagle3.evidence.statistics import PointStatistics

SHRINKS = 0.8
"""A deeper slot whose median norm is below this share of a shallower one's is worth a look."""


class RowNorms:
    """`finite` and `norms`, and the statistics of the report.

    Norms inform and warn, they never fail a dump: a free alarm for gross errors (swapped slots, a scale). Neighbouring
    layers differ by 4-14%, so a right norm proves nothing.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._dtype = manifest.dtype
        hidden_size, dtype = manifest.target.hidden_size, DTYPES[manifest.dtype]
        self._points = {point: RowMeasure(hidden_size, dtype) for point in manifest.spec.points}
        self._nonfinite, self._near_max, self._zero = Findings(), Findings(), Findings()
        self._blamed: dict[CapturePoint, None] = {}  # a set that keeps its order

    def see(self, sample: Sample) -> None:
        for point, measure in self._points.items():
            suspects = measure.see(sample.states[point])
            # A table may hold zeros for a token that is never used; no layer makes a row of zeros.
            zero = () if point == "embed" else suspects.zero
            for rows, findings in (
                (suspects.nonfinite, self._nonfinite),
                (suspects.near_max, self._near_max),
                (zero, self._zero),
            ):
                for row in rows:
                    findings.add(f"sample {sample.id!r}, row {row}, {point}")
                    self._blamed.setdefault(point)

    def join(self, later: "RowNorms") -> None:
        """The samples that another worker saw, after these."""
        for point, measure in self._points.items():
            measure.join(later._points[point])
        for findings, more in (
            (self._nonfinite, later._nonfinite),
            (self._near_max, later._near_max),
            (self._zero, later._zero),
        ):
            findings.join(more)
        self._blamed |= later._blamed

    def statistics(self) -> tuple[PointStatistics, ...]:
        return tuple(PointStatistics(point=point, **measure.measures()) for point, measure in self._points.items())

    def conclude(self) -> list[Check]:
        return [self._finite(), self._norms()]

    def _finite(self) -> Check:
        sentence = "Every value is finite, none near the largest number of its dtype; no row is all zeros."
        if self._zero.count:
            sentence = (
                f"Nothing but zeros in {self._zero}. No layer makes such a row: its place was never filled (a prefix "
                "cache, a chunk or a decode step that was not captured). Look where the capture writes its rows, and "
                "extract again."
            )
            if self._nonfinite.count:
                sentence += f" And NaN or infinity in {self._nonfinite}."
        elif self._nonfinite.count:
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
            verdict="fail" if self._nonfinite.count or self._zero.count else "warn" if self._near_max.count else "pass",
            value=f"{self._nonfinite.count} rows not finite, {self._near_max.count} near the maximum, "
            f"{self._zero.count} of zeros",
            threshold=f"0; 0 above {NEAR_MAX:g} of the largest {self._dtype}; 0",
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
