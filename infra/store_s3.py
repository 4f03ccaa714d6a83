"""S3 as an object store, through boto3: multipart uploads, one checked stream down, errors that say what to do."""

import hashlib
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as S3ConnectionError

from infra.settings import Settings
from infra.store import (
    CHUNK_BYTES,
    AlreadyExists,
    BadKey,
    MissingBucket,
    Store,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreUnreachable,
    check_key,
    check_prefix,
    check_size,
    check_source,
    clear_os_errors,
    missing,
    too_large,
    write_checked,
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CONNECT_TIMEOUT_S = 5.0
_UPLOAD_THREADS = 4
_BROKEN_STREAM = (ReadTimeoutError, ResponseStreamingError, IncompleteReadError)
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401"}


class S3Store(Store):
    """`s3://bucket/prefix`. Our sha256 travels as object metadata: no server's own checksum is trusted."""

    def __init__(self, bucket: str, prefix: str, settings: Settings) -> None:
        super().__init__(f"s3://{bucket}/{prefix}")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise BadKey(
                f"{bucket!r} is not a bucket's name; expected s3://BUCKET/PREFIX with 3 to 63 lower-case letters, "
                "digits, dots and hyphens."
            )
        if prefix:
            check_key(prefix)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._retries = settings.s3_retries
        self._endpoint = settings.s3_endpoint
        self._region = settings.s3_region
        self._client = _client(settings)
        self._transfer = TransferConfig(
            multipart_threshold=settings.s3_part_size,
            multipart_chunksize=settings.s3_part_size,
            max_concurrency=_UPLOAD_THREADS,
        )
        self._bucket_seen = threading.Event()

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        uri = self.uri_of(key)
        size = check_source(path, sha256, uri)
        with self._clear_errors(uri):
            self._client.upload_file(
                str(path),
                self._bucket,
                self._prefix + key,
                ExtraArgs={"Metadata": {"sha256": sha256}},
                Config=self._transfer,
            )
            stored = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
        check_size(stored["ContentLength"], size, uri)
        if stored["Metadata"].get("sha256") != sha256:
            raise StoreCorrupt(f"{uri} was replaced by somebody else while it was stored. Store it again.")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        uri = self.uri_of(key)
        # After a lost answer, the retry of a write that succeeded is told that the object exists: the mark says whose.
        mark = uuid.uuid4().hex
        request: dict[str, Any] = {
            "Bucket": self._bucket,
            "Key": self._prefix + key,
            "Body": data,
            "Metadata": {"sha256": hashlib.sha256(data).hexdigest(), "writer": mark},
        }
        if if_absent:
            request["IfNoneMatch"] = "*"
        with self._clear_errors(uri):
            if self._put(request):
                return
            stored = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
            if stored["Metadata"].get("writer") != mark:
                raise AlreadyExists(f"{uri} exists already and is not replaced.")

    def get_bytes(self, key: str, *, max_bytes: int) -> bytes:
        uri = self.uri_of(key)
        with self._clear_errors(uri):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            with closing(answer["Body"]) as body:
                if answer["ContentLength"] > max_bytes:
                    raise too_large(uri, answer["ContentLength"], max_bytes)
                data: bytes = body.read()
                return data

    def get_file(self, key: str, path: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        uri = self.uri_of(key)
        with self._clear_errors(uri), clear_os_errors(uri):
            stored = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
            found = stored["ContentLength"]
            check_size(found, found if size is None else size, uri)
            chunks = self._stream(self._prefix + key, stored["ETag"])
            write_checked(chunks, path, sha256=sha256 or stored["Metadata"].get("sha256"), size=found, uri=uri)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        check_prefix(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with self._clear_errors(f"{self.uri}/{prefix}"):
            for page in pages:
                for entry in page.get("Contents", []):
                    key = entry["Key"].removeprefix(self._prefix)
                    if key.endswith("/") and entry["Size"] == 0:
                        continue  # the folder markers that consoles make
                    yield check_key(key), entry["Size"]

    def exists(self, key: str) -> bool:
        uri = self.uri_of(key)
        with self._clear_errors(uri):
            try:
                self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
            except ClientError as error:
                if _code(error) != "404":
                    raise
                self._check_bucket()
                return False
        return True

    def delete(self, key: str) -> None:
        with self._clear_errors(self.uri_of(key)):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def ensure_bucket(self) -> None:
        with self._clear_errors(self.uri):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) not in {"404", "NoSuchBucket"}:
                    raise
                place = {} if self._region == "us-east-1" else {"LocationConstraint": self._region}
                options = {"CreateBucketConfiguration": place} if place else {}
                try:
                    self._client.create_bucket(Bucket=self._bucket, **options)
                except ClientError as conflict:
                    if _code(conflict) != "BucketAlreadyOwnedByYou":  # another process was faster
                        raise

    def _put(self, request: dict[str, Any]) -> bool:
        """Whether the object was written; False where it must not be there and is."""
        for attempt in range(self._retries + 1):
            try:
                self._client.put_object(**request)
            except ClientError as error:
                code = _code(error)
                if code == "ConditionalRequestConflict" and attempt < self._retries:
                    continue  # another writer is at work on the same key: S3 asks to try again
                if code in {"PreconditionFailed", "412", "ConditionalRequestConflict"}:
                    return False
                raise
            return True
        return False

    def _stream(self, key: str, etag: str) -> Iterator[bytes]:
        """The bytes of one version of an object, in order; a stream that breaks goes on where it broke.

        One stream, not ranges in parallel: it is hashed on the way, and simple servers read the whole object per range.
        """
        offset, breaks = 0, 0
        while True:
            rest = {"Range": f"bytes={offset}-"} if offset else {}
            answer = self._client.get_object(Bucket=self._bucket, Key=key, IfMatch=etag, **rest)
            try:
                with closing(answer["Body"]) as body:
                    for chunk in body.iter_chunks(CHUNK_BYTES):
                        offset += len(chunk)
                        yield chunk
            except _BROKEN_STREAM:
                breaks += 1
                if breaks > self._retries:
                    raise
            else:
                return

    def _check_bucket(self) -> None:
        """A HEAD's 404 does not say whether the object or the bucket is missing: ask once."""
        if not self._bucket_seen.is_set():
            self._client.head_bucket(Bucket=self._bucket)
            self._bucket_seen.set()

    @contextmanager
    def _clear_errors(self, uri: str) -> Iterator[None]:
        try:
            yield
        except S3UploadFailedError as error:
            # boto3 makes one string of what went wrong; the cause is the real thing.
            cause = error.__cause__ or error.__context__
            if not isinstance(cause, ClientError | BotoCoreError):
                raise StoreError(f"{uri}: {error}") from error
            raise self._explain(cause, uri) from error
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, uri) from error

    def _explain(self, error: ClientError | BotoCoreError, uri: str) -> StoreError:
        server = self._endpoint or "AWS S3"
        if isinstance(error, ClientError):
            return self._explain_answer(error, uri, server)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreDenied(
                f"{uri}: there are no credentials for {server}. Set EAGLE3_S3_ACCESS_KEY and EAGLE3_S3_SECRET_KEY (or "
                "AWS's own variables or profile), or start the local stack with `eagle3 up`, which makes its own."
            )
        if isinstance(error, S3ConnectionError | HTTPClientError | IncompleteReadError):
            return self._unreachable(error, uri, server)
        return StoreError(f"{uri}: {server}: {error}")

    def _explain_answer(self, error: ClientError, uri: str, server: str) -> StoreError:
        code, status = _code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if code in {"404", "NoSuchKey", "NoSuchBucket"}:
            return self._absent(code, uri, server)
        if code in _DENIED or status == 403:
            return StoreDenied(
                f"{uri}: {server} refused ({code}). Check EAGLE3_S3_ACCESS_KEY and EAGLE3_S3_SECRET_KEY, and what that "
                f"key may do on bucket {self._bucket!r}."
            )
        if code in {"PreconditionFailed", "412"}:
            return StoreCorrupt(f"{uri} was replaced while it was read. Fetch it again.")
        message = error.response.get("Error", {}).get("Message", "")
        return StoreError(f"{uri}: {server} answered {status} {code}: {message}")

    def _absent(self, code: str, uri: str, server: str) -> StoreError:
        try:
            if code != "NoSuchBucket":
                self._check_bucket()
                return missing(uri)
        except ClientError as error:
            if _code(error) != "404":
                return self._explain_answer(error, uri, server)
        except BotoCoreError as error:
            return self._explain(error, uri)
        return MissingBucket(
            f"{uri}: bucket {self._bucket!r} does not exist on {server}. `eagle3 up` makes it (or the store's "
            "ensure_bucket()); for another bucket set EAGLE3_STORE."
        )

    def _unreachable(self, error: Exception, uri: str, server: str) -> StoreError:
        host = urlsplit(self._endpoint or "").hostname
        if host in _LOOPBACK:
            todo = "Start it with `eagle3 up` (`eagle3 status` shows the parts), or set EAGLE3_S3_ENDPOINT."
        else:
            todo = "Check the network and EAGLE3_S3_ENDPOINT."
        return StoreUnreachable(
            f"{uri}: the S3 server {server} does not answer after {self._retries + 1} attempts "
            f"({type(error).__name__}). {todo}"
        )


def _client(settings: Settings) -> Any:
    access, secret = settings.s3_access_key, settings.s3_secret_key
    if (access is None) != (secret is None):
        raise StoreDenied("EAGLE3_S3_ACCESS_KEY and EAGLE3_S3_SECRET_KEY belong together: only one of them is set.")
    config = Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.s3_timeout),
        read_timeout=settings.s3_timeout,
        retries={"mode": "standard", "total_max_attempts": settings.s3_retries + 1},
        # Servers other than AWS's seldom have a host name per bucket.
        s3={"addressing_style": "path" if settings.s3_endpoint else "auto"},
    )
    try:
        # A session of its own: boto3's default session may not be shared between threads while it makes clients.
        return boto3.session.Session().client(
            "s3",
            endpoint_url=settings.s3_endpoint,
            region_name=settings.s3_region,
            aws_access_key_id=access.get_secret_value() if access else None,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
            config=config,
        )
    except ValueError as error:  # botocore: "Invalid endpoint: ..."
        raise StoreError(
            f"EAGLE3_S3_ENDPOINT is {settings.s3_endpoint!r}, expected http(s)://host:port. ({error})"
        ) from None


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
