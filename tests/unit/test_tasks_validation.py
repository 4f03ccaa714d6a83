"""A dump that is damaged where it is published: it gets a report that says so, and its earlier one no longer counts."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagle3.dump.manifest import Manifest
from eagle3.evidence.plots import evidence_png
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import MissingObject, StoreCorrupt, open_store
from tasks import validation
from tasks.artifacts import WrongArtifact, verify_dump
from tasks.params import TargetParams, ValidateParams
from tasks.training import NoReport, require_report
from tasks.validation import DumpRejected, examine_dump, refuse_failed, report_key
from tests.dumps import flip_bit, make_dump

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


@pytest.fixture
def manifest(tiny_llama: Path, tmp_path: Path) -> Manifest:
    return make_dump(tiny_llama, tmp_path / "dump")


@pytest.fixture
def params(manifest: Manifest, tiny_llama: Path, tmp_path: Path, settings: Settings) -> ValidateParams:
    """Of a dump that passed once; the report is as short as one may be."""
    check = Check(name="integrity", verdict="pass", value="1", threshold="1", sentence="All is well.")
    report = EvidenceReport(dump_sha256=manifest.digest(), checks=(check,), created_at=datetime.now(UTC))
    store = open_store(settings.store, settings)
    store.put_bytes(report_key(manifest.digest()), report.model_dump_json().encode())
    dump = DumpRef(uri=(tmp_path / "dump").as_uri(), sha256=manifest.digest())
    return ValidateParams(dump=dump, target=TargetParams(path=str(tiny_llama)))


def kept_verdict(params: ValidateParams, settings: Settings) -> str:
    """Of the report that training would find."""
    data = open_store(settings.store, settings).get_bytes(report_key(params.dump.sha256), max_bytes=2**20)
    return EvidenceReport.model_validate_json(data).verdict


def test_a_damaged_dump_gets_a_failing_report_and_its_old_pass_no_longer_counts(
    params: ValidateParams, manifest: Manifest, tmp_path: Path, settings: Settings
) -> None:
    flip_bit(tmp_path / "dump" / manifest.shards[0].name)
    (tmp_path / "dump" / manifest.shards[1].name).unlink()
    examined = examine_dump.fn(params, settings)
    (failed,) = examined.report.failed()
    assert failed.name == "integrity"
    assert kept_verdict(params, settings) == "fail"
    assert all(entry.name in failed.sentence for entry in manifest.shards[:2])
    assert evidence_png(examined.report).startswith(b"\x89PNG")
    with pytest.raises(DumpRejected, match=manifest.shards[0].name):
        refuse_failed(examined)
    with pytest.raises(NoReport, match=r"did not pass its checks \(integrity\)"):
        require_report(params.dump, settings)


def test_a_dump_whose_manifest_is_not_there_gets_no_report(
    params: ValidateParams, tmp_path: Path, settings: Settings
) -> None:
    """A mistyped URI says nothing of the dump that the digest names."""
    (tmp_path / "dump" / "manifest.json").unlink()
    with pytest.raises(MissingObject, match=r"manifest\.json"):
        examine_dump.fn(params, settings)
    assert kept_verdict(params, settings) == "pass"


def test_another_dump_under_the_uri_gets_no_report(
    params: ValidateParams, tiny_llama: Path, tmp_path: Path, settings: Settings
) -> None:
    other = make_dump(tiny_llama, tmp_path / "other", git_commit="f" * 40)
    (tmp_path / "other" / other.shards[0].name).unlink()
    moved = params.model_copy(update={"dump": DumpRef(uri=(tmp_path / "other").as_uri(), sha256=params.dump.sha256)})
    with pytest.raises(WrongArtifact, match="was replaced"):
        examine_dump.fn(moved, settings)
    assert kept_verdict(params, settings) == "pass"


def test_damage_that_is_gone_at_a_second_look_is_no_report(
    params: ValidateParams, manifest: Manifest, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that broke off: the report of the file checks alone, which would pass, must not stand for all checks."""
    shard = tmp_path / "dump" / manifest.shards[0].name
    whole = shard.read_bytes()
    flip_bit(shard)

    def mended(uri: str, settings: Settings) -> EvidenceReport:
        shard.write_bytes(whole)
        return verify_dump(uri, settings)

    monkeypatch.setattr(validation, "verify_dump", mended)
    with pytest.raises(StoreCorrupt, match=shard.name):
        examine_dump.fn(params, settings)
