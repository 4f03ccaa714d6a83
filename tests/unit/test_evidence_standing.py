"""Reports and contracts that another version of the software made: said to be stale, with the reason."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from eagle3.contract import ContractError, DrafterContract
from eagle3.digests import sha256_json
from eagle3.evidence import alignment, slots
from eagle3.evidence.report import (
    CHECK_SET_VERSION,
    Check,
    EvidenceReport,
    OffsetAgreement,
    PointStatistics,
    ReportError,
)
from eagle3.evidence.standing import contract_standing, standing, thresholds
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import open_store
from tasks.standing import tell_standing
from tasks.training import NoReport, require_report
from tasks.validation import report_key
from tests.drafters import make_contract, make_drafter, make_vocab

pytestmark = pytest.mark.unit

CHECK = Check(name="integrity", verdict="pass", value="1", threshold="1", sentence="All is well.")
DUMP = DumpRef(uri="s3://eagle3/dumps/x", sha256="a" * 64)


def report_of(**changes: object) -> EvidenceReport:
    fields = {"dump_sha256": DUMP.sha256, "checks": (CHECK,), "thresholds": thresholds()}
    return EvidenceReport.model_validate(fields | {"created_at": datetime(2026, 1, 1, tzinfo=UTC)} | changes)


def test_a_report_of_today_is_current() -> None:
    assert standing(report_of()).current


def test_a_report_of_an_older_check_set_is_stale() -> None:
    found = standing(report_of(check_set_version=CHECK_SET_VERSION - 1))
    assert not found.current
    assert found.reason == (
        f"the report was made by check set {CHECK_SET_VERSION - 1}, this software has {CHECK_SET_VERSION}: validate "
        "the dump again"
    )


def test_a_report_of_a_newer_check_set_asks_for_an_update() -> None:
    assert standing(report_of(check_set_version=CHECK_SET_VERSION + 1)).reason.endswith("update this software")


def test_another_threshold_changes_the_digest_and_makes_older_reports_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    before = report_of()
    monkeypatch.setattr(alignment, "AGREEMENT", 0.5)
    after = report_of(thresholds=thresholds())
    assert after.digest() != before.digest()
    found = standing(before)
    assert not found.current
    assert "judged by other thresholds (alignment.agreement 0.98, now 0.5)" in found.reason
    assert standing(after).current


@pytest.mark.parametrize(
    "name",
    [
        "alignment.agreement",
        "alignment.near_tie",
        "attribution.margin",
        "calibration.uncalibrated.bfloat16",
        "even_lengths.even",
        "even_lengths.even_share",
        "norms.shrinks",
        "row_measure.near_max",
        "slots.normed_band",
        "text.drawn_excess",
        "text.ratio",
        "text.sigmas",
        "text_alignment.prompt_rows",
    ],
)
def test_the_numbers_that_a_verdict_depends_on_stand_in_the_report(name: str) -> None:
    assert name in thresholds()


# As the software of check set 1 wrote it: without thresholds, attribution, spread, first values, nll.
OLD = {
    "dump_sha256": DUMP.sha256,
    "check_set_version": 1,
    "checks": [CHECK.model_dump(mode="json")],
    "statistics": [
        {
            "point": "layers.2",
            "rows": 3,
            "nonfinite_rows": 0,
            "mean_norm": 1.5,
            "std_norm": 0.1,
            "min_norm": 1.0,
            "max_norm": 2.0,
            "p05_norm": 1.0,
            "median_norm": 1.5,
            "p95_norm": 2.0,
            "mean_rms": 0.2,
        }
    ],
    "offsets": [{"offset": 0, "share": 1.0}],
}


def test_a_report_of_check_set_1_reads_with_the_digest_that_its_contract_names() -> None:
    data = json.dumps(OLD | {"created_at": "2026-01-01T00:00:00Z"}).encode()
    old = EvidenceReport.parse(data, where="r.json")
    assert old.digest() == sha256_json(OLD)
    assert isinstance(old.statistics[0], PointStatistics)
    assert old.offsets == (OffsetAgreement(offset=0, share=1.0),)
    assert "check set 1" in standing(old).reason
    assert "check set 1" in old.markdown()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"dump_sha256": 3}', b"[1]"])
def test_what_is_no_report_is_named(data: bytes) -> None:
    with pytest.raises(ReportError, match=r"r\.json: not a report that this software .* validate the dump again"):
        EvidenceReport.parse(data, where="r.json")


def contract_of(**changes: object) -> DrafterContract:
    report = report_of()
    fields = make_contract(make_drafter(), make_vocab()).model_dump() | {
        "report_sha256": report.digest(),
        "report_check_set": report.check_set_version,
        "report_thresholds_sha256": report.thresholds_digest(),
    }
    return DrafterContract.model_validate(fields | changes)


def test_a_contract_on_the_report_of_today_is_current_with_and_without_the_report() -> None:
    assert contract_standing(contract_of()).current
    assert contract_standing(contract_of(), report_of()).current


def test_a_contract_on_another_report_than_the_one_at_hand_says_so() -> None:
    other = report_of(checks=(CHECK.model_copy(update={"value": "2"}),))
    found = contract_standing(contract_of(), other)
    assert not found.current
    assert "the one at hand is" in found.reason


def test_a_contract_on_older_checks_or_thresholds_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made by check set 1" in contract_standing(contract_of(report_check_set=1)).reason
    contract, report = contract_of(), report_of()
    monkeypatch.setattr(slots, "NORMED_BAND", 0.5)
    assert "judged by other thresholds: validate" in contract_standing(contract).reason
    assert "slots.normed_band 0.02, now 0.5" in contract_standing(contract, report).reason


def test_a_contract_of_version_1_keeps_its_digest_and_is_stale() -> None:
    new = {"report_check_set", "report_thresholds_sha256"}
    old = {k: v for k, v in contract_of().model_dump(mode="json").items() if k not in new} | {"schema_version": 1}
    contract = DrafterContract.parse(json.dumps(old).encode(), where="c")
    assert contract.digest() == sha256_json(old)
    assert "does not say which check set" in contract_standing(contract).reason
    with pytest.raises(ContractError, match="of version 1 has no check set"):
        DrafterContract.parse(json.dumps(old | {"report_check_set": 2}).encode(), where="c")


def test_a_contract_of_an_unknown_version_is_refused() -> None:
    data = json.dumps(contract_of().model_dump(mode="json") | {"schema_version": 7}).encode()
    with pytest.raises(ContractError, match=r"c: a contract of schema version 7; .* versions 1 and 2"):
        DrafterContract.parse(data, where="c")


def test_training_refuses_a_stale_report_and_says_what_to_do(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, store=(tmp_path / "store").as_uri())
    old = report_of(check_set_version=1)
    open_store(settings.store, settings).put_bytes(report_key(DUMP.sha256), old.model_dump_json().encode())
    with pytest.raises(NoReport, match=r"stale evidence report.*made by check set 1.*validate the dump again"):
        require_report(DUMP, settings)


@pytest.mark.parametrize("check_set", range(1, CHECK_SET_VERSION))
def test_a_drafter_on_an_older_check_set_is_told_of_and_not_refused(check_set: int, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, store=(tmp_path / "store").as_uri())
    old = report_of(check_set_version=check_set)
    open_store(settings.store, settings).put_bytes(report_key(DUMP.sha256), old.model_dump_json().encode())
    contract = contract_of(dump_sha256=DUMP.sha256, report_sha256=old.digest(), report_check_set=check_set)
    with disable_run_logger():
        found = tell_standing(contract, settings)
    assert not found.current
    told = f"made by check set {check_set}, this software has {CHECK_SET_VERSION}: validate the dump again"
    assert told in found.reason
    with pytest.raises(NoReport, match=f"made by check set {check_set}, .*validate the dump again"):
        require_report(DUMP, settings)
