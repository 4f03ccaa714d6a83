"""Files that are there whole or not at all."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMP_PREFIX = ".eagle3-part-"


@contextmanager
def new_file(path: Path, *, if_absent: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name beside it, then put it in place in one step, flushed to the disk.

    If the block raises, nothing is left. An existing file is replaced; with `if_absent` it stays and FileExistsError
    is raised. The folder is made. `mode` is cut by the umask, as usual.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # which `if_absent` says about `path` itself
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path.parent)) from None
    temp = path.with_name(f"{TEMP_PREFIX}{uuid.uuid4().hex}")
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if if_absent:
            os.link(temp, path)  # a link, unlike a rename, fails where the name is taken
        else:
            temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
