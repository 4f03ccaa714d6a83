"""S3 as an object store, through boto3: multipart uploads, one checked stream down, errors that say what to do."""

import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from infra.s3_errors import S3Errors, code_of
from infra.s3_upload import CheckedSource
from infra.settings import Settings
from infra.store import (
    CHUNK_BYTES,
    AlreadyExists,
    BadKey,
    Store,
    StoreCorrupt,
    Stored,
    StoreDenied,
    StoreError,
    check_key,
    check_prefix,
    check_size,
    clear_os_errors,
    too_large,
    too_short,
    write_checked,
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CONNECT_TIMEOUT_S = 5.0
_UPLOAD_THREADS = 10
_BROKEN_STREAM = (ReadTimeoutError, ResponseStreamingError, IncompleteReadError)
_DAMAGED_ON_ITS_WAY = {"BadDigest", "XAmzContentSHA256Mismatch"}  # what servers call an upload that they refuse


class S3Store(Store):
    """`s3://bucket/prefix`. Our sha256 travels as object metadata, and what is read is compared with it.

    What is proven after a write: the server's ETag, the MD5 that it computed over what arrived, is the one of the bytes
    that were hashed to our sha256 here. Where an ETag is no MD5 (as with KMS encryption) or is another one, the object
    is read back and hashed. An upload that fails this is removed and sent again, as often as the settings allow.
    """

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
        self._region = settings.s3_region
        self._has_endpoint = settings.s3_endpoint is not None
        self._client = _client(settings)
        self._transfer = TransferConfig(
            multipart_threshold=settings.s3_part_size,
            multipart_chunksize=settings.s3_part_size,
            max_concurrency=_UPLOAD_THREADS,
        )
        self._transfer.max_in_memory_upload_chunks = _UPLOAD_THREADS
        self._bucket_seen = threading.Event()
        self._errors = S3Errors(settings.s3_endpoint, bucket, self._retries + 1, self._check_bucket)

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        uri, place = self.uri_of(key), self._place(key)
        metadata = {"sha256": sha256}

        def send() -> tuple[str, str]:
            with CheckedSource(path, sha256, uri) as source:
                if source.size < self._transfer.multipart_threshold:
                    answer = self._client.put_object(**place, Body=source.read(), Metadata=metadata)
                    return source.etag(in_parts=False), str(answer.get("ETag"))
                self._client.upload_fileobj(
                    source, self._bucket, place["Key"], ExtraArgs={"Metadata": metadata}, Config=self._transfer
                )
                return source.etag(in_parts=True), ""  # the transfer manager keeps the server's answer to itself

        self._send(send, place, sha256, uri)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        uri, place = self.uri_of(key), self._place(key)
        sha256, etag = hashlib.sha256(data).hexdigest(), hashlib.md5(data, usedforsecurity=False).hexdigest()
        # After a lost answer, the retry of a write that succeeded is told that the object exists: the mark says whose.
        mark = uuid.uuid4().hex
        request = place | {"Body": data, "Metadata": {"sha256": sha256, "writer": mark}}
        if if_absent:
            request["IfNoneMatch"] = "*"

        def send() -> tuple[str, str]:
            if (answer := self._put(request)) is not None:
                if if_absent and self._came_second(place, answer.get("VersionId"), mark):
                    raise AlreadyExists(f"{uri} exists already and is not replaced.")
                return etag, str(answer.get("ETag"))
            stored = self._client.head_object(**place)
            if stored["Metadata"].get("writer") != mark:
                raise AlreadyExists(f"{uri} exists already and is not replaced.")
            return etag, str(stored.get("ETag"))

        self._send(send, place, sha256, uri)

    def get_bytes(self, key: str, *, max_bytes: int) -> bytes:
        uri, place = self.uri_of(key), self._place(key)
        for attempt in range(self._retries + 1):
            with self._errors.cleared(uri):
                answer = self._client.get_object(**place)
                with closing(answer["Body"]) as body:
                    self._errors.field(answer, "ETag", uri)
                    size = self._errors.field(answer, "ContentLength", uri)
                    if size > max_bytes:
                        raise too_large(uri, size, max_bytes)
                    try:
                        data: bytes = body.read()
                    except (*_BROKEN_STREAM, FlexibleChecksumError):
                        if attempt == self._retries:
                            raise
                        continue
            if hashlib.sha256(data).hexdigest() == answer["Metadata"].get("sha256", hashlib.sha256(data).hexdigest()):
                return data
        raise StoreCorrupt(
            f"{uri} came {self._retries + 1} times with another sha256 than {self._errors.server} has beside it: the "
            "object is damaged, or the network changes bytes. Make it again from its source."
        )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        uri, place = self.uri_of(key), self._place(key)
        if length <= 0:
            return b""  # S3 has no name for an empty range
        for attempt in range(self._retries + 1):
            with self._errors.cleared(uri):
                try:
                    answer = self._client.get_object(**place, Range=f"bytes={start}-{start + length - 1}")
                    with closing(answer["Body"]) as body:
                        if (size := self._errors.field(answer, "ContentLength", uri)) < length:
                            raise too_short(uri, start, length, size)
                        if size > length:
                            raise StoreError(f"{uri}: {self._errors.server} does not serve ranges: {size} bytes came.")
                        data: bytes = body.read()
                        return data
                except _BROKEN_STREAM:
                    if attempt == self._retries:
                        raise
                except ClientError as error:
                    if code_of(error) not in {"InvalidRange", "416"}:
                        raise
                    raise too_short(uri, start, length) from None
        raise AssertionError("unreachable: the last attempt returns or raises")

    def get_file(self, key: str, path: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        uri, place = self.uri_of(key), self._place(key)
        with self._errors.cleared(uri):
            stored = self._client.head_object(**place)
        found, etag = self._errors.field(stored, "ContentLength", uri), self._errors.field(stored, "ETag", uri)
        check_size(found, found if size is None else size, uri)
        expected = sha256 or stored["Metadata"].get("sha256")
        for again in (True, False):
            try:
                with self._errors.cleared(uri), clear_os_errors(uri):
                    write_checked(self._stream(place["Key"], etag), path, sha256=expected, size=found, uri=uri)
            except StoreCorrupt:
                if not again:  # read twice and wrong twice: not an accident of the network
                    raise
            else:
                return

    def entries(self, prefix: str = "") -> Iterator[Stored]:
        check_prefix(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with self._errors.cleared(f"{self.uri}/{prefix}"):
            for page in pages:
                self._errors.field(page, "Name", f"{self.uri}/{prefix}")
                for entry in page.get("Contents", []):
                    if not entry["Key"].startswith(self._prefix):
                        raise BadKey(f"{self.uri}: {self._errors.server} lists {entry['Key']!r}, which is elsewhere.")
                    key = entry["Key"].removeprefix(self._prefix)
                    if key.endswith("/") and entry["Size"] == 0:
                        continue  # the folder markers that consoles make
                    yield Stored(check_key(key), entry["Size"], entry["LastModified"])

    def exists(self, key: str) -> bool:
        uri = self.uri_of(key)
        with self._errors.cleared(uri):
            try:
                self._errors.field(self._client.head_object(**self._place(key)), "ETag", uri)
            except ClientError as error:
                if code_of(error) != "404":
                    raise
                self._check_bucket()
                return False
        return True

    def delete(self, key: str) -> None:
        with self._errors.cleared(self.uri_of(key)):
            self._client.delete_object(**self._place(key))

    def ensure_bucket(self) -> None:
        with self._errors.cleared(self.uri):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if code_of(error) not in {"404", "NoSuchBucket"}:
                    raise
                place = {} if self._region == "us-east-1" else {"LocationConstraint": self._region}
                options = {"CreateBucketConfiguration": place} if place else {}
                try:
                    self._client.create_bucket(Bucket=self._bucket, **options)
                except ClientError as conflict:
                    if code_of(conflict) != "BucketAlreadyOwnedByYou":  # another process was faster
                        raise

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _send(self, send: Callable[[], tuple[str, str]], place: dict[str, Any], sha256: str, uri: str) -> None:
        """Upload until the server holds what was sent, as often as the settings allow.

        `send` uploads once and returns the ETag that the bytes have, and the one that the server gave ("": not known).
        What is not proven is removed before the next attempt.
        """
        for _ in range(self._retries + 1):
            with self._errors.cleared(uri):
                try:
                    expected, given = send()
                except ClientError as error:
                    if code_of(error) not in _DAMAGED_ON_ITS_WAY:
                        raise
                    continue
                if given.strip('"') == expected or self._holds(place, expected, sha256, uri):
                    return
                self._client.delete_object(**place)
        raise StoreCorrupt(
            f"{uri}: in each of {self._retries + 1} attempts other bytes arrived at {self._errors.server} than were "
            "sent, and none was kept: the network, a proxy or the server's memory changes bytes. Find out which."
        )

    def _holds(self, place: dict[str, Any], etag: str, sha256: str, uri: str) -> bool:
        """Whether the stored object is the one that was sent: by its ETag, else by reading it back."""
        stored = self._client.head_object(**place)
        given = self._errors.field(stored, "ETag", uri)
        if stored["Metadata"].get("sha256") != sha256:
            raise StoreCorrupt(f"{uri} was replaced by somebody else while it was stored. Store it again.")
        if given.strip('"') == etag:
            return True
        digest = hashlib.sha256()
        try:
            for chunk in self._stream(place["Key"], given):
                digest.update(chunk)
        except FlexibleChecksumError:
            return False
        return digest.hexdigest() == sha256

    def _put(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The server's answer; None where the object must not be there and is."""
        for attempt in range(self._retries + 1):
            try:
                answer: dict[str, Any] = self._client.put_object(**request)
            except ClientError as error:
                code = code_of(error)
                if code == "ConditionalRequestConflict" and attempt < self._retries:
                    continue  # another writer is at work on the same key: S3 asks to try again
                if code in {"PreconditionFailed", "412", "ConditionalRequestConflict"}:
                    return None
                raise
            return answer
        return None

    def _came_second(self, place: dict[str, Any], version: str | None, mark: str) -> bool:
        """Whether a conditional write replaced an object all the same; then its version is taken away again.

        Ceph's RGW (16.2) ignores the condition in a bucket with versioning: there the oldest version counts, which
        every writer finds alike. AWS does not, and need not grant s3:ListBucketVersions for this.
        """
        if version is None or not self._has_endpoint:
            return False
        found = self._client.list_object_versions(Bucket=place["Bucket"], Prefix=place["Key"])
        versions = [entry for entry in found.get("Versions", []) if entry["Key"] == place["Key"]]  # the newest first
        older = versions[[entry["VersionId"] for entry in versions].index(version) + 1 :]
        deleted = [entry["LastModified"] for entry in found.get("DeleteMarkers", []) if entry["Key"] == place["Key"]]
        alive = [entry for entry in older if all(when < entry["LastModified"] for when in deleted)]
        if not alive:
            return False
        before = self._client.head_object(**place, VersionId=alive[-1]["VersionId"])  # which nobody takes away
        if before["Metadata"].get("writer") == mark:
            return False  # ours too: its answer was lost
        self._client.delete_object(**place, VersionId=version)
        return True

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
