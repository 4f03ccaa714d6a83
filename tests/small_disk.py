"""A small disk of its own for a test: a tmpfs, where this user may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of a few MB; `fill` leaves no room, `free` gives it back, `grow` makes it larger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def fill(self, *, but: int = 0) -> None:
        """Take all room except `but` bytes."""
        status = os.statvfs(self.folder)
        left = status.f_bavail * status.f_frsize - but
        with self._filler.open("ab") as file:
            file.write(bytes(max(left, 0)))

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def grow(self, mib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={mib}m", str(self.folder)], check=True)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of `mib` MiB at `folder`; skips the test where this user may not mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "eagle3-test", str(folder)]
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root (the writer's full disk is tested without: test_dump_writer)")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
