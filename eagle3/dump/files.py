"""Files that appear whole or not at all, and the manifest among them. Imports no torch: `dump verify` needs none."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eagle3.digests import sha256_file
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DumpError, FileEntry, Manifest


class NotAsWritten(DumpError):
    """A file that is not what the manifest says; `fact` is the message without its advice."""

    def __init__(self, fact: str, advice: str = "Fetch the dump again, or extract again") -> None:
        super().__init__(f"{fact}. {advice}")
        self.fact = fact


class OtherBytes(NotAsWritten):
    """A file as long as the manifest says, with other bytes."""

    def __init__(self, path: Path | str, entry: FileEntry, found: str) -> None:
        super().__init__(
            f"{path} is not the file that the manifest names: its sha256 differs ({found[:12]}… instead of "
            f"{entry.sha256[:12]}…)",
            "A copy broke off, a disk failed, or somebody changed it (`eagle3 dump verify` looks at every file): "
            "fetch the dump again",
        )
        self.fact = f"{path}: sha256 {found[:12]}… instead of {entry.sha256[:12]}…"


def publish(path: Path, write: Callable[[Path], None], *, replace: bool = True) -> None:
    """Let `write` make a temporary file beside `path`, bring it to the disk, and give it its name.

    With replace=False a file that is already there stays, and a DumpError is raised. A disk that is full, or refuses,
    is a DumpError too; no half-written file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # unlike a rename, it never replaces
        _sync(path.parent)
    except FileExistsError:
        raise DumpError(f"{path} is there already, and is never overwritten: choose another folder") from None
    except (OSError, SafetensorError) as error:
        raise DumpError(f"cannot write {path}: {error}. Check that the disk has room and allows writing") from error
    finally:
        temporary.unlink(missing_ok=True)


def inside(folder: Path, name: str) -> Path:
    """The file of that name in the folder; NotAsWritten where it is missing or leads out of the folder (a link)."""
    path = folder / name
    if not path.is_file():
        raise NotAsWritten(f"{path} is missing: the manifest names it")
    if path.resolve().parent != folder.resolve():
        raise NotAsWritten(f"{path} leads out of the dump (to {path.resolve()})", "A dump holds plain files only")
    return path


def named_file(folder: Path, entry: FileEntry) -> Path:
    """The file that the manifest names, byte for byte: NotAsWritten where it is missing, a link or of another size,
    OtherBytes where its sha256 differs. Reads all of it."""
    path = inside(folder, entry.name)
    check_size(path, entry.bytes)
    if (found := sha256_file(path)) != entry.sha256:
        raise OtherBytes(path, entry, found)
    return path


def check_layout(path: Path, file: Any, expected: Mapping[str, tuple[str, list[int]]]) -> None:
    """A DumpError where an open safetensors file has other tensors than expected: (dtype, shape) by name.

    Only the header is looked at.
    """
    names = set(file.keys())
    if names != set(expected):
        missing, foreign = sorted(set(expected) - names), sorted(names - set(expected))
        raise DumpError(
            f"{path} holds other tensors than it should: missing {', '.join(missing)[:200] or 'none'}, foreign "
            f"{', '.join(foreign)[:200] or 'none'}"
        )
    for name, wanted in expected.items():
        view = file.get_slice(name)
        found = (view.get_dtype(), list(view.get_shape()))
        if found != wanted:
            raise DumpError(f"{path}, {name}: expected {wanted[0]} {wanted[1]}, found {found[0]} {found[1]}")


def check_size(path: Path, expected: int) -> None:
    """NotAsWritten where the file is not as long as the manifest says."""
    found = path.stat().st_size
    if found != expected:
        what = "truncated" if found < expected else "longer than it was written"
        raise NotAsWritten(f"{path} is {what}: {found} bytes instead of {expected}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a dump; DumpError where there is none."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise DumpError(
            f"{folder} has no {MANIFEST_NAME}: the dump does not exist, or extraction did not finish (it writes the "
            "manifest last). Run the extraction again with the same parameters; it goes on from what is stored"
        )
    with inside(folder, MANIFEST_NAME).open("rb") as file:
        return Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1), where=str(path))


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write manifest.json, which makes the dump exist. Refuses to overwrite one; returns its path."""
    path = folder / MANIFEST_NAME
    publish(path, lambda temporary: _write(temporary, manifest.canonical()), replace=False)
    return path


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
