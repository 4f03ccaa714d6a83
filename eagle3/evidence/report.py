"""The evidence report: what was measured on a dump, and the verdict that the next stage asks for."""

from datetime import datetime
from math import isfinite
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from eagle3.capture import CapturePoint
from eagle3.digests import sha256_json

CHECK_SET_VERSION = 1
"""Goes up whenever a check is added, or judges otherwise: a report says which set it passed."""

Verdict = Literal["pass", "warn", "fail"]
_ICONS: dict[Verdict, str] = {"pass": "✅ pass", "warn": "⚠️ warn", "fail": "❌ fail"}


def _rounded(value: float) -> float:
    """Six significant digits: another machine's summation order does not change a report's digest."""
    if not isfinite(value):
        raise ValueError("a measured value must be finite; leave it out where it is not defined")
    return float(f"{value:.6g}")


Measured = Annotated[float, AfterValidator(_rounded)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(_Model):
    """One question to the data, and its answer."""

    name: str
    verdict: Verdict
    value: str = Field(description="What was measured")
    threshold: str = Field(description="What was expected")
    sentence: str = Field(description="For a person: what it means, what probably happened, what to do")
    points: tuple[CapturePoint, ...] = Field(default=(), description="The capture points that it blames, if any")


class PointStatistics(_Model):
    """L2 norms of the rows of one capture point. None where a point has no finite row."""

    point: CapturePoint
    rows: int = Field(description="Finite rows, over which the norms are taken")
    nonfinite_rows: int
    mean_norm: Measured | None
    std_norm: Measured | None
    min_norm: Measured | None
    max_norm: Measured | None
    p05_norm: Measured | None = Field(description="5th percentile, to 2%")
    median_norm: Measured | None = Field(description="Median, to 2%: unmoved by the few huge rows of attention sinks")
    p95_norm: Measured | None = Field(description="95th percentile, to 2%")
    mean_rms: Measured | None = Field(description="mean_norm / sqrt(H)")


class OffsetAgreement(_Model):
    """Share of answer rows t whose final state predicts the token at t + 1 + offset."""

    offset: int
    share: Measured


class EvidenceReport(_Model):
    """Every check on one dump. `dump_sha256` is the manifest's digest: the report speaks for this artifact alone."""

    dump_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    check_set_version: int = CHECK_SET_VERSION
    checks: tuple[Check, ...] = Field(min_length=1)
    statistics: tuple[PointStatistics, ...] = ()
    offsets: tuple[OffsetAgreement, ...] = ()
    created_at: datetime

    @property
    def verdict(self) -> Verdict:
        verdicts = {check.verdict for check in self.checks}
        return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "pass"

    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "fail")

    def digest(self) -> str:
        """sha256 of the canonical JSON without the time: the same dump and checks give the same digest."""
        return sha256_json(self.model_dump(mode="json", exclude={"created_at"}))

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
                lines += [f"- {_ICONS[check.verdict]} **{check.name}**: {_plain(check.sentence)}"]
        lines += ["", "| check | verdict | measured | expected |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {c.name} | {_ICONS[c.verdict]} | {_plain(c.value)} | {_plain(c.threshold)} |" for c in self.checks
        ]
        if self.statistics:
            lines += ["", "| point | rows | mean norm | std | median | 5% to 95% | mean RMS |"]
            lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
            lines += [_statistics_row(s) for s in self.statistics]
        if self.offsets:
            shares = ", ".join(f"{o.offset:+d}: {o.share:.1%}" for o in self.offsets)
            lines += ["", f"Final state against token at t + 1 + offset: {shares}"]
        lines += [
            "",
            f"Dump `{self.dump_sha256}`, check set {self.check_set_version}, report `{self.digest()}`, "
            f"{self.created_at:%Y-%m-%d %H:%M} UTC",
        ]
        return "\n".join(lines) + "\n"


def _statistics_row(s: PointStatistics) -> str:
    if s.mean_norm is None:
        return f"| `{s.point}` | 0 | – | – | – | – | – |"
    return (
        f"| `{s.point}` | {s.rows} | {s.mean_norm:.4g} | {s.std_norm:.3g} | {s.median_norm:.4g} | "
        f"{s.p05_norm:.4g} to {s.p95_norm:.4g} | {s.mean_rms:.4g} |"
    )


def _plain(text: str) -> str:
    """Text from a dump (sample ids, file names) as table text: it cannot break the table or bring markup."""
    for char, escaped in {"\\": "\\\\", "|": "\\|", "<": "&lt;", "`": "\\`", "[": "\\[", "\n": " ", "\r": " "}.items():
        text = text.replace(char, escaped)
    return text
