"""The object store: one interface, two stores (S3, a folder).

A store is opened at a prefix; keys are relative to it. Objects are written whole or not at all, carry their sha256
where the store can keep it, and are checked against the digest that the reader expects.
"""

import errno
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from eagle3.digests import sha256_file
from eagle3.errors import Eagle3Error
from infra.atomic import TEMP_PREFIX, new_file
from infra.settings import Settings

CHUNK_BYTES = 2**20
_MAX_KEY_BYTES = 1024  # S3's limit


class StoreError(Eagle3Error):
    """The store could not do what was asked; the message says why and what to do."""


class BadKey(StoreError):
    """A key or URI that no store accepts."""


class AlreadyExists(StoreError):
    """`put_bytes(..., if_absent=True)` found an object."""


class MissingObject(StoreError):
    """No object under this key."""


class MissingBucket(StoreError):
    """The bucket does not exist; `ensure_bucket` makes it."""


class StoreDenied(StoreError):
    """No credentials, wrong ones, or no permission."""


class StoreUnreachable(StoreError):
    """The server does not answer."""


class StoreCorrupt(StoreError):
    """The bytes are not the ones that the digest names."""


@dataclass(frozen=True)
class Stored:
    """An object as a listing shows it."""

    key: str
    bytes: int
    modified: datetime
    """When it was last written, by the store's clock, with its zone."""


class Store(ABC):
    """Objects under one prefix. Every method raises a StoreError for what a user can mend. Safe to use from threads."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")

    def uri_of(self, key: str) -> str:
        """The URI of an object; `uri` is the prefix's own."""
        return f"{self.uri}/{check_key(key)}"

    @abstractmethod
    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        """Store a file, replacing what is there. A file whose digest is not `sha256` (hex) is refused: StoreCorrupt."""

    @abstractmethod
    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store bytes, replacing what is there; with `if_absent` only where nothing is there, else AlreadyExists.

        Of several writers with `if_absent` exactly one succeeds.
        """

    @abstractmethod
    def get_bytes(self, key: str, *, max_bytes: int) -> bytes:
        """A small object. One larger than `max_bytes` is refused before it is read."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes of an object from `start` on; StoreCorrupt where it ends before.

        There is no digest of a part: the caller must have one.
        """

    @abstractmethod
    def get_file(self, key: str, path: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        """Fetch an object to `path`, put in place only if its digest and its size in bytes are the expected ones.

        Without `sha256` the digest that was stored with the object is taken, where there is one: then only accidents
        are found, and the caller must have another proof. Raises StoreCorrupt; `path` is then as it was.
        """

    @abstractmethod
    def entries(self, prefix: str = "") -> Iterator[Stored]:
        """Every object whose key starts with `prefix`, in order of the keys."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object whose key starts with `prefix`, in order of the keys."""
        return ((entry.key, entry.bytes) for entry in self.entries(prefix))

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    @abstractmethod
    def ensure_bucket(self) -> None:
        """Make the bucket or folder if it is not there."""


def open_store(uri: str, settings: Settings) -> Store:
    """The store at `s3://bucket/prefix` or `file:///absolute/folder`; nothing is contacted or created yet."""
    scheme, rest = uri.partition("://")[::2]
    if scheme == "s3":
        from infra.store_s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        return S3Store(bucket, prefix.rstrip("/"), settings)
    if scheme == "file":
        from infra.store_folder import FolderStore

        parts = urlsplit(uri)
        folder = Path(unquote(parts.path))
        if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment or not folder.is_absolute():
            raise BadKey(f"{uri!r} is not a folder of this machine; expected file:///absolute/folder.")
        return FolderStore(folder)
    raise BadKey(f"{uri!r} is not a store; expected s3://bucket/prefix or file:///absolute/folder.")


def check_key(key: str) -> str:
    """The key itself, if it is relative, plain and cannot leave its prefix; else BadKey."""
    parts = key.split("/")
    problem = None
    if not key or "" in parts:
        problem = "is empty or has an empty part (a leading, trailing or double slash)"
    elif any(part in {".", ".."} for part in parts):
        problem = "has a part '.' or '..'"
    elif any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 or c == "\\" for c in key):
        problem = "has a control character, a backslash or half a character"
    elif any(part.startswith(TEMP_PREFIX) for part in parts):
        problem = f"has a part that starts with {TEMP_PREFIX}, which marks unfinished files"
    elif len(key.encode()) > _MAX_KEY_BYTES:
        problem = f"is longer than {_MAX_KEY_BYTES} bytes"
    if problem:
        raise BadKey(f"the object key {key!r} {problem}; expected a relative path like 'dumps/a/manifest.json'.")
    return key


def check_prefix(prefix: str) -> str:
    """Like `check_key` for the start of keys: "" and a slash at the end are allowed."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_source(path: Path, sha256: str, uri: str) -> int:
    """The size in bytes of a file that is about to be stored, if it has the digest that its writer claims."""
    try:
        size = path.stat().st_size
        found = sha256_file(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read to be stored as {uri}: {error.strerror}.") from error
    if found != sha256:
        raise StoreCorrupt(
            f"{path} should go to {uri} with sha256 {sha256}, but its sha256 is {found}: it changed after it was "
            "written. Write it again."
        )
    return size


def write_checked(chunks: Iterable[bytes], path: Path, *, sha256: str | None, size: int, uri: str) -> None:
    """Write what comes to `path`, hashing on the way; put in place only if digest (unless None) and size are right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise StoreError(
            f"{uri} has {size} bytes, {path.parent} has room for {free}. Free some space, or set EAGLE3_HOME."
        )
    digest, total = hashlib.sha256(), 0
    with new_file(path) as file:
        for chunk in chunks:
            total += len(chunk)
            if total > size:
                break
            digest.update(chunk)
            file.write(chunk)
        if total != size:
            came = "more" if total > size else str(total)
            raise StoreCorrupt(f"{uri} should have {size} bytes, {came} came. {DAMAGED}")
        if sha256 is not None and digest.hexdigest() != sha256:
            raise StoreCorrupt(f"{uri} should have sha256 {sha256}, what came has {digest.hexdigest()}. {DAMAGED}")


@contextmanager
def clear_os_errors(uri: str) -> Iterator[None]:
    """What this machine's file system refuses, as a StoreError."""
    try:
        yield
    except PermissionError as error:
        raise StoreDenied(f"{uri}: this user may not use {error.filename}. Change its owner or mode.") from error
    except OSError as error:
        if error.errno is None:
            raise  # botocore's timeouts, which are an OSError by inheritance only
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreError(f"{uri}: the disk of this machine is full. Free some space and start again.") from error
        raise StoreError(f"{uri}: {error.strerror or error} ({error.filename}).") from error


def check_size(found: int, size: int, uri: str) -> None:
    """StoreCorrupt where an object's size is known to be wrong before it is read."""
    if found != size:
        raise StoreCorrupt(f"{uri} should have {size} bytes, it has {found}. {DAMAGED}")


def too_short(uri: str, start: int, length: int, found: int | None = None) -> StoreCorrupt:
    came = "nothing is there" if found is None else f"{found} came"
    return StoreCorrupt(f"{uri} should have {length} bytes from {start} on, {came}. {DAMAGED}")


def too_large(uri: str, size: int, max_bytes: int) -> StoreError:
    return StoreError(f"{uri} has {size} bytes, at most {max_bytes} were expected: it is not what it should be.")


def missing(uri: str) -> MissingObject:
    return MissingObject(f"{uri} does not exist. Check the URI; a dump without a manifest.json was never finished.")


DAMAGED = "The object is damaged or was replaced: make it again from its source."
