"""Where a dump's bytes come from: a folder here, an object store elsewhere (`infra.store_source`)."""

import os
from pathlib import Path
from typing import Protocol

from eagle3.dump.files import inside
from eagle3.dump.manifest import DumpError


class ByteSource(Protocol):
    """The files of one dump. Safe to use from threads; every error that a user can mend is an Eagle3Error."""

    where: str
    """The dump's folder or URI, for messages."""

    def size(self, name: str) -> int:
        """Bytes of a file; an error where it is missing."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start` on; an error where the file has fewer."""


class FolderSource:
    """A dump in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.where = folder, str(folder)

    def size(self, name: str) -> int:
        return inside(self._folder, name).stat().st_size

    def read(self, name: str, start: int, length: int) -> bytes:
        path = inside(self._folder, name)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise DumpError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
        if len(data) != length:
            raise DumpError(
                f"{path} is truncated: {len(data)} of the {length} bytes from {start} on. Fetch the dump again, or "
                "extract again"
            )
        return data
