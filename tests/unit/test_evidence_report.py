"""The report: its verdict, its digest, and the page and picture that a person sees."""

from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.plots import evidence_png
from eagle3.evidence.report import Check, EvidenceReport, OffsetAgreement
from eagle3.evidence.validate import validate_dump, verify_integrity
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
    return validate_dump(DumpReader.open(folder), captured.parts)


@pytest.fixture(scope="module")
def faulty(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> EvidenceReport:
    path = tmp_path_factory.mktemp("faulty")
    write_dump(
        captured,
        path,
        alter=lambda s: with_states(s, {"layers.1": s.states["embed"], "norm": s.states["norm"].roll(1, 0)}),
    )
    return validate_dump(DumpReader.open(path), captured.parts)


def test_the_worst_check_is_the_verdict(report: EvidenceReport, faulty: EvidenceReport) -> None:
    assert report.verdict == "pass"
    assert report.failed() == ()
    warned = report.checks[0].model_copy(update={"verdict": "warn"})
    assert report.model_copy(update={"checks": (warned, *report.checks[1:])}).verdict == "warn"
    assert faulty.verdict == "fail"
    assert [check.name for check in faulty.failed()] == ["embed", "final_state"]


def test_a_report_without_checks_is_no_report(report: EvidenceReport) -> None:
    with pytest.raises(ValidationError):
        EvidenceReport(dump_sha256=report.dump_sha256, checks=(), created_at=report.created_at)


def test_the_same_dump_gives_the_same_digest_at_any_time(
    captured: Capture, folder: Path, report: EvidenceReport
) -> None:
    again = validate_dump(DumpReader.open(folder), captured.parts)
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
    assert report.markdown().startswith("## ✅ pass: All 12 checks passed.\n")
    lines = faulty.markdown().splitlines()
    assert lines[0] == "## ❌ fail: Do not train on this dump: 2 of 12 checks failed (embed, final_state)."
    assert "**embed**: A label and the data disagree" in lines[2]
    assert "**final_state**: The final states fit the tokens at offset -1" in lines[3]
    table = [line for line in lines if line.startswith("| ")]
    assert sum("❌ fail" in line for line in table) == 2
    assert any(line.startswith("| `layers.3` |") for line in table)


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
    assert {line.replace("\\|", "").count("|") for line in rows} == {5, 8}


def test_the_integrity_report_alone_has_a_page_and_a_picture(folder: Path) -> None:
    report = verify_integrity(folder)
    assert report.markdown().startswith("## ✅ pass: The check passed.")
    assert evidence_png(report).startswith(b"\x89PNG")


def colours(png: bytes) -> set[str]:
    """Which verdict colours a picture shows in some area."""
    image = Image.open(BytesIO(png)).convert("RGB")
    counts = {colour: count for count, colour in image.getcolors(1 << 24)}
    named = {"green": (0x1A, 0x7F, 0x37), "red": (0xCF, 0x22, 0x2E), "amber": (0x9A, 0x67, 0x00)}
    return {name for name, colour in named.items() if counts.get(colour, 0) > 100}


def test_a_fault_is_red_in_the_picture(report: EvidenceReport, faulty: EvidenceReport) -> None:
    assert colours(evidence_png(report)) == {"green"}
    assert colours(evidence_png(faulty)) == {"green", "red"}  # the slots that are right stay green


def test_a_slot_without_finite_rows_does_not_break_the_picture(captured: Capture, tmp_path: Path) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        return with_states(sample, {"norm": torch.full_like(sample.states["norm"], float("inf"))})

    write_dump(captured, tmp_path, alter=plant)
    report = validate_dump(DumpReader.open(tmp_path), captured.parts)
    assert "red" in colours(evidence_png(report))


def test_a_check_is_frozen() -> None:
    check = Check(name="x", verdict="pass", value="1", threshold="1", sentence="fine")
    with pytest.raises(ValidationError):
        check.verdict = "fail"
