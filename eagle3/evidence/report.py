"""The evidence report: what was measured on a dump, and the verdict that the next stage asks for."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from eagle3.capture import CapturePoint
from eagle3.digests import sha256_json
from eagle3.errors import Eagle3Error, first_fault
from eagle3.evidence.attributed import Attribution
from eagle3.evidence.measured import EvidenceModel, Measured
from eagle3.evidence.page import attribution_lines, plain, statistics_lines
from eagle3.evidence.statistics import PointStatistics

__all__ = [
    "CHECK_SET_VERSION",
    "Check",
    "EvidenceReport",
    "OffsetAgreement",
    "PointStatistics",
    "ReportError",
    "Verdict",
    "worst",
]

CHECK_SET_VERSION = 3
"""Goes up whenever a check is added, or judges otherwise: a report says which set it passed."""

Verdict = Literal["pass", "warn", "fail"]
_ICONS: dict[Verdict, str] = {"pass": "✅ pass", "warn": "⚠️ warn", "fail": "❌ fail"}
_SINCE_2 = frozenset({"thresholds", "attribution"})
_PARTS_SINCE_2 = frozenset({"near_max_rows", "spread", "first_values", "nll"})


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """`pass` where there is none."""
    found = set(verdicts)
    return "fail" if "fail" in found else "warn" if "warn" in found else "pass"


class ReportError(Eagle3Error, ValueError):
    """A stored report that cannot be read."""


class Check(EvidenceModel):
    """One question to the data, and its answer."""

    name: str
    verdict: Verdict
    value: str = Field(description="What was measured")
    threshold: str = Field(description="What was expected")
    sentence: str = Field(description="For a person: what it means, what probably happened, what to do")
    points: tuple[CapturePoint, ...] = Field(default=(), description="The capture points that it blames, if any")


class OffsetAgreement(EvidenceModel):
    """Share of answer rows t whose final state predicts the token at t + 1 + offset."""

    offset: int
    share: Measured
    nll: Measured | None = Field(
        default=None, description="Mean -log p of that token in nats, where the answers were sampled"
    )


class EvidenceReport(EvidenceModel):
    """Every check on one dump. `dump_sha256` is the manifest's digest: the report speaks for this artifact alone."""

    dump_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    check_set_version: int = CHECK_SET_VERSION
    checks: tuple[Check, ...] = Field(min_length=1)
    statistics: tuple[PointStatistics, ...] = ()
    offsets: tuple[OffsetAgreement, ...] = ()
    attribution: Attribution | None = Field(default=None, description="None where there was no reference")
    thresholds: dict[str, float] = Field(
        default_factory=dict, description="Every number that a verdict depends on; see `eagle3.evidence.standing`"
    )
    created_at: datetime

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        """Read a stored report, also one of an older check set; `where` is named in the error."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            field, what = first_fault(error)
            raise ReportError(
                f"{where}: not a report that this software (check set {CHECK_SET_VERSION}) reads: {field}: "
                f"{what}. A newer version wrote it, or it was changed: validate the dump again"
            ) from None

    @property
    def verdict(self) -> Verdict:
        return worst(check.verdict for check in self.checks)

    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "fail")

    def digest(self) -> str:
        """sha256 of the canonical JSON without the time: the same dump, checks and thresholds give the same digest.

        What check set 1 had no field for is left out where it is empty, so that its reports keep their digest.
        """
        document: dict[str, Any] = self.model_dump(mode="json", exclude={"created_at"})
        for field in _SINCE_2 & document.keys():
            if not document[field]:
                del document[field]
        for part in (*document["statistics"], *document["offsets"]):
            for field in _PARTS_SINCE_2 & part.keys():
                if not part[field]:
                    del part[field]
        return sha256_json(document)

    def thresholds_digest(self) -> str:
        """sha256 over the thresholds by which this report judged."""
        return sha256_json(self.thresholds)

    def summary(self) -> str:
        """One sentence: may this dump be trained on, and if not, why."""
        warned = [check.name for check in self.checks if check.verdict == "warn"]
        if self.failed():
            names = ", ".join(check.name for check in self.failed())
            return f"Do not train on this dump: {len(self.failed())} of {len(self.checks)} checks failed ({names})."
        if warned:
            return f"No check failed, but look at {', '.join(warned)} before you train on this dump."
        return f"All {len(self.checks)} checks passed." if len(self.checks) > 1 else "The check passed."

    def markdown(self) -> str:
        """The report for a person: verdict, what failed and what to do, every check, the norms."""
        lines = [f"## {_ICONS[self.verdict]}: {self.summary()}", ""]
        for check in sorted(self.checks, key=lambda c: c.verdict):  # fail, pass, warn
            if check.verdict != "pass":
                lines += [f"- {_ICONS[check.verdict]} **{check.name}**: {plain(check.sentence)}"]
        lines += ["", "| check | verdict | measured | expected |", "| --- | --- | --- | --- |"]
        lines += [f"| {c.name} | {_ICONS[c.verdict]} | {plain(c.value)} | {plain(c.threshold)} |" for c in self.checks]
        if self.attribution is not None:
            lines += ["", *attribution_lines(self.attribution)]
        if self.statistics:
            lines += ["", *statistics_lines(self.statistics)]
        if self.offsets:
            shares = ", ".join(f"{o.offset:+d}: {o.share:.1%}" for o in self.offsets)
            lines += ["", f"Final state against token at t + 1 + offset: {shares}"]
        lines += [
            "",
            f"Dump `{self.dump_sha256}`, check set {self.check_set_version}, report `{self.digest()}`, "
            f"{self.created_at:%Y-%m-%d %H:%M} UTC",
        ]
        return "\n".join(lines) + "\n"
