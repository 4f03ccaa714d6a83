"""A file on its way to S3: the bytes that go up are the bytes that are hashed."""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.store import StoreCorrupt, StoreError


class CheckedSource:
    """A file that hands out its last bytes only if all of it has the sha256 (hex) that its writer claims.

    s3transfer reads it once, part by part in order, so a part that was sent was hashed before; a file that is another
    one than it should be ends the upload before it is completed, and S3 keeps nothing of it. Reading raises
    StoreCorrupt for such a file and StoreError for one that cannot be read.
    """

    def __init__(self, path: Path, sha256: str, uri: str) -> None:
        self._path, self._sha256, self._uri = path, sha256, uri
        self._digest, self._given = hashlib.sha256(), 0
        self._parts: list[bytes] = []  # their MD5
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from error
        self.size = self.seek(0, 2)
        self.seek(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def read(self, amount: int = -1) -> bytes:
        """The next part."""
        left = self.size - self._given
        wanted = left if amount < 0 else min(amount, left)
        if not wanted and self._parts:
            return b""
        try:
            data = self._file.read(wanted)
        except OSError as error:
            raise self._unreadable(error) from error
        self._given += len(data)
        self._digest.update(data)
        self._parts.append(hashlib.md5(data, usedforsecurity=False).digest())
        if len(data) < wanted or (self._given == self.size and self._digest.hexdigest() != self._sha256):
            raise StoreCorrupt(
                f"{self._path} should go to {self._uri} with sha256 {self._sha256}, but its bytes are others: it "
                "changed after it was written. Write it again."
            )
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """s3transfer looks for the size so, before it reads."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def etag(self, *, in_parts: bool) -> str:
        """What S3 calls what was read: its MD5, or for an upload in parts the MD5 of the parts' and their number."""
        if not in_parts:
            return self._parts[0].hex()
        return f"{hashlib.md5(b''.join(self._parts), usedforsecurity=False).hexdigest()}-{len(self._parts)}"

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"{self._path} cannot be read to be stored as {self._uri}: {error.strerror}.")
