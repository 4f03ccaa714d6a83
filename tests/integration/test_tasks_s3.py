"""Tasks against a real S3 server: a damaged dump is refuted, a server that is gone is not an answer."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.contract import ContractError
from eagle3.digests import sha256_file
from eagle3.drafter.checkpoint import load_checkpoint, save_checkpoint
from eagle3.dump.manifest import Manifest
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import StoreUnreachable, open_store
from tasks.artifacts import CannotCheck, publish_checkpoint, verify_dump
from tasks.drafters import drafter_at
from tasks.training import require_report
from tests.drafters import ENGINE_IDS, make_contract, make_drafter, make_vocab
from tests.dumps import flip_bit, make_dump
from tests.integration.s3_server import S3Server, s3_server

pytestmark = pytest.mark.integration

URI = "s3://test-bucket/dumps/a"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as server:
        yield server


@pytest.fixture
def settings(server: S3Server) -> Settings:
    return server.settings(s3_retries=0, s3_timeout=5)


@pytest.fixture
def manifest(tiny_llama: Path, tmp_path: Path, settings: Settings) -> Manifest:
    manifest = make_dump(tiny_llama, tmp_path / "dump")
    open_store(settings.store, settings).ensure_bucket()
    for path in (tmp_path / "dump").iterdir():
        open_store(URI, settings).put_file(path.name, path, sha256=sha256_file(path))
    return manifest


def test_a_stored_dump_is_proven_and_a_damaged_one_refuted_by_object(
    manifest: Manifest, settings: Settings, tmp_path: Path
) -> None:
    assert verify_dump(URI, settings).verdict == "pass"
    store, (first, second, *_) = open_store(URI, settings), manifest.shards
    flip_bit(tmp_path / "dump" / first.name)
    store.put_file(first.name, tmp_path / "dump" / first.name, sha256=sha256_file(tmp_path / "dump" / first.name))
    store.delete(second.name)
    report = verify_dump(URI, settings)
    assert (report.verdict, report.dump_sha256) == ("fail", manifest.digest())
    assert f"{URI}/{first.name} should have sha256 {first.sha256}" in report.checks[0].sentence
    assert f"{URI}/{second.name} is missing" in report.checks[0].sentence
    assert list((settings.root / "staging").iterdir()) == []


@pytest.mark.usefixtures("manifest")
def test_a_store_that_does_not_answer_proves_nothing(server: S3Server, settings: Settings) -> None:
    with pytest.raises(CannotCheck, match=r"manifest\.json does not exist"):
        verify_dump("s3://test-bucket/dumps/nothing", settings)
    server.kill()
    with pytest.raises(CannotCheck, match="S3"):
        verify_dump(URI, settings)
    with pytest.raises(StoreUnreachable):  # and not NoReport
        require_report(DumpRef(uri=URI, sha256="a" * 64), settings)


def test_a_drafter_in_the_store_is_fetched_whole_or_named(settings: Settings, tmp_path: Path, server: S3Server) -> None:
    drafter, vocab, uri = make_drafter(), make_vocab(), "s3://test-bucket/drafters/a"
    contract = make_contract(drafter, vocab)
    save_checkpoint(tmp_path / "drafter", drafter, vocab, contract, ENGINE_IDS)
    open_store(settings.store, settings).ensure_bucket()
    publish_checkpoint(tmp_path / "drafter", uri, contract, settings)
    folder = drafter_at(uri, settings)
    assert load_checkpoint(folder).contract == contract

    shutil.rmtree(folder)
    weights = tmp_path / "drafter" / "model.safetensors"
    flip_bit(weights)
    open_store(uri, settings).put_file(weights.name, weights, sha256=sha256_file(weights))
    with pytest.raises(ContractError, match="weights digest"):
        drafter_at(uri, settings)
    assert not folder.exists()
    server.kill()
    with pytest.raises(StoreUnreachable):
        drafter_at(uri, settings)
