"""The report: its verdict, its digest, and the page that a person sees."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.files import verify_integrity
from eagle3.evidence.references import TargetReference
from eagle3.evidence.report import Check, EvidenceReport, OffsetAgreement
from eagle3.evidence.validate import validate_dump
from eagle3.target import Target
from tests.dumps import Capture, capture, with_states, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture(scope="module")
def folder(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    write_dump(captured, path)
    return path


@pytest.fixture(scope="module")
def report(captured: Capture, folder: Path) -> EvidenceReport:
    return examine(captured, folder)


def examine(captured: Capture, folder: Path) -> EvidenceReport:
    return validate_dump(
        DumpReader.open(folder), captured.parts, reference=TargetReference(Target.open(captured.target))
    )


@pytest.fixture(scope="module")
def faulty(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> EvidenceReport:
    path = tmp_path_factory.mktemp("faulty")
    write_dump(
        captured,
        path,
        alter=lambda s: with_states(s, {"layers.1": s.states["embed"], "norm": s.states["norm"].roll(1, 0)}),
    )
    return examine(captured, path)


def test_the_worst_check_is_the_verdict(report: EvidenceReport, faulty: EvidenceReport) -> None:
    assert report.verdict == "pass"
    assert report.failed() == ()
    warned = report.checks[0].model_copy(update={"verdict": "warn"})
    assert report.model_copy(update={"checks": (warned, *report.checks[1:])}).verdict == "warn"
    assert faulty.verdict == "fail"
    assert [check.name for check in faulty.failed()] == ["embed", "probe", "final_state", "attribution"]


def test_a_report_without_checks_is_no_report(report: EvidenceReport) -> None:
    with pytest.raises(ValidationError):
        EvidenceReport(dump_sha256=report.dump_sha256, checks=(), created_at=report.created_at)


def test_the_same_dump_gives_the_same_digest_at_any_time(
    captured: Capture, folder: Path, report: EvidenceReport
) -> None:
    again = examine(captured, folder)
    assert again.digest() == report.digest()
    later = report.model_copy(update={"created_at": report.created_at + timedelta(days=1)})
    assert later.digest() == report.digest()
    other = report.model_copy(update={"dump_sha256": "0" * 64})
    assert other.digest() != report.digest()


def test_a_report_reads_back_with_its_digest(report: EvidenceReport) -> None:
    again = EvidenceReport.model_validate_json(report.model_dump_json())
    assert again == report
    assert again.digest() == report.digest()


def test_measured_values_are_rounded_and_never_nan() -> None:
    assert OffsetAgreement(offset=0, share=0.123456789).share == 0.123457
    with pytest.raises(ValidationError, match="finite"):
        OffsetAgreement(offset=0, share=float("nan"))


def test_the_page_starts_with_the_verdict_and_says_what_to_do(report: EvidenceReport, faulty: EvidenceReport) -> None:
    assert report.markdown().startswith("## ✅ pass: All 15 checks passed.\n")
    lines = faulty.markdown().splitlines()
    assert lines[0] == (
        "## ❌ fail: Do not train on this dump: 4 of 15 checks failed (embed, probe, final_state, attribution)."
    )
    assert "**embed**: A label and the data disagree" in lines[2]
    assert any("**final_state**: The final states fit the tokens at offset -1" in line for line in lines[3:6])
    table = [line for line in lines if line.startswith("| ")]
    assert sum("❌ fail" in line for line in table) == 4
    assert sum("❌ refuted" in line for line in table) == 2
    assert any(line.startswith("| `layers.3` | ") and "(dimension " in line for line in table)


def test_names_from_a_dump_cannot_break_the_page(captured: Capture, tmp_path: Path) -> None:
    evil = "a | b\n# <script>alert(1)</script> [x](http://y) `"

    def plant(sample: CapturedSample) -> CapturedSample:
        if sample.id != "p00000":
            return sample
        return replace(with_states(sample, {"norm": sample.states["norm"] * float("nan")}), id=evil)

    write_dump(captured, tmp_path, alter=plant)
    page = validate_dump(DumpReader.open(tmp_path), captured.parts).markdown()
    assert "<script>" not in page
    assert "\n# " not in page
    assert "[x](" not in page.replace("\\[x](", "")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5, 7, 11}


def test_the_integrity_report_alone_has_a_page(folder: Path) -> None:
    assert verify_integrity(folder).markdown().startswith("## ✅ pass: The check passed.")


def test_a_check_is_frozen() -> None:
    check = Check(name="x", verdict="pass", value="1", threshold="1", sentence="fine")
    with pytest.raises(ValidationError):
        check.verdict = "fail"
