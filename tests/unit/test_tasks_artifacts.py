"""Dumps and checkpoints on their way: what is fetched is checked, a cache folder is whole or absent."""

import os
from pathlib import Path

import pytest

from eagle3.digests import sha256_file
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import DumpReader
from eagle3.refs import DumpRef
from eagle3.target import digest_cache
from infra.settings import Settings
from infra.store import StoreCorrupt
from tasks.artifacts import CannotCheck, WrongArtifact, fetch_again, fetch_dump, keep, verify_dump
from tests.dumps import flip_bit, make_dump

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A name that a URI must escape, and one that looks escaped already."""
    return tmp_path / "my dumps" / "100%20"


@pytest.fixture
def manifest(tiny_llama: Path, folder: Path) -> Manifest:
    return make_dump(tiny_llama, folder)


def test_a_dump_is_verified_by_path_and_by_uri_whatever_its_name(
    manifest: Manifest, folder: Path, settings: Settings
) -> None:
    for named in (str(folder), folder.as_uri()):
        report = verify_dump(named, settings)
        assert (report.verdict, report.dump_sha256) == ("pass", manifest.digest())


def test_a_flipped_bit_and_a_deleted_shard_are_refuted_by_name(
    manifest: Manifest, folder: Path, settings: Settings
) -> None:
    flip_bit(folder / manifest.shards[0].name)
    (folder / manifest.shards[1].name).unlink()
    report = verify_dump(folder.as_uri(), settings)
    assert report.verdict == "fail"
    assert manifest.shards[0].name in report.checks[0].sentence
    assert manifest.shards[1].name in report.checks[0].sentence


def test_a_folder_without_a_manifest_cannot_be_checked(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(CannotCheck, match=r"has no manifest\.json"):
        verify_dump(str(tmp_path), settings)


def test_a_fetched_dump_is_checked_and_kept(manifest: Manifest, folder: Path, settings: Settings) -> None:
    ref = DumpRef(uri=folder.as_uri(), sha256=manifest.digest())
    fetched = fetch_dump(ref, settings)
    assert len(DumpReader.open(fetched, expect_sha256=ref.sha256)) == manifest.num_samples
    assert fetch_dump(ref, settings) == fetched
    assert [path.name for path in fetched.parent.iterdir()] == [ref.sha256]


def test_a_bit_that_flips_in_a_kept_copy_is_noticed(manifest: Manifest, folder: Path, settings: Settings) -> None:
    ref = DumpRef(uri=folder.as_uri(), sha256=manifest.digest())
    shard = fetch_dump(ref, settings) / manifest.shards[0].name
    fetch_dump(ref, settings)
    before = shard.stat()
    flip_bit(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time as they were
    with pytest.raises(WrongArtifact, match=f"{shard.name} is missing or not what was fetched"):
        fetch_dump(ref, settings)
    shard.unlink()
    with pytest.raises(WrongArtifact, match=f"remove {shard.parent} and run again"):
        fetch_dump(ref, settings)


def test_a_kept_copy_that_did_not_change_is_not_read_again(
    manifest: Manifest, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = DumpRef(uri=folder.as_uri(), sha256=manifest.digest())
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(digest_cache, "sha256_file", counting)
    with fetch_again(ref, settings):
        pass
    kept = fetch_dump(ref, settings)
    assert hashed == []
    (kept / manifest.samples.name).touch()
    assert fetch_dump(ref, settings) == fetch_dump(ref, settings) == kept
    assert hashed == [manifest.samples.name]


def test_a_damaged_dump_leaves_nothing_in_the_cache(manifest: Manifest, folder: Path, settings: Settings) -> None:
    flip_bit(folder / manifest.shards[-1].name)
    with pytest.raises(StoreCorrupt, match=manifest.shards[-1].name):
        fetch_dump(DumpRef(uri=folder.as_uri(), sha256=manifest.digest()), settings)
    assert list((settings.root / "cache" / "dumps").iterdir()) == []


def test_a_validation_sees_the_published_files_and_not_a_copy(
    manifest: Manifest, folder: Path, settings: Settings
) -> None:
    ref = DumpRef(uri=folder.as_uri(), sha256=manifest.digest())
    with fetch_again(ref, settings) as first:
        pass
    assert fetch_dump(ref, settings) == first  # the later stages fetch nothing more
    with fetch_again(ref, settings) as second:
        assert second != first
        assert len(DumpReader.open(second)) == manifest.num_samples
    assert [path.name for path in first.parent.iterdir()] == [ref.sha256]
    flip_bit(folder / manifest.shards[0].name)
    with pytest.raises(StoreCorrupt, match=manifest.shards[0].name), fetch_again(ref, settings):
        pass


def test_another_dump_under_the_same_uri_is_refused(manifest: Manifest, folder: Path, settings: Settings) -> None:
    with pytest.raises(WrongArtifact, match="was replaced after the reference was made"):
        fetch_dump(DumpRef(uri=folder.as_uri(), sha256="0" * 64), settings)


def test_the_first_of_two_that_make_the_same_folder_wins(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "whole"

    def make(path: Path) -> None:
        path.mkdir()
        (path / "file").write_text("second")
        folder.mkdir()  # meanwhile another process is done
        (folder / "file").write_text("first")

    assert keep(folder, make) == folder
    assert (folder / "file").read_text() == "first"
    assert list(folder.parent.iterdir()) == [folder]
