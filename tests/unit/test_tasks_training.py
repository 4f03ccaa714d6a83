"""What training refuses: a dump that nobody validated or that failed, and a dump of another target."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagle3.dump.manifest import Manifest
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.standing import thresholds
from eagle3.refs import DumpRef
from eagle3.target import Target
from eagle3.training.run import Progress
from infra.settings import Settings
from infra.store import open_store
from tasks.advice import few_samples
from tasks.results import TrainResult
from tasks.training import (
    NoReport,
    WrongTarget,
    check_target,
    memory_bytes,
    require_report,
    said,
    slow_reading,
)
from tasks.validation import report_key
from tests.dumps import capture, write_dump
from tests.targets import make_llama

pytestmark = pytest.mark.unit

DUMP = DumpRef(uri="s3://eagle3/dumps/x", sha256="a" * 64)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, store=(tmp_path / "store").as_uri())


def publish(settings: Settings, verdict: str, dump_sha256: str = DUMP.sha256) -> EvidenceReport:
    check = Check.model_validate(
        {"name": "integrity", "verdict": verdict, "value": "1", "threshold": "2", "sentence": "A file differs."}
    )
    report = EvidenceReport(
        dump_sha256=dump_sha256, checks=(check,), thresholds=thresholds(), created_at=datetime.now(UTC)
    )
    open_store(settings.store, settings).put_bytes(report_key(DUMP.sha256), report.model_dump_json().encode())
    return report


def test_a_dump_without_a_report_is_refused(settings: Settings) -> None:
    with pytest.raises(NoReport, match=r"has no evidence report .*Run the validate flow"):
        require_report(DUMP, settings)


def test_a_dump_that_failed_is_refused_by_the_name_of_the_check(settings: Settings) -> None:
    publish(settings, "fail")
    with pytest.raises(NoReport, match=r"did not pass its checks \(integrity\)"):
        require_report(DUMP, settings)


def test_the_report_of_another_dump_proves_nothing(settings: Settings) -> None:
    publish(settings, "pass", dump_sha256="b" * 64)
    with pytest.raises(NoReport, match="another dump's report"):
        require_report(DUMP, settings)


def test_a_report_that_passed_is_returned(settings: Settings) -> None:
    published = publish(settings, "warn")
    assert require_report(DUMP, settings) == published


def dump_of(target: Target, folder: Path) -> Manifest:
    captured = capture(target.path)
    return write_dump(captured, folder, target=target.identity(), tokenizer=target.tokenizer_identity())


def test_a_copy_of_the_target_under_another_name_is_the_target(tiny_llama: Path, tmp_path: Path) -> None:
    target = Target.open(tiny_llama)
    manifest = dump_of(target, tmp_path / "dump")
    copy = tmp_path / "copy of it"
    shutil.copytree(tiny_llama, copy)
    check_target(manifest, Target.open(copy))


def test_another_target_is_refused_by_the_field_that_differs(tiny_llama: Path, tmp_path: Path) -> None:
    target = Target.open(tiny_llama)
    manifest = dump_of(target, tmp_path / "dump")
    other = make_llama(tmp_path / tiny_llama.name, seed=1)
    with pytest.raises(WrongTarget, match="weights_sha256 is ") as refused:
        check_target(manifest, Target.open(other))
    assert "config_sha256" not in str(refused.value)

    retold = tmp_path / "retold"
    shutil.copytree(tiny_llama, retold)
    (retold / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(WrongTarget, match=r"tokenizer\.chat_template_sha256") as refused:
        check_target(manifest, Target.open(retold))
    assert "weights_sha256" not in str(refused.value)


def test_a_dump_larger_than_the_memory_is_told_with_both_sizes() -> None:
    assert 2**28 < memory_bytes() < 2**50
    assert slow_reading(64 * 10**9, 128 * 10**9) is None
    note = slow_reading(3440 * 10**9, 128 * 10**9)
    assert note is not None
    assert "3440.0 GB of states and this machine 128.0 GB of memory" in note


def test_a_dump_smaller_than_advisable_is_told_with_its_figures() -> None:
    assert few_samples(5000) is None
    note = few_samples(120)
    assert note is not None
    assert "120 training prompts are fewer than 5000" in note


def test_a_line_of_progress_tells_loss_pace_and_acceptance() -> None:
    now = Progress("train", 0.5, 3.0, 20, 1.2345, (0.5,), 2512.4, 2.345)
    assert said(now) == "step 20, loss 1.234, 2512 tokens/s, held-out length 2.35"
    assert said(Progress("prepare", 0.5, None)) == "prepare"


def test_a_training_without_held_out_samples_claims_no_acceptance() -> None:
    checkpoint = {"uri": "s3://eagle3/drafters/x", "sha256": "a" * 64}
    fields = {"checkpoint": checkpoint, "mlflow_run_id": "r", "model_id": "m", "steps": 3, "seconds": 1.0}
    result = TrainResult.model_validate(fields | {"simulated_length": None})
    assert TrainResult.model_validate_json(result.model_dump_json()).simulated_length is None
