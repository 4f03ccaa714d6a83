"""sha256 of large files, remembered by file identity: a target of 600 GB is hashed once."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from eagle3.digests import sha256_file
from eagle3.target.files import TargetError

CACHE_NAME = "file_digests.json"
_VERSION = 1
# The oldest entries go first: files that were deleted or replaced leave theirs behind.
_MAX_ENTRIES = 10_000
_MAX_CACHE_BYTES = 16 * 2**20


class DigestCache:
    """Digests of files by (device, inode, size, mtime_ns, ctime_ns). Without a folder nothing is remembered.

    The change time is part of the identity because a copy in place may keep size and modification time. A cache that
    cannot be read or written changes no digest: it only ever saves time, so it stops nobody.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / CACHE_NAME if folder else None
        self._known = _load(self._file) if self._file else {}
        self._fresh: dict[str, str] = {}

    def sha256(self, path: Path) -> str:
        """sha256 of a file's content; TargetError where it changes while it is read."""
        before = _identity(path)
        if known := self._known.get(before):
            return known
        digest = sha256_file(path)
        if _identity(path) != before:
            raise TargetError(f"{path} changed while it was read: let the download or copy finish, then try again")
        self._known[before] = self._fresh[before] = digest
        return digest

    def remember(self, path: Path, digest: str) -> None:
        """Take the digest of a file that was hashed as it was written, so that it need not be read for it."""
        self._known[_identity(path)] = self._fresh[_identity(path)] = digest

    def save(self) -> None:
        """Write what was added, atomically, together with what other processes added since."""
        if not self._file or not self._fresh:
            return
        entries = {**_load(self._file), **self._fresh}
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        with suppress(OSError):
            _write(self._file, json.dumps({"version": _VERSION, "sha256": kept}))
            self._fresh = {}


def _identity(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=CACHE_NAME)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _load(file: Path) -> dict[str, str]:
    try:
        with file.open("rb") as handle:
            value = json.loads(handle.read(_MAX_CACHE_BYTES))
        entries = value["sha256"] if value["version"] == _VERSION else {}
        return {k: v for k, v in entries.items() if isinstance(v, str) and len(v) == 64}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
