"""What a target's slots looked like in dumps that passed: the other side of a comparison where no dump is at hand.

It stays outside of the report: a report says the same of the same dump, whatever was validated before.
"""

from typing import Literal, Self

from pydantic import Field, ValidationError

from eagle3.capture import CapturePoint
from eagle3.digests import canonical_json
from eagle3.dump.manifest import Manifest
from eagle3.errors import Eagle3Error, first_fault
from eagle3.evidence.compare import Comparison, compare_statistics
from eagle3.evidence.measured import EvidenceModel
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.statistics import RowStatistics

MAX_BASELINE_BYTES = 2**22
_MEASURES = set(RowStatistics.model_fields)


class BaselineError(Eagle3Error, ValueError):
    """A baseline that cannot be read, or made of this report."""


class BaselinePoint(EvidenceModel):
    """One capture point, as the last dump that passed had it."""

    statistics: RowStatistics
    dump_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    report_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Baseline(EvidenceModel):
    """The points of one target, stored in one dtype."""

    schema_version: Literal[1] = 1
    target: str
    weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    dtype: str
    points: dict[CapturePoint, BaselinePoint]

    @classmethod
    def of(cls, report: EvidenceReport, manifest: Manifest, before: Self | None = None) -> Self:
        """The statistics of a report that did not fail, beside those of other points from `before`.

        BaselineError where the report failed, or speaks for another dump than the manifest.
        """
        if report.verdict == "fail" or report.dump_sha256 != manifest.digest():
            raise BaselineError(
                f"a baseline needs a dump that passed: the report speaks for {report.dump_sha256[:16]} and says "
                f"{report.verdict}, the manifest is {manifest.digest()[:16]}"
            )
        new = {
            s.point: BaselinePoint(
                statistics=RowStatistics(**s.model_dump(include=_MEASURES)),
                dump_sha256=report.dump_sha256,
                report_sha256=report.digest(),
            )
            for s in report.statistics
        }
        return cls(
            target=manifest.target.name,
            weights_sha256=manifest.target.weights_sha256,
            dtype=manifest.dtype,
            points={**(before.points if before else {}), **new},
        )

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        """Read a stored baseline; `where` is named in the error."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            field, what = first_fault(error)
            raise BaselineError(
                f"{where}: not a baseline: {field}: {what}. Remove it; the next one replaces it"
            ) from None

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def compare(self, report: EvidenceReport, name: str) -> Comparison:
        """The baseline and a new report side by side, over the points that both have."""
        new = {str(s.point): s for s in report.statistics if s.point in self.points}
        old = {str(point): held.statistics for point, held in self.points.items() if point in new}
        return Comparison(first="the last dump that passed", second=name, measures=compare_statistics(old, new))


def baseline_key(manifest: Manifest) -> str:
    """Where the baseline of a target's dumps in that dtype lies in the store."""
    return f"baselines/{manifest.target.weights_sha256}-{manifest.dtype}.json"
