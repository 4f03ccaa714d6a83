"""A bounded folder of pieces of dumps that lie elsewhere: what was used last stays, processes may share it."""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from eagle3.dump.manifest import DumpError

_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,200}")
_LOCK, _PARTIAL = ".lock", ".partial"


class BlockCache:
    """Files by name, at most `max_bytes` of them together, unfinished ones included; the least recently used go first.

    A file appears whole or not at all. Only its size is checked here: whoever reads a piece compares its digest, and
    calls `drop` where it is wrong. Processes that share the folder take turns at writing; a file that one of them
    removes stays readable for another that has it open. DumpError where the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        with self._clear_errors():
            folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, size: int, spans: Sequence[tuple[int, int]]) -> list[bytearray] | None:
        """(start, length) spans of a file; None where it is not there or has not `size` bytes."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    return None
                parts = []
                for start, length in spans:
                    part = bytearray(length)
                    file.seek(start)
                    if file.readinto(part) != length:
                        return None
                    parts.append(part)
                with suppress(OSError):  # removed by another process meanwhile: it has no age any more
                    os.utime(path)
                return parts
        except OSError:
            return None  # gone, or a disk that cannot read it: it is fetched again

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Keep a file made of `parts`, after removing what it needs the room of; one too large is not kept."""
        size = sum(len(part) for part in parts)
        if size > self.max_bytes:
            return
        path, partial = self._path(name), self.folder / _PARTIAL
        with self._clear_errors(), self._alone():
            partial.unlink(missing_ok=True)  # of a process that died while it wrote: nobody else is writing now
            path.unlink(missing_ok=True)
            self._make_room(size)
            try:
                with partial.open("wb") as file:
                    file.writelines(parts)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        with self._clear_errors():
            self._path(name).unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes of all files that are kept."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, size: int) -> None:
        files = sorted(self._files())
        used = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in files:
            if used + size <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            used -= bytes_

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use in ns, bytes, path)."""
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    yield stat.st_mtime_ns, stat.st_size, path

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise DumpError(f"{name!r} is not a name for a piece of a dump")
        return self.folder / name

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have cleared it away
        with (self.folder / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, however the process ends
            yield

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DumpError(
                f"the cache of streamed dumps in {self.folder} cannot be used: {error.strerror or error}. Free some "
                "space, or allow writing"
            ) from error
