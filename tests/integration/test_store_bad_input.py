"""What users get wrong about a store: each is refused with a sentence that says what to do."""

import datetime
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from eagle3.digests import canonical_json, sha256_bytes
from eagle3.dump.manifest import MANIFEST_NAME, ManifestError
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import BadKey, MissingBucket, MissingObject, StoreDenied, StoreError, StoreUnreachable, open_store
from tasks.artifacts import CannotCheck, fetch_dump, verify_dump
from tasks.params import ExtractParams
from tasks.resume import ResumeRefused, begin
from tests.dumps import make_dump
from tests.integration.s3_server import S3Server, s3_server
from tests.store_conformance import write_file

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        open_store("s3://test-bucket", running.settings()).ensure_bucket()
        yield running


@contextmanager
def web_server(status: int, certificate: Path | None = None) -> Iterator[int]:
    """Answers every request with a page that has nothing to do with S3; its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            page = b"<html><body>Hello</body></html>"
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        web.socket = context.wrap_socket(web.socket, server_side=True, do_handshake_on_connect=False)
    web.handle_error = lambda *_: None  # a client that hangs up is what is tested
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield web.server_address[1]
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


@pytest.fixture(scope="module")
def self_signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate for 127.0.0.1 in one file, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def actions(settings: Settings, folder: Path):
    """Every kind of access."""
    store = open_store("s3://test-bucket/prefix", settings)
    sha256 = write_file(folder / "in", b"x")
    return [
        lambda: store.put_bytes("a", b"x"),
        lambda: store.put_file("a", folder / "in", sha256=sha256),
        lambda: store.get_bytes("a", max_bytes=100),
        lambda: store.get_file("a", folder / "out", sha256=sha256, size=1),
        lambda: list(store.list()),
    ]


def test_a_certificate_that_nobody_vouches_for_is_refused_and_the_way_out_is_named(
    server: S3Server, self_signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    with web_server(404, self_signed) as port:
        settings = server.settings(s3_endpoint=f"https://127.0.0.1:{port}", s3_retries=0)
        for action in actions(settings, tmp_path):
            with pytest.raises(StoreUnreachable, match=r"prefix/.*no TLS connection.* this machine trusts: set AWS"):
                action()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(self_signed))  # what the message says helps
        with pytest.raises(StoreError, match="404 without a word of S3"):
            open_store("s3://test-bucket/prefix", settings).put_bytes("a", b"x")


def test_tls_to_a_server_that_has_none_says_so(server: S3Server, tmp_path: Path) -> None:
    settings = server.settings(s3_endpoint=f"https://127.0.0.1:{server.port}", s3_retries=0)
    for action in actions(settings, tmp_path):
        with pytest.raises(StoreUnreachable, match=r"no TLS connection .*begins with http://"):
            action()


@pytest.mark.parametrize("status", [200, 404, 405])
def test_an_endpoint_that_is_no_s3_server_is_told_from_a_missing_object(
    server: S3Server, tmp_path: Path, status: int
) -> None:
    with web_server(status) as port:
        settings = server.settings(s3_endpoint=f"http://127.0.0.1:{port}", s3_retries=0)
        for action in actions(settings, tmp_path):
            with pytest.raises(StoreError, match=r"prefix/.*is no S3 server.*Check EAGLE3_S3_ENDPOINT"):
                action()
    assert not (tmp_path / "out").exists()


def test_a_host_that_does_not_exist_is_named(server: S3Server) -> None:
    settings = server.settings(s3_endpoint="http://s3.invalid:9000", s3_retries=0)
    with pytest.raises(StoreUnreachable, match=r"s3\.invalid:9000 does not answer.*Check the network and EAGLE3"):
        open_store("s3://test-bucket/prefix", settings).get_bytes("a", max_bytes=1)


def test_a_missing_bucket_a_wrong_key_and_no_key_are_told_apart_for_a_dump(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    ref = DumpRef(uri="s3://test-bucket/dumps/a", sha256="a" * 64)
    with pytest.raises(MissingBucket, match=r"dumps/a/manifest\.json: bucket 'test-nowhere' does not exist"):
        fetch_dump(ref.model_copy(update={"uri": "s3://test-nowhere/dumps/a"}), server.settings(home=tmp_path))
    with pytest.raises(StoreDenied, match=r"dumps/a/manifest\.json: .* refused"):
        fetch_dump(ref, server.settings(home=tmp_path, s3_access_key="wrong"))
    with pytest.raises(StoreDenied, match=r"dumps/a/manifest\.json: there are no credentials"):
        fetch_dump(ref, Settings(home=tmp_path, s3_endpoint=server.endpoint))
    with pytest.raises(MissingObject, match="was never finished"):
        fetch_dump(ref, server.settings(home=tmp_path))


def test_a_prefix_with_foreign_files_is_no_dump(server: S3Server, tmp_path: Path) -> None:
    store = open_store("s3://test-bucket/photos", server.settings())
    store.put_bytes("holiday.jpg", b"x")
    with pytest.raises(CannotCheck, match=r"photos/manifest\.json does not exist"):
        verify_dump(store.uri, server.settings(home=tmp_path))
    params = ExtractParams(name="photos").model_copy(update={"resume": store.uri})
    with pytest.raises(ResumeRefused, match="photos holds no unfinished extraction"):  # nor a place to write one
        begin(params, {}, server.settings(home=tmp_path), lambda _: None)
    assert [key for key, _ in store.list()] == ["holiday.jpg"]
    store.put_bytes(MANIFEST_NAME, b'{"name": "my web app", "icons": []}')
    with pytest.raises(ManifestError, match=r"photos/manifest\.json: not a valid manifest"):
        verify_dump(store.uri, server.settings(home=tmp_path))


@pytest.mark.parametrize("name", ["../other/shard-00000.safetensors", "/etc/passwd", "a/../../b", "..", "a\\b"])
def test_a_manifest_whose_keys_climb_out_of_the_prefix_is_refused(
    server: S3Server, tiny_llama: Path, tmp_path: Path, name: str
) -> None:
    manifest = make_dump(tiny_llama, tmp_path / "dump")
    fields = manifest.model_dump(mode="json")
    fields["shards"][0]["name"] = name
    data = canonical_json(fields)
    uri = "s3://test-bucket/climbing"
    open_store(uri, server.settings()).put_bytes(MANIFEST_NAME, data)
    settings = server.settings(home=tmp_path / "home")
    with pytest.raises(ManifestError, match=r"climbing/manifest\.json: .*is not a plain file name inside the dump"):
        fetch_dump(DumpRef(uri=uri, sha256=sha256_bytes(data)), settings)
    with pytest.raises(ManifestError, match="is not a plain file name"):
        verify_dump(uri, settings)
    assert not any(path.is_file() for path in (tmp_path / "home").rglob("*"))
    with pytest.raises(BadKey):  # and the store itself would not follow it
        open_store(uri, settings).get_file(name, tmp_path / "out")
