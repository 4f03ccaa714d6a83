"""Is a report still the word of this software? Its check set and its thresholds against today's."""

from eagle3.contract import DrafterContract
from eagle3.digests import sha256_json
from eagle3.evidence import (
    alignment,
    attribution,
    attribution_check,
    calibration,
    even_lengths,
    fitting,
    matching,
    nearest,
    norms,
    probe_checks,
    row_measure,
    slots,
    text,
    text_alignment,
)
from eagle3.evidence.measured import EvidenceModel
from eagle3.evidence.report import CHECK_SET_VERSION, EvidenceReport

_JUDGES = (
    row_measure,
    text,
    alignment,
    text_alignment,
    calibration,
    matching,
    fitting,
    even_lengths,
    attribution,
    attribution_check,
    norms,
    nearest,
    probe_checks,
    slots,
)
_NO_VERDICT = frozenset({"BATCH_ROWS", "MAX_NAMED", "MAX_FINDINGS", "FIRST_VALUES", "OUTSIDE", "SUSPECTS_AT_ONCE"})
"""Numbers of these modules that no verdict depends on: how much is computed at once, or said."""


class Standing(EvidenceModel):
    """`current`, or stale: then the reason says why and what to do."""

    current: bool
    reason: str


def thresholds() -> dict[str, float]:
    """Every number that a verdict depends on, e.g. `alignment.agreement`: the constants of the modules that judge."""
    found: dict[str, float] = {}
    seen: set[tuple[str, object]] = set()
    for module in _JUDGES:
        for name, value in vars(module).items():
            # A module may import another one's constant: it is listed once, where it is met first.
            if (
                name.isupper()
                and not name.startswith("_")
                and name not in _NO_VERDICT
                and (name, repr(value)) not in seen
            ):
                numbers = _numbers(value)
                if numbers:
                    seen.add((name, repr(value)))
                key = f"{module.__name__.rpartition('.')[2]}.{name.lower()}"
                found |= {key + part: number for part, number in numbers.items()}
    return dict(sorted(found.items()))


def standing(report: EvidenceReport) -> Standing:
    """Whether the report was made by today's checks and thresholds."""
    return _standing("the report", report.check_set_version, report.thresholds_digest(), report.thresholds)


def contract_standing(contract: DrafterContract, report: EvidenceReport | None = None) -> Standing:
    """Whether the report that a contract rests on is today's; with the report at hand, also whether it is that one."""
    if report is not None and report.digest() != contract.report_sha256:
        return Standing(
            current=False,
            reason=f"the contract rests on the report {contract.report_sha256[:16]}, the one at hand is "
            f"{report.digest()[:16]}: the dump was validated again since, or the report was changed. Train again from "
            "the dump to have its drafter rest on today's report",
        )
    if contract.report_check_set is None or contract.report_thresholds_sha256 is None:
        return Standing(
            current=False,
            reason="the contract does not say which check set its report passed (an older version wrote it): validate "
            f"the dump again and train again; this software has check set {CHECK_SET_VERSION}",
        )
    return _standing(
        "the report that the contract rests on",
        contract.report_check_set,
        contract.report_thresholds_sha256,
        report.thresholds if report else None,
    )


def _standing(what: str, check_set: int, digest: str, judged_by: dict[str, float] | None) -> Standing:
    now = thresholds()
    if check_set != CHECK_SET_VERSION:
        again = "validate the dump again" if check_set < CHECK_SET_VERSION else "update this software"
        return Standing(
            current=False,
            reason=f"{what} was made by check set {check_set}, this software has {CHECK_SET_VERSION}: {again}",
        )
    if digest != sha256_json(now):
        differ = (
            [f"{k} {_told(judged_by.get(k))}, now {_told(now.get(k))}" for k in _changed(judged_by, now)]
            if judged_by
            else []
        )
        told = f" ({'; '.join(differ[:3])}{'; ...' if len(differ) > 3 else ''})" if differ else ""
        return Standing(current=False, reason=f"{what} was judged by other thresholds{told}: validate the dump again")
    return Standing(current=True, reason=f"{what} was made by check set {check_set} and today's thresholds")


def _changed(before: dict[str, float], now: dict[str, float]) -> list[str]:
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]


def _told(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _numbers(value: object) -> dict[str, float]:
    """A number, or the numbers of a tuple or a dict, by the rest of their key; empty for anything else."""
    if isinstance(value, bool):
        return {}
    if isinstance(value, int | float):
        return {"": float(value)}
    parts = enumerate(value) if isinstance(value, tuple) else value.items() if isinstance(value, dict) else ()
    return {
        f".{key}": float(part) for key, part in parts if isinstance(part, int | float) and not isinstance(part, bool)
    }
