"""A folder as an object store: keys are paths below it, writes are atomic."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infra.atomic import TEMP_PREFIX, new_file
from infra.store import (
    CHUNK_BYTES,
    AlreadyExists,
    BadKey,
    Store,
    Stored,
    StoreError,
    check_key,
    check_prefix,
    check_size,
    check_source,
    clear_os_errors,
    missing,
    too_large,
    too_short,
    write_checked,
)


class FolderStore(Store):
    """`file:///folder`. The folder is made by the first write."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.resolve()
        super().__init__(self._root.as_uri())

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        uri = self.uri_of(key)
        size = check_source(path, sha256, uri)
        with _writing(uri):
            write_checked(_chunks(path), self._path(key), sha256=sha256, size=size, uri=uri)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        uri = self.uri_of(key)
        with _writing(uri):
            try:
                with new_file(self._path(key), if_absent=if_absent) as file:
                    file.write(data)
            except FileExistsError:
                raise AlreadyExists(f"{uri} exists already and is not replaced.") from None

    def get_bytes(self, key: str, *, max_bytes: int) -> bytes:
        uri = self.uri_of(key)
        with _reading(uri), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise too_large(uri, size, max_bytes)
            return file.read(max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        uri = self.uri_of(key)
        with _reading(uri), self._path(key).open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise too_short(uri, start, length, len(data))
        return data

    def get_file(self, key: str, path: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        uri = self.uri_of(key)
        with _reading(uri):
            source = self._path(key)
            if not source.is_file():
                raise missing(uri)
            found = source.stat().st_size
            check_size(found, found if size is None else size, uri)
            write_checked(_chunks(source), path, sha256=sha256, size=found, uri=uri)

    def entries(self, prefix: str = "") -> Iterator[Stored]:
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        found: list[Stored] = []
        with _reading(self.uri):
            start = self._path(folder) if folder else self._root
            for parent, _, names in os.walk(start):
                for name in names:
                    path = Path(parent, name)
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix) and not name.startswith(TEMP_PREFIX) and path.is_file():
                        status = path.stat()
                        found.append(Stored(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
        return iter(sorted(found, key=lambda entry: entry.key.encode()))  # byte order, as S3 has it

    def exists(self, key: str) -> bool:
        with _reading(self.uri_of(key)):
            return self._path(key).is_file()

    def delete(self, key: str) -> None:
        with _writing(self.uri_of(key)):
            self._path(key).unlink(missing_ok=True)

    def ensure_bucket(self) -> None:
        with _writing(self.uri):
            self._root.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        path = (self._root / check_key(key)).resolve()
        if not path.is_relative_to(self._root):
            raise BadKey(
                f"{self.uri_of(key)} leads out of the store through a symbolic link to {path}. Remove the link."
            )
        return path


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


@contextmanager
def _reading(uri: str) -> Iterator[None]:
    with clear_os_errors(uri):
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise missing(uri) from None


@contextmanager
def _writing(uri: str) -> Iterator[None]:
    with clear_os_errors(uri):
        try:
            yield
        except (IsADirectoryError, NotADirectoryError):
            raise StoreError(
                f"{uri} cannot be written: a folder has its name, or a file the name of one of its folders. "
                "A folder store, unlike S3, cannot hold both: choose another key."
            ) from None
