"""The S3 store against Ceph's RGW, a real server that checks signatures, permissions and the bytes that it is sent.

`make test-ceph` runs it, and says what to install where Ceph is not there.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import boto3
import pytest

from infra.store import AlreadyExists, Store, StoreCorrupt, StoreDenied, StoreError, open_store
from tests.integration.fault_proxy import FaultProxy, fault_proxy
from tests.integration.rgw_server import RgwServer, rgw_server, what_is_missing
from tests.store_conformance import StoreConformance, write_file

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "Ceph is there"),
]

MIB = 2**20
_NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RgwServer]:
    with rgw_server(tmp_path_factory.mktemp("rgw")) as running:
        open_store("s3://test-bucket", running.settings()).ensure_bucket()
        yield running


@pytest.fixture
def store(server: RgwServer) -> Store:
    return open_store(f"s3://test-bucket/store-{next(_NUMBERS)}", server.settings())


@pytest.fixture
def proxy(server: RgwServer) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as running:
        yield running


def raw_client(server: RgwServer):
    access, secret = server.owner
    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=access,
        aws_secret_access_key=secret,
    )


class TestRgw(StoreConformance):
    pass


def test_a_large_file_goes_up_in_parts_and_its_etag_is_the_one_that_we_computed(
    server: RgwServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    data = hashlib.shake_128(b"seed").digest(40 * MIB + 3)
    sha256 = write_file(tmp_path / "in", data)
    store = open_store("s3://test-bucket/parts", server.settings(s3_endpoint=proxy.endpoint))
    store.put_file("shard", tmp_path / "in", sha256=sha256)
    assert proxy.count("GET") == 0  # nothing had to be read back
    head = raw_client(server).head_object(Bucket="test-bucket", Key="parts/shard")
    assert head["ETag"].endswith('-6"')
    store.get_file("shard", tmp_path / "out", sha256=sha256, size=len(data))
    assert (tmp_path / "out").read_bytes() == data


def test_a_wrong_secret_and_a_user_without_permission_are_refused(
    server: RgwServer, store: Store, tmp_path: Path
) -> None:
    store.put_bytes("a", b"x")
    access, secret = server.stranger
    wrong = open_store(store.uri, server.settings(s3_secret_key="wrong"))
    stranger = open_store(store.uri, server.settings(s3_access_key=access, s3_secret_key=secret))
    sha256 = write_file(tmp_path / "in", b"y")
    for refused, code in ((wrong, "SignatureDoesNotMatch"), (stranger, "AccessDenied")):
        for action in (
            lambda refused=refused: refused.get_bytes("a", max_bytes=1),
            lambda refused=refused: refused.put_bytes("a", b"y"),
            lambda refused=refused: refused.put_file("a", tmp_path / "in", sha256=sha256),
            lambda refused=refused: list(refused.list()),
            lambda refused=refused: refused.delete("a"),
        ):
            with pytest.raises(StoreDenied, match=rf"{store.uri}.* refused \({code}\).*'test-bucket'"):
                action()
    assert store.get_bytes("a", max_bytes=1) == b"x"


def race(store: Store) -> int:
    """How many of eight writers of one absent object succeed."""

    def write(number: int) -> bool:
        with suppress(AlreadyExists):
            store.put_bytes("race", str(number).encode(), if_absent=True)
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(write, range(8)))


def test_a_versioned_bucket_keeps_what_was_replaced_and_deleted(server: RgwServer) -> None:
    client = raw_client(server)
    store = open_store("s3://test-versioned/a", server.settings())
    store.ensure_bucket()
    client.put_bucket_versioning(Bucket="test-versioned", VersioningConfiguration={"Status": "Enabled"})
    store.put_bytes("manifest.json", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put_bytes("manifest.json", b"second", if_absent=True)
    assert store.get_bytes("manifest.json", max_bytes=10) == b"first"
    assert race(store) == 1
    store.put_bytes("manifest.json", b"second")
    assert store.get_bytes("manifest.json", max_bytes=10) == b"second"
    store.delete("manifest.json")
    assert not store.exists("manifest.json")
    assert [key for key, _ in store.list()] == ["race"]
    found = client.list_object_versions(Bucket="test-versioned", Prefix="a/manifest.json")
    bodies = {
        client.get_object(Bucket="test-versioned", Key="a/manifest.json", VersionId=version["VersionId"])["Body"].read()
        for version in found["Versions"]
    }
    assert bodies == {b"first", b"second"}
    assert len(found["DeleteMarkers"]) == 1
    store.put_bytes("manifest.json", b"third", if_absent=True)  # a delete marker is nothing
    assert store.get_bytes("manifest.json", max_bytes=10) == b"third"


@pytest.mark.parametrize("kind", ["500", "503", "reset", "lost", "wrong upload"])
def test_uploads_survive_faults_and_wrong_bytes_are_never_kept(
    server: RgwServer, proxy: FaultProxy, store: Store, tmp_path: Path, kind
) -> None:
    through = open_store(store.uri, server.settings(s3_endpoint=proxy.endpoint, s3_retries=1, s3_part_size=5 * MIB))
    data = hashlib.shake_128(b"seed").digest(6 * MIB)
    sha256 = write_file(tmp_path / "in", data)
    for key, action in {
        "file": lambda: through.put_file("file", tmp_path / "in", sha256=sha256),
        "manifest": lambda: through.put_bytes("manifest", data, if_absent=True),
    }.items():
        proxy.clear()
        proxy.once(kind, method="PUT")
        action()
        assert proxy.spoiled == [kind]
        assert store.get_bytes(key, max_bytes=len(data)) == data
    if kind != "lost":
        proxy.always(kind, method="PUT")
        error = StoreCorrupt if kind == "wrong upload" else StoreError
        with pytest.raises(error, match=f"{store.uri}/new"):
            through.put_bytes("new", data, if_absent=True)
        assert not store.exists("new")
