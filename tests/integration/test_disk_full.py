"""A disk that is full, ours or the local S3 server's: a clear error, nothing half-written, and it goes on after."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eagle3.digests import sha256_file
from eagle3.dump.manifest import MANIFEST_NAME, DumpError
from eagle3.dump.writer import DumpWriter
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import StoreError, open_store
from tasks.artifacts import fetch_dump, verify_dump
from tests.dumps import SPEC, capture, make_dump
from tests.integration.fault_proxy import fault_proxy
from tests.integration.s3_server import S3Server, s3_server
from tests.small_disk import SmallDisk, small_disk
from tests.store_conformance import write_file

pytestmark = pytest.mark.integration

MIB = 2**20
_DATA = hashlib.shake_128(b"seed").digest(3 * MIB)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        open_store("s3://test-bucket", running.settings()).ensure_bucket()
        yield running


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 8) as mounted:
        yield mounted


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {"filler"}


def test_an_object_that_does_not_fit_is_not_begun(server: S3Server, disk: SmallDisk) -> None:
    store = open_store("s3://test-bucket/fits", server.settings())
    store.put_bytes("object", _DATA)
    disk.fill(but=2 * MIB)
    with pytest.raises(StoreError, match=rf"fits/object has {3 * MIB} bytes, .* has room for .* Free some space"):
        store.get_file("object", disk.folder / "out")
    assert names(disk.folder) == set()


def test_a_disk_that_fills_within_a_file_is_named_and_the_fetch_can_be_repeated(
    server: S3Server, disk: SmallDisk
) -> None:
    """Somebody else takes the room after we looked for it."""
    sha256, uri = hashlib.sha256(_DATA).hexdigest(), "s3://test-bucket/filling"
    with fault_proxy(server.port) as proxy:
        store = open_store(uri, server.settings(s3_endpoint=proxy.endpoint))
        store.put_bytes("object", _DATA)
        proxy.before = lambda: disk.fill(but=MIB) if proxy.requests[-1][0] == "GET" else None
        with pytest.raises(StoreError, match=f"{uri}/object: the disk of this machine is full"):
            store.get_file("object", disk.folder / "out", sha256=sha256, size=len(_DATA))
        assert proxy.count("GET") == 1  # a full disk is not the network's fault: nothing is repeated
        assert names(disk.folder) == set()
        proxy.before = lambda: None
        disk.free()
        store.get_file("object", disk.folder / "out", sha256=sha256, size=len(_DATA))
    assert (disk.folder / "out").read_bytes() == _DATA


def test_a_folder_store_on_a_full_disk_keeps_nothing_half_and_goes_on(disk: SmallDisk, tmp_path: Path) -> None:
    store = open_store((disk.folder / "store").as_uri(), Settings())
    store.put_bytes("manifest", b"of before")
    sha256 = write_file(tmp_path / "in", _DATA)
    disk.fill(but=64 * 1024)
    with pytest.raises(StoreError, match=r"store/object.*room"):
        store.put_file("object", tmp_path / "in", sha256=sha256)
    with pytest.raises(StoreError, match="store/manifest: the disk of this machine is full"):
        store.put_bytes("manifest", _DATA)
    assert store.get_bytes("manifest", max_bytes=100) == b"of before"
    assert [key for key, _ in store.list()] == ["manifest"]
    disk.free()
    store.put_file("object", tmp_path / "in", sha256=sha256)
    assert (disk.folder / "store" / "object").read_bytes() == _DATA


def test_a_dump_is_fetched_once_there_is_room(
    server: S3Server, disk: SmallDisk, tiny_llama: Path, tmp_path: Path
) -> None:
    uri = "s3://test-bucket/dump"
    store = open_store(uri, server.settings())
    manifest = make_dump(tiny_llama, tmp_path / "dump")
    for path in (tmp_path / "dump").iterdir():
        store.put_file(path.name, path, sha256=sha256_file(path))
    settings = server.settings(home=disk.folder / "home")
    ref = DumpRef(uri=uri, sha256=manifest.digest())
    disk.fill(but=manifest.shards[0].bytes + 128 * 1024)  # one shard fits, two do not
    with pytest.raises(StoreError, match=rf"{uri}/\S+ has .* Free some space, or set EAGLE3_HOME"):
        fetch_dump(ref, settings)
    assert not {name for name in names(disk.folder) if name.endswith(".safetensors")}
    disk.free()
    assert (fetch_dump(ref, settings) / MANIFEST_NAME).is_file()
    assert verify_dump(uri, settings).verdict == "pass"


def test_a_writer_on_a_full_disk_leaves_whole_shards_only_and_writes_when_there_is_room(
    disk: SmallDisk, tiny_llama: Path
) -> None:
    captured = capture(tiny_llama)
    folder = disk.folder / "shards"

    def write() -> int:
        writer = DumpWriter(folder, SPEC, hidden_size=captured.identity.hidden_size, shard_bytes=96 * 1024)
        for sample in captured.samples:
            writer.add(replace(sample, states={point: sample.states[point] for point in SPEC.points}))
        return writer.finish().num_samples

    disk.fill(but=160 * 1024)
    with pytest.raises(DumpError, match=r"cannot write .*\.safetensors.*room"):
        write()
    left = list(folder.iterdir())
    assert left
    for path in left:
        assert load_file(path)  # whole, and no temporary file among them
        path.unlink()
    disk.free()
    assert write() == len(captured.samples)


def test_the_local_server_says_that_its_disk_is_full_and_nothing_counts_as_stored(tmp_path: Path) -> None:
    """Ministack alone answers 200, keeps the object in memory and loses it at the next start."""
    with small_disk(tmp_path / "disk", 12) as disk, s3_server(disk.folder / "s3") as server:
        open_store("s3://test-bucket", server.settings()).ensure_bucket()
        store = open_store("s3://test-bucket/a", server.settings(s3_part_size=5 * MIB))
        store.put_bytes("before", b"x")
        sizes = {"small": _DATA, "parts": _DATA * 2}
        disk.fill(but=MIB)
        for key, data in sizes.items():
            sha256 = write_file(tmp_path / key, data)
            with pytest.raises(StoreError, match=f"a/{key}: .* answered 507 InsufficientStorage: The disk of this"):
                store.put_file(key, tmp_path / key, sha256=sha256)
        with pytest.raises(StoreError, match="answered 507"):
            store.put_bytes("manifest", _DATA, if_absent=True)
        disk.free()
        server.kill()
        server.start()
        assert [key for key, _ in store.list()] == ["before"]
        for key in sizes:
            store.put_file(key, tmp_path / key, sha256=sha256_file(tmp_path / key))
        store.get_file("parts", tmp_path / "out", sha256=hashlib.sha256(sizes["parts"]).hexdigest())
