"""The baseline in the store: made by the first dump that passes, renewed by the next, never by one that failed."""

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from eagle3.dump.reader import DumpReader
from eagle3.evidence.baseline import Baseline, baseline_key
from eagle3.evidence.validate import validate_dump
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import MissingObject, open_store
from tasks.baselines import compare_with_baseline
from tasks.validation import Examined
from tests.dumps import capture, with_states, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


def test_a_dump_that_passed_becomes_the_baseline_and_the_next_is_compared(
    tiny_llama: Path, tmp_path: Path, settings: Settings
) -> None:
    captured = capture(tiny_llama)
    manifest = write_dump(captured, tmp_path / "dump")
    report = validate_dump(DumpReader.open(tmp_path / "dump"), captured.parts)
    examined = Examined(DumpRef(uri=(tmp_path / "dump").as_uri(), sha256=manifest.digest()), report)
    with disable_run_logger():
        assert compare_with_baseline.fn(examined, settings) is None
        again = compare_with_baseline.fn(examined, settings)
    assert again is not None
    assert again.verdict == "pass"
    stored = open_store(settings.store, settings).get_bytes(baseline_key(manifest), max_bytes=2**20)
    assert Baseline.parse(stored, where="store").points["norm"].report_sha256 == report.digest()


def test_a_dump_that_failed_becomes_no_baseline(tiny_llama: Path, tmp_path: Path, settings: Settings) -> None:
    captured = capture(tiny_llama)
    late = lambda s: with_states(s, {"norm": s.states["norm"].roll(1, 0)})  # noqa: E731
    manifest = write_dump(captured, tmp_path / "dump", alter=late)
    report = validate_dump(DumpReader.open(tmp_path / "dump"), captured.parts)
    examined = Examined(DumpRef(uri=(tmp_path / "dump").as_uri(), sha256=manifest.digest()), report)
    with disable_run_logger():
        assert compare_with_baseline.fn(examined, settings) is None
    with pytest.raises(MissingObject):
        open_store(settings.store, settings).get_bytes(baseline_key(manifest), max_bytes=2**20)
