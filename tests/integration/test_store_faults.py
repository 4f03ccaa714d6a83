"""The S3 store while the way to a real server fails: right bytes or a named error, and never many requests."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.digests import sha256_file
from eagle3.dump.manifest import MANIFEST_NAME, Manifest
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import AlreadyExists, Store, StoreCorrupt, StoreDenied, StoreError, open_store
from infra.store_s3 import S3Store
from tasks.artifacts import fetch_dump, verify_dump
from tests.dumps import make_dump
from tests.integration.fault_proxy import KINDS, FaultProxy, Kind, fault_proxy
from tests.integration.s3_server import S3Server, s3_server
from tests.store_conformance import write_file

pytestmark = pytest.mark.integration

MIB = 2**20
URI = "s3://test-bucket/faults"
RETRIES = 1
_SMALL = hashlib.shake_128(b"small").digest(200_001)
_LARGE = hashlib.shake_128(b"large").digest(6 * MIB + 3)  # two parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        open_store("s3://test-bucket", running.settings()).ensure_bucket()
        yield running


@pytest.fixture(scope="module")
def way(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as running:
        yield running


@pytest.fixture(scope="module")
def settings(server: S3Server, way: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("home")
    return server.settings(
        s3_endpoint=way.endpoint, s3_retries=RETRIES, s3_timeout=0.8, s3_part_size=5 * MIB, home=home
    )


@pytest.fixture(scope="module")
def store(settings: Settings) -> Store:
    return open_store(URI, settings)


@pytest.fixture(scope="module")
def beside(server: S3Server) -> Store:
    """The same prefix, with nothing between."""
    return open_store(URI, server.settings())


@pytest.fixture
def proxy(way: FaultProxy, beside: Store) -> FaultProxy:
    """The way to the server without faults yet, and nothing stored."""
    way.clear()
    for key, _ in beside.list():
        beside.delete(key)
    return way


def put_small(store: Store, folder: Path) -> bytes:
    store.put_file("object", folder / "in", sha256=write_file(folder / "in", _SMALL))
    return _SMALL


def put_parts(store: Store, folder: Path) -> bytes:
    store.put_file("object", folder / "in", sha256=write_file(folder / "in", _LARGE))
    return _LARGE


def put_manifest(store: Store, _folder: Path) -> bytes:
    store.put_bytes("object", _SMALL, if_absent=True)
    return _SMALL


def get_file(store: Store, folder: Path) -> bytes:
    store.get_file("object", folder / "out", sha256=hashlib.sha256(_SMALL).hexdigest(), size=len(_SMALL))
    return (folder / "out").read_bytes()


def get_bytes(store: Store, _folder: Path) -> bytes:
    return store.get_bytes("object", max_bytes=len(_SMALL))


Action = Callable[[Store, Path], bytes]
_UPLOADS = [put_small, put_parts, put_manifest]
_DOWNLOADS = [get_file, get_bytes]
_READ_KINDS = [kind for kind in KINDS if kind not in {"wrong upload", "wrong unnoticed"}]


def sorted_out(kinds: Iterable[Kind]) -> list[Any]:
    """Of the kinds that end alike one in `make test`, the others with the slow ones."""
    slow = {"503", "reset", "broken"}
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in slow else kind for kind in kinds]


@pytest.mark.parametrize("kind", sorted_out(KINDS))
@pytest.mark.parametrize("upload", [put_small, put_manifest, pytest.param(put_parts, marks=pytest.mark.slow)])
def test_an_upload_survives_a_fault(
    store: Store, beside: Store, proxy: FaultProxy, tmp_path: Path, upload: Action, kind: Kind
) -> None:
    proxy.once(kind, method="PUT")
    sent = upload(store, tmp_path)
    assert beside.get_bytes("object", max_bytes=len(sent)) == sent
    assert proxy.spoiled == [kind]
    assert proxy.count("PUT") <= (2 if upload is not put_parts else 4)


@pytest.mark.parametrize("kind", sorted_out(_READ_KINDS))
@pytest.mark.parametrize("download", _DOWNLOADS)
def test_a_download_survives_a_fault(
    store: Store, beside: Store, proxy: FaultProxy, tmp_path: Path, download: Action, kind: Kind
) -> None:
    beside.put_bytes("object", _SMALL)
    proxy.once(kind, method="GET")
    assert download(store, tmp_path) == _SMALL
    assert proxy.spoiled == [kind]
    assert proxy.count("GET") == 2


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in {"lost", "truncated", "broken", "wrong answer"}]
)
@pytest.mark.parametrize("upload", [put_small, put_manifest, pytest.param(put_parts, marks=pytest.mark.slow)])
def test_an_upload_that_cannot_succeed_ends_with_the_object_named_and_keeps_nothing(
    store: Store, beside: Store, proxy: FaultProxy, tmp_path: Path, upload: Action, kind: Kind
) -> None:
    proxy.always(kind, method="PUT")
    with pytest.raises(StoreError, match=f"{URI}/object"):
        upload(store, tmp_path)
    parts = 2 if upload is put_parts else 1
    assert proxy.count("PUT") <= (RETRIES + 1) * parts
    assert list(beside.list()) == []


def test_an_upload_whose_answers_are_all_lost_leaves_the_right_bytes(
    store: Store, beside: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.always("lost", method="PUT")
    with pytest.raises(StoreError, match=f"{URI}/object"):
        put_manifest(store, tmp_path)
    assert proxy.count("PUT") == RETRIES + 1
    assert beside.get_bytes("object", max_bytes=len(_SMALL)) == _SMALL
    proxy.clear()
    with pytest.raises(AlreadyExists):
        put_manifest(store, tmp_path)


@pytest.mark.parametrize("kind", sorted_out(_READ_KINDS))
@pytest.mark.parametrize("download", _DOWNLOADS)
def test_a_download_that_cannot_succeed_ends_with_the_object_named_and_leaves_nothing(
    store: Store, beside: Store, proxy: FaultProxy, tmp_path: Path, download: Action, kind: Kind
) -> None:
    beside.put_bytes("object", _SMALL)
    proxy.always(kind, method="GET")
    with pytest.raises(StoreError, match=f"{URI}/object"):
        download(store, tmp_path)
    assert proxy.count("GET") <= RETRIES + 1
    assert list(tmp_path.glob("out*")) == []


def test_bytes_that_change_on_their_way_to_a_server_that_does_not_look_are_found_by_the_etag(
    store: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    for upload in _UPLOADS:
        proxy.clear()
        proxy.always("wrong unnoticed", method="PUT")
        with pytest.raises(StoreCorrupt, match=rf"{URI}/object: in each of 2 attempts other bytes arrived"):
            upload(store, tmp_path)


def test_an_etag_that_is_no_md5_leads_to_a_verifying_read(store: Store, beside: Store, proxy: FaultProxy) -> None:
    """As with KMS encryption; here the ETag that is expected is the other one."""
    assert isinstance(store, S3Store)
    beside.put_bytes("object", _SMALL)
    place, sha256 = store._place("object"), hashlib.sha256(_SMALL).hexdigest()
    assert store._holds(place, "0" * 32, sha256, store.uri_of("object"))
    assert proxy.count("GET") == 1
    proxy.always("wrong answer", method="GET")
    assert not store._holds(place, "0" * 32, sha256, store.uri_of("object"))


def test_a_listing_survives_a_fault_or_names_the_prefix(store: Store, beside: Store, proxy: FaultProxy) -> None:
    beside.put_bytes("a", b"x")
    for kind in ("500", "reset", "truncated"):
        proxy.once(kind, method="GET")
        assert list(store.list()) == [("a", 1)]
    proxy.always("truncated", method="GET")
    with pytest.raises(StoreError, match=URI):
        list(store.list())


def test_a_refusal_is_not_repeated(store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.always("denied")
    for action in (put_small, put_parts, put_manifest, get_file, get_bytes):
        with pytest.raises(StoreDenied, match=rf"{URI}/object: .* refused \((AccessDenied|403)\).*'test-bucket'"):
            action(store, tmp_path)
    assert len(proxy.requests) == 5


@pytest.fixture(scope="module")
def dump(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("dump") / "dump"
    return folder, make_dump(tiny_llama, folder)


def publish(folder: Path, manifest: Manifest, store: Store) -> None:
    """As an extraction does: the manifest last, and only where there is none."""
    for entry in (*manifest.shards, *manifest.files[: -len(manifest.shards)]):
        store.put_file(entry.name, folder / entry.name, sha256=entry.sha256)
    store.put_bytes(MANIFEST_NAME, manifest.canonical(), if_absent=True)


# Without the check after an upload 3, 6 and 7 commit a corrupt dump, and seven of the others do.
@pytest.mark.parametrize("seed", [n if n in {3, 6, 7} else pytest.param(n, marks=pytest.mark.slow) for n in range(40)])
def test_no_corrupt_dump_is_ever_committed(
    dump: tuple[Path, Manifest], store: Store, beside: Store, proxy: FaultProxy, seed: int
) -> None:
    """Three of ten requests fail, in a way of its own: where there is a manifest, every byte of the dump is right."""
    folder, manifest = dump
    proxy.at_random(seed, 0.3)
    committed = False
    for _ in range(4):  # an extraction that is resumed
        with contextlib.suppress(AlreadyExists):
            try:
                publish(folder, manifest, store)
            except AlreadyExists:
                committed = True
                raise
            except StoreError as error:
                assert URI in str(error)  # noqa: PT017
                continue
            committed = True
        break
    present = {key for key, _ in beside.list()}
    if MANIFEST_NAME in present:
        assert beside.get_bytes(MANIFEST_NAME, max_bytes=MIB) == manifest.canonical()
        for entry in manifest.files:
            assert beside.get_bytes(entry.name, max_bytes=entry.bytes) == (folder / entry.name).read_bytes()
    else:
        assert not committed
    bound = 4 * (len(manifest.files) + 1) * (RETRIES + 1) ** 2
    assert proxy.count("PUT") <= bound, json.dumps(proxy.requests, indent=1)


def test_a_dump_is_fetched_and_verified_through_faults_or_the_object_is_named(
    dump: tuple[Path, Manifest], proxy: FaultProxy, settings: Settings, beside: Store
) -> None:
    folder, manifest = dump
    publish(folder, manifest, beside)
    ref, shard = DumpRef(uri=URI, sha256=manifest.digest()), manifest.shards[0].name
    proxy.once("wrong answer", path=shard, method="GET")
    proxy.once("wrong answer", path=MANIFEST_NAME, method="GET")
    assert verify_dump(URI, settings).verdict == "pass"  # an accident on the way says nothing about the dump
    proxy.always("wrong answer", path=shard, method="GET")
    report = verify_dump(URI, settings)
    assert report.verdict == "fail"
    assert f"{URI}/{shard}" in report.checks[0].sentence
    with pytest.raises(StoreCorrupt, match=f"{URI}/{shard}"):
        fetch_dump(ref, settings)
    assert list((settings.root / "cache" / "dumps").iterdir()) == []
    proxy.clear()
    proxy.once("truncated", path=shard, method="GET")
    fetched = fetch_dump(ref, settings)
    assert sha256_file(fetched / shard) == manifest.shards[0].sha256
