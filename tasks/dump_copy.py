"""A dump into another store or prefix: every file compared with the manifest on its way, the manifest last."""

import shutil
from collections.abc import Callable
from pathlib import Path

from eagle3.dump.manifest import MANIFEST_NAME, FileEntry
from eagle3.errors import Eagle3Error
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import AlreadyExists, Store, StoreCorrupt, open_store
from tasks.artifacts import read_manifest
from tasks.targets import fresh_folder

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


class CopyRefused(Eagle3Error):
    """A copy that would mix two dumps."""


def copy_dump(
    source: str, target: str, settings: Settings, *, on_progress: Progress = lambda _done, _total: None
) -> DumpRef:
    """Copy the dump at `source` to the prefix `target`; the same bytes, so the same manifest digest.

    A copy that was stopped goes on: what lies there already is read back and compared. Returns the copy's reference,
    also where the same dump is there already.
    Raises CopyRefused where another dump's files are there, StoreCorrupt where a file of the source is damaged.
    """
    from_store, to_store = open_store(source, settings), open_store(target, settings)
    if from_store.uri == to_store.uri:
        raise CopyRefused(f"{from_store.uri} cannot be copied onto itself: name another prefix")
    manifest = read_manifest(from_store.uri, from_store)
    ref = DumpRef(uri=to_store.uri, sha256=manifest.digest())
    there = dict(to_store.list())
    if MANIFEST_NAME in there:
        return _same(ref, to_store)
    named = {entry.name for entry in manifest.files}
    if foreign := sorted(set(there) - named):
        raise CopyRefused(
            f"{to_store.uri} holds {foreign[0]}{' and more' if len(foreign) > 1 else ''}, which is no file of "
            f"{from_store.uri}: copy to an empty prefix"
        )
    total, done = sum(entry.bytes for entry in manifest.files), 0
    scratch = fresh_folder(settings, "staging", "copy")
    try:
        for entry in manifest.files:
            on_progress(done, total)
            _copy(entry, from_store, to_store, scratch / entry.name, size_there=there.get(entry.name))
            done += entry.bytes
        on_progress(done, total)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    try:
        to_store.put_bytes(MANIFEST_NAME, manifest.canonical(), if_absent=True)
    except AlreadyExists:  # another copy was faster
        return _same(ref, to_store)
    return ref


def _copy(entry: FileEntry, source: Store, target: Store, path: Path, *, size_there: int | None) -> None:
    """One file, through `path`, of which nothing is left."""
    if size_there is not None:
        try:
            target.get_file(entry.name, path, sha256=entry.sha256, size=entry.bytes)
        except StoreCorrupt:
            raise CopyRefused(
                f"{target.uri_of(entry.name)} is there already and is not the file of {source.uri}: copy to an empty "
                "prefix"
            ) from None
    else:
        source.get_file(entry.name, path, sha256=entry.sha256, size=entry.bytes)
        target.put_file(entry.name, path, sha256=entry.sha256)
    path.unlink()


def _same(ref: DumpRef, store: Store) -> DumpRef:
    found = read_manifest(store.uri, store).digest()
    if found != ref.sha256:
        raise CopyRefused(
            f"{store.uri} holds another dump (manifest {found[:16]} instead of {ref.sha256[:16]}): a dump is never "
            "replaced. Copy to an empty prefix"
        )
    return ref
