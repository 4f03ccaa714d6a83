"""The S3 store against a real S3 server (ministack, with authentication) that also stops, freezes and breaks off."""

import hashlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import boto3
import pytest

from infra.settings import Settings
from infra.store import (
    AlreadyExists,
    BadKey,
    MissingBucket,
    Store,
    StoreCorrupt,
    StoreDenied,
    StoreUnreachable,
    open_store,
)
from infra.store_s3 import S3Store
from tests.integration.s3_server import S3Server, s3_server
from tests.store_conformance import StoreConformance, write_file

pytestmark = pytest.mark.integration

MIB = 2**20
_NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def bucket(server: S3Server) -> None:
    open_store("s3://test-bucket", server.settings()).ensure_bucket()


@pytest.fixture
def store(server: S3Server) -> Store:
    return open_store(f"s3://test-bucket/store-{next(_NUMBERS)}", server.settings())


def raw_client(server: S3Server):
    """A plain client beside the store, to look and to damage."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


class TestS3Store(StoreConformance):
    pass


def test_a_large_file_goes_up_in_parts_and_comes_back(server: S3Server, tmp_path: Path) -> None:
    store = open_store("s3://test-bucket/parts", server.settings(s3_part_size=16 * MIB))
    data = hashlib.shake_128(b"seed").digest(40 * MIB + 3)
    sha256 = write_file(tmp_path / "in", data)
    store.put_file("shard", tmp_path / "in", sha256=sha256)
    head = raw_client(server).head_object(Bucket="test-bucket", Key="parts/shard")
    assert head["ETag"].endswith('-3"')  # S3's mark of three parts
    assert head["Metadata"] == {"sha256": sha256}
    store.get_file("shard", tmp_path / "out", sha256=sha256, size=len(data))
    assert (tmp_path / "out").read_bytes() == data


def test_bytes_that_rot_on_the_server_are_found_by_the_stored_digest(
    store: Store, server: S3Server, tmp_path: Path
) -> None:
    sha256 = write_file(tmp_path / "in", b"right")
    store.put_file("a", tmp_path / "in", sha256=sha256)
    key = store.uri_of("a").removeprefix("s3://test-bucket/")
    raw_client(server).put_object(Bucket="test-bucket", Key=key, Body=b"wrong", Metadata={"sha256": sha256})
    with pytest.raises(StoreCorrupt, match=f"should have sha256 {sha256}"):
        store.get_file("a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_answer_to_a_conditional_write_may_get_lost(
    store: Store, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry is told that the object exists, but it is the one that we wrote."""
    assert isinstance(store, S3Store)
    put = store._client.put_object

    def put_twice(**request: object) -> object:
        put(**request)
        return put(**request)

    monkeypatch.setattr(store._client, "put_object", put_twice)
    store.put_bytes("manifest.json", b"{}", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put_bytes("manifest.json", b"{}", if_absent=True)


def test_a_server_may_not_name_keys_that_leave_the_prefix(store: Store, server: S3Server) -> None:
    client = raw_client(server)
    prefix = store.uri.removeprefix("s3://test-bucket/")
    client.put_object(Bucket="test-bucket", Key=f"{prefix}/marker/", Body=b"")
    assert list(store.list()) == []
    client.put_object(Bucket="test-bucket", Key=f"{prefix}/a//b", Body=b"")
    with pytest.raises(BadKey):
        list(store.list())


def test_a_missing_bucket_is_named_and_can_be_made(server: S3Server, tmp_path: Path) -> None:
    store = open_store("s3://test-other/prefix", server.settings())
    sha256 = write_file(tmp_path / "in", b"x")
    for action in (
        lambda: store.get_bytes("a", max_bytes=1),
        lambda: store.put_bytes("a", b""),
        lambda: store.put_file("a", tmp_path / "in", sha256=sha256),
        lambda: store.get_file("a", tmp_path / "out", sha256=sha256, size=1),
        lambda: store.exists("a"),
        lambda: list(store.list()),
    ):
        with pytest.raises(MissingBucket, match=r"bucket 'test-other' does not exist .* `eagle3 up` makes it"):
            action()
    store.ensure_bucket()
    store.ensure_bucket()
    assert not store.exists("a")


def test_a_wrong_key_is_refused(server: S3Server) -> None:
    store = open_store("s3://test-bucket", server.settings(s3_access_key="test"))
    for action in (
        lambda: store.put_bytes("a", b""),
        lambda: store.get_bytes("a", max_bytes=1),
        lambda: list(store.list()),
    ):
        with pytest.raises(StoreDenied, match=r"refused \(InvalidAccessKeyId\).*Check EAGLE3_S3_ACCESS_KEY"):
            action()
    with pytest.raises(StoreDenied, match=r"refused \(403\)"):
        store.exists("a")


def test_no_credentials_are_named(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = open_store("s3://test-bucket", Settings(s3_endpoint=server.endpoint))
    with pytest.raises(StoreDenied, match=r"no credentials .* Set EAGLE3_S3_ACCESS_KEY"):
        store.get_bytes("a", max_bytes=1)


def test_the_secret_is_in_no_message_and_no_repr(server: S3Server) -> None:
    settings = server.settings(s3_access_key="test", s3_secret_key="do-not-show")
    with pytest.raises(StoreDenied) as caught:
        open_store("s3://test-bucket", settings).put_bytes("a", b"")
    assert "do-not-show" not in str(caught.value) + repr(settings) + settings.model_dump_json()


def test_the_servers_admin_pages_are_shut(server: S3Server, store: Store) -> None:
    store.put_bytes("a", b"x")
    for path, host in (("/_ministack/reset", "127.0.0.1"), ("/", "evil.example"), ("/_localstack/health", "localhost")):
        headers = {"Host": f"{host}:{server.port}"}
        request = urllib.request.Request(server.endpoint + path, method="POST", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)
    with pytest.raises(urllib.error.HTTPError, match="403"):  # no signature, no object
        urllib.request.urlopen(f"{server.endpoint}/test-bucket/{store.uri_of('a').removeprefix('s3://test-bucket/')}")
    assert store.exists("a")


class TestStoppedServer:
    """A server of its own: these tests end it."""

    @pytest.fixture
    def own(self, tmp_path: Path) -> Iterator[S3Server]:
        with s3_server(tmp_path / "own") as running:
            open_store("s3://test-bucket", running.settings()).ensure_bucket()
            yield running

    def test_a_stopped_server_is_named_and_its_objects_survive(self, own: S3Server, tmp_path: Path) -> None:
        store = open_store("s3://test-bucket/a", own.settings())
        sha256 = write_file(tmp_path / "in", b"x")
        store.put_file("x", tmp_path / "in", sha256=sha256)
        own.kill()
        for action in (
            lambda: store.get_bytes("x", max_bytes=1),
            lambda: store.put_file("x", tmp_path / "in", sha256=sha256),
            lambda: store.get_file("x", tmp_path / "out", sha256=sha256, size=1),
        ):
            start = time.monotonic()
            with pytest.raises(StoreUnreachable, match=f"{own.endpoint} does not answer .* `eagle3 up`"):
                action()
            assert time.monotonic() - start < 20  # the default settings' retries included
        own.start()
        assert store.get_bytes("x", max_bytes=1) == b"x"

    def test_a_frozen_server_is_named_after_the_timeouts(self, own: S3Server) -> None:
        store = open_store("s3://test-bucket/a", own.settings(s3_timeout=0.5, s3_retries=1))
        store.put_bytes("x", b"x")
        own.freeze()
        start = time.monotonic()
        with pytest.raises(StoreUnreachable, match="does not answer after 2 attempts"):
            store.get_bytes("x", max_bytes=1)
        assert time.monotonic() - start < 10

    def test_a_server_that_stops_within_a_file_leaves_nothing(self, own: S3Server, tmp_path: Path) -> None:
        data = hashlib.shake_128(b"seed").digest(8 * MIB)
        sha256 = write_file(tmp_path / "in", data)
        open_store("s3://test-bucket/a", own.settings()).put_file("x", tmp_path / "in", sha256=sha256)
        with breaking_proxy(own.port, after=[MIB], then_refuse=True) as port:
            store = open_store("s3://test-bucket/a", own.settings(s3_endpoint=f"http://127.0.0.1:{port}", s3_retries=1))
            with pytest.raises(StoreUnreachable, match="`eagle3 up`"):
                store.get_file("x", tmp_path / "local" / "out", sha256=sha256, size=len(data))
        assert list((tmp_path / "local").iterdir()) == []


def test_a_broken_stream_goes_on_where_it_broke(server: S3Server, tmp_path: Path) -> None:
    data = hashlib.shake_128(b"seed").digest(8 * MIB)
    sha256 = write_file(tmp_path / "in", data)
    open_store("s3://test-bucket/broken", server.settings()).put_file("x", tmp_path / "in", sha256=sha256)
    with breaking_proxy(server.port, after=[3 * MIB, 2 * MIB]) as port:
        store = open_store("s3://test-bucket/broken", server.settings(s3_endpoint=f"http://127.0.0.1:{port}"))
        store.get_file("x", tmp_path / "out", sha256=sha256, size=len(data))
    assert (tmp_path / "out").read_bytes() == data


def test_an_upload_that_the_server_cannot_keep_leaves_no_parts_behind(server: S3Server, tmp_path: Path) -> None:
    sha256 = write_file(tmp_path / "in", bytes(20 * MIB))
    store = open_store("s3://test-bucket/lost", server.settings(s3_part_size=5 * MIB, s3_retries=0))
    assert isinstance(store, S3Store)
    store._client.meta.events.register("before-send.s3.UploadPart", lambda **_: _answer(500, "InternalError"))
    with pytest.raises(Exception, match="answered 500 InternalError"):
        store.put_file("x", tmp_path / "in", sha256=sha256)
    assert not store.exists("x")
    assert raw_client(server).list_multipart_uploads(Bucket="test-bucket").get("Uploads", []) == []


def _answer(status: int, code: str):
    from botocore.awsrequest import AWSResponse

    class Body:
        def stream(self, **_: object) -> Iterator[bytes]:
            yield f"<Error><Code>{code}</Code><Message>full</Message></Error>".encode()

    return AWSResponse("http://test", status, {}, Body())


@contextmanager
def breaking_proxy(upstream: int, *, after: list[int], then_refuse: bool = False) -> Iterator[int]:
    """A TCP proxy on loopback; the n-th connection that carries a large answer is cut after `after[n]` bytes."""
    cuts = list(after)
    listener = socket.create_server(("127.0.0.1", 0))
    lock = threading.Lock()

    def pump_up(client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
        except OSError:
            pass

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", upstream)) as server:
            threading.Thread(target=pump_up, args=(client, server), daemon=True).start()
            sent = 0
            try:
                while data := server.recv(65536):
                    client.sendall(data)
                    sent += len(data)
                    with lock:
                        if cuts and sent >= cuts[0]:
                            cuts.pop(0)
                            if then_refuse:
                                listener.shutdown(socket.SHUT_RDWR)
                            break
            except OSError:
                pass
            for side in (client, server):  # closing alone would wait for the other thread's recv
                with suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
    assert json.dumps(cuts) == "[]", "the stream was not cut as often as the test wanted"
