"""What S3 is given is what was hashed; what it answers becomes a sentence."""

import hashlib
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, FlexibleChecksumError, ReadTimeoutError, SSLError
from botocore.parsers import ResponseParserError

from infra.s3_errors import S3Errors
from infra.s3_upload import CheckedSource
from infra.store import MissingBucket, MissingObject, StoreCorrupt, StoreDenied, StoreError, StoreUnreachable
from tests.store_conformance import write_file

pytestmark = pytest.mark.unit

URI = "s3://bucket/dumps/a/shard"


def test_the_etag_is_the_md5_or_that_of_the_parts(tmp_path: Path) -> None:
    sha256 = write_file(tmp_path / "in", b"0123456789")
    with CheckedSource(tmp_path / "in", sha256, URI) as source:
        assert source.size == 10
        assert source.read() == b"0123456789"
        assert source.etag(in_parts=False) == hashlib.md5(b"0123456789").hexdigest()
    with CheckedSource(tmp_path / "in", sha256, URI) as source:
        assert [source.read(4), source.read(4), source.read(4), source.read(4)] == [b"0123", b"4567", b"89", b""]
        parts = b"".join(hashlib.md5(part).digest() for part in (b"0123", b"4567", b"89"))
        assert source.etag(in_parts=True) == f"{hashlib.md5(parts).hexdigest()}-3"


def test_an_empty_file_is_read_once(tmp_path: Path) -> None:
    with CheckedSource(tmp_path / "in", write_file(tmp_path / "in", b""), URI) as source:
        assert (source.size, source.read(), source.read()) == (0, b"", b"")
        assert source.etag(in_parts=False) == hashlib.md5(b"").hexdigest()


def test_the_last_bytes_of_a_file_that_changed_are_not_handed_out(tmp_path: Path) -> None:
    write_file(tmp_path / "in", b"0123456789")
    with CheckedSource(tmp_path / "in", "0" * 64, URI) as source:
        assert source.read(6) == b"012345"
        with pytest.raises(StoreCorrupt, match=f"should go to {URI} with sha256 0000.*changed after it was written"):
            source.read(6)


def test_a_file_that_shrinks_while_it_goes_up_is_found(tmp_path: Path) -> None:
    sha256 = write_file(tmp_path / "in", bytes(100_000))
    with CheckedSource(tmp_path / "in", sha256, URI) as source:
        source.read(50_000)
        (tmp_path / "in").write_bytes(bytes(10))
        with pytest.raises(StoreCorrupt, match="changed after it was written"):
            source.read(50_000)


def test_a_file_that_grows_after_its_digest_was_taken_goes_up_as_it_was(tmp_path: Path) -> None:
    sha256 = write_file(tmp_path / "in", b"0123")
    with CheckedSource(tmp_path / "in", sha256, URI) as source:
        with (tmp_path / "in").open("ab") as file:
            file.write(b"more")
        assert source.read(100) == b"0123"


def answered(status: int, code: str, operation: str = "GetObject", **headers: str) -> ClientError:
    return ClientError(
        {
            "Error": {"Code": code, "Message": "said"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        },
        operation,
    )


def no_bucket() -> None:
    raise answered(404, "404", "HeadBucket", **{"x-amz-request-id": "1"})


@pytest.mark.parametrize(
    ("raised", "expected", "sentence"),
    [
        (answered(503, "SlowDown"), StoreUnreachable, "answered 503 SlowDown in each of 4 attempts: said"),
        (answered(507, "InsufficientStorage"), StoreError, "answered 507 InsufficientStorage: said"),
        (answered(403, "AccessDenied"), StoreDenied, r"refused \(AccessDenied\)"),
        (answered(404, "NoSuchKey"), MissingObject, "does not exist"),
        (answered(404, "404", **{"x-amz-request-id": "1"}), MissingObject, "does not exist"),
        (answered(404, "404"), StoreError, "404 without a word of S3.*EAGLE3_S3_ENDPOINT"),
        (answered(404, "NoSuchBucket"), MissingBucket, "bucket 'bucket' does not exist on http://h:1"),
        (answered(412, "PreconditionFailed"), StoreCorrupt, "replaced while it was read"),
        (FlexibleChecksumError(error_msg="crc32"), StoreCorrupt, "not what http://h:1 has the checksum of"),
        (ResponseParserError("xml"), StoreError, "cannot be read.*EAGLE3_S3_ENDPOINT"),
        (ReadTimeoutError(endpoint_url="u"), StoreUnreachable, "does not answer after 4 attempts .ReadTimeoutError"),
        (SSLError(endpoint_url="u", error="CERTIFICATE_VERIFY_FAILED"), StoreUnreachable, "AWS_CA_BUNDLE"),
        (SSLError(endpoint_url="u", error="WRONG_VERSION_NUMBER"), StoreUnreachable, "begins with http://"),
        (SSLError(endpoint_url="u", error="EOF"), StoreUnreachable, "the server's certificate"),
    ],
)
def test_every_error_names_the_object_and_what_to_do(
    raised: Exception, expected: type[StoreError], sentence: str
) -> None:
    errors = S3Errors("http://h:1", "bucket", 4, lambda: None)
    with pytest.raises(expected, match=f"{URI}.*{sentence}") as caught, errors.cleared(URI):
        raise raised
    assert type(caught.value) is expected


def test_a_missing_object_in_a_missing_bucket_is_a_missing_bucket() -> None:
    errors = S3Errors(None, "bucket", 1, no_bucket)
    with pytest.raises(MissingBucket, match="does not exist on AWS S3"), errors.cleared(URI):
        raise answered(404, "404", **{"x-amz-request-id": "1"})
