"""Dumps and checkpoints between this machine's disk and the store; what arrives is checked against its reference."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from eagle3.errors import Eagle3Error
from eagle3.refs import CheckpointRef, DumpRef
from infra.settings import Settings
from infra.store import DAMAGED, MissingObject, Store, StoreCorrupt, StoreError, open_store

if TYPE_CHECKING:
    from eagle3.drafter.checkpoint import Checkpoint
    from eagle3.evidence.report import EvidenceReport

_MAX_CONTRACT_BYTES = 2**20
_CHECKPOINT_FILES = ("model.safetensors", "config.json", CONTRACT_NAME)


class WrongArtifact(Eagle3Error):
    """A dump or checkpoint that is not the one its reference names."""


class CannotCheck(Eagle3Error):
    """A dump that could not be read, so that nothing is known of it."""


def fetch_dump(ref: DumpRef, settings: Settings) -> Path:
    """A local folder with the dump, kept under the manifest's digest.

    What is fetched is compared with the manifest's sizes and sha256 on its way. Of a dump that was fetched before, the
    files that changed since are hashed again: WrongArtifact where one is not the manifest's.
    """
    store, manifest = named_dump(ref, settings)
    folder = keep(dump_folder(ref, settings), lambda path: _fetch(store, manifest, path, settings))
    _check_kept(folder, manifest, settings)
    return folder


@contextmanager
def fetch_again(ref: DumpRef, settings: Settings) -> Iterator[Path]:
    """The dump as its store holds it now, whatever was fetched before; kept for later stages that have none."""
    store, manifest = named_dump(ref, settings)
    kept = dump_folder(ref, settings)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".again-", dir=kept.parent) as scratch:
        fresh = Path(scratch) / ref.sha256
        _fetch(store, manifest, fresh, settings)
        keep(kept, fresh.rename)
        yield fresh if fresh.exists() else kept


def named_dump(ref: DumpRef, settings: Settings) -> tuple[Store, Manifest]:
    """A dump's store and manifest; WrongArtifact where another dump lies there than the reference names."""
    store = open_store(ref.uri, settings)
    manifest = read_manifest(ref.uri, store)
    if manifest.digest() != ref.sha256:
        raise WrongArtifact(
            f"{ref.uri} holds a dump with manifest digest {manifest.digest()[:16]}, the reference names "
            f"{ref.sha256[:16]}: it was replaced after the reference was made"
        )
    return store, manifest


def dump_folder(ref: DumpRef, settings: Settings) -> Path:
    """Where a dump lies on this machine once it was fetched."""
    return settings.root / "cache" / "dumps" / ref.sha256


def _fetch(store: Store, manifest: Manifest, folder: Path, settings: Settings) -> None:
    from eagle3.dump.files import write_manifest
    from eagle3.target.digest_cache import DigestCache

    folder.mkdir()
    digests = DigestCache(settings.root / "cache")
    for entry in manifest.files:
        store.get_file(entry.name, folder / entry.name, sha256=entry.sha256, size=entry.bytes)
        digests.remember(folder / entry.name, entry.sha256)
    digests.save()
    write_manifest(folder, manifest)


def _check_kept(folder: Path, manifest: Manifest, settings: Settings) -> None:
    """A report speaks of bytes: the ones on this disk must still be they."""
    from eagle3.target.digest_cache import DigestCache

    digests = DigestCache(settings.root / "cache")
    for entry in manifest.files:
        path = folder / entry.name
        if not path.is_file() or digests.sha256(path) != entry.sha256:
            raise WrongArtifact(
                f"{path} is missing or not what was fetched: its sha256 is not the manifest's {entry.sha256[:16]}. A "
                f"disk failed, or somebody changed it: remove {folder} and run again"
            )
    digests.save()


def keep(folder: Path, make: Callable[[Path], object]) -> Path:
    """The cached `folder`; where there is none, what `make(path)` puts at a path of its own beside it, renamed.

    Several processes may make the same folder at once: the first one's stays, and all of them use it.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        make(scratch / folder.name)
        try:
            (scratch / folder.name).rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def read_manifest(uri: str, store: Store) -> Manifest:
    return Manifest.parse(store.get_bytes(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES), where=f"{uri}/{MANIFEST_NAME}")


def publish_checkpoint(folder: Path, uri: str, contract: DrafterContract, settings: Settings) -> CheckpointRef:
    """Upload a checkpoint; the contract goes last, so that a prefix with one is complete."""
    from eagle3.digests import sha256_file

    store = open_store(uri, settings)
    for name in _CHECKPOINT_FILES:
        store.put_file(name, folder / name, sha256=sha256_file(folder / name))
    return CheckpointRef(uri=uri, sha256=contract.digest())


def fetch_checkpoint(ref: CheckpointRef, settings: Settings) -> "tuple[Path, Checkpoint]":
    """A local folder with the checkpoint, loaded and checked: contract by the reference, weights by the contract."""
    from eagle3.drafter.checkpoint import load_checkpoint

    store = open_store(ref.uri, settings)
    data = store.get_bytes(CONTRACT_NAME, max_bytes=_MAX_CONTRACT_BYTES)
    contract = DrafterContract.parse(data, where=f"{ref.uri}/{CONTRACT_NAME}")
    if contract.digest() != ref.sha256:
        raise WrongArtifact(
            f"{ref.uri} holds a drafter with contract digest {contract.digest()[:16]}, the reference names "
            f"{ref.sha256[:16]}"
        )

    def fetch(folder: Path) -> None:
        folder.mkdir()
        for name in _CHECKPOINT_FILES:
            store.get_file(name, folder / name)
        load_checkpoint(folder)  # a damaged one is not kept

    folder = keep(drafter_folder(ref.sha256, settings), fetch)
    checkpoint = load_checkpoint(folder)
    if checkpoint.contract != contract:
        raise WrongArtifact(f"{folder} is not the drafter that {ref.uri} names: remove that folder and run again")
    return folder, checkpoint


def drafter_folder(contract_sha256: str, settings: Settings) -> Path:
    """Where a drafter lies on this machine once it was trained or fetched."""
    return settings.root / "cache" / "drafters" / contract_sha256


def verify_dump(
    uri: str, settings: Settings, *, on_progress: Callable[[int, int], None] | None = None
) -> "EvidenceReport":
    """Integrity of a dump at a URI or in a folder: a file that is missing or damaged is a failed check that names it.

    `on_progress` counts files.
    CannotCheck where the store does not answer, or where there is no manifest to check against.
    """
    from eagle3.evidence.files import verify_integrity

    if "://" not in uri:
        uri = Path(uri).expanduser().resolve().as_uri()
    store = open_store(uri, settings)
    try:
        if uri.startswith("file://"):
            folder = Path(url2pathname(urlsplit(uri).path))
            if not (folder / MANIFEST_NAME).exists():
                raise CannotCheck(_no_manifest(folder))
            return verify_integrity(folder, on_progress=on_progress)
        return _verify_stored(uri, store, settings, on_progress)
    except StoreError as error:
        raise CannotCheck(str(error)) from None


def _no_manifest(path: Path) -> str:
    """Why a path of this machine cannot be verified, and what can be done with it instead."""
    if not path.exists():
        return f"{path} does not exist"
    from eagle3.dump.foreign import LAYOUTS  # brings torch, which a dump with a manifest is verified without

    layout = next((layout for layout in LAYOUTS.values() if layout.find(path)), None)
    if layout is not None:
        return (
            f"{path} is a dump without a manifest, of the layout {layout.name} ({layout.made_by}): only dumps that "
            "eagle3 writes have digests to compare with. `eagle3 dump inspect` says what it is, `eagle3 dump attribute "
            "--target DIR` which layers it holds"
        )
    if path.is_file():
        return f"{path} is a file: name the folder that holds {MANIFEST_NAME}"
    if any(path.glob("shard-*.safetensors")):
        return (
            f"{path} has no {MANIFEST_NAME}, which is written last: its extraction or its copy did not finish. Start "
            "it again with the same parameters, and it goes on from what is there"
        )
    return f"{path} has no {MANIFEST_NAME}: it is no dump"


def _verify_stored(
    uri: str, store: Store, settings: Settings, on_progress: Callable[[int, int], None] | None
) -> "EvidenceReport":
    """File by file through a folder of this call's own, so that a dump larger than the disk can be checked too."""
    from eagle3.dump.files import write_manifest
    from eagle3.evidence.files import FileIntegrity
    from eagle3.evidence.report import EvidenceReport

    manifest = read_manifest(uri, store)
    parent = settings.root / "staging"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=parent) as name:
        folder = Path(name)
        write_manifest(folder, manifest)
        files = FileIntegrity(folder, manifest.digest())
        files.see_manifest()
        for number, entry in enumerate(manifest.files, start=1):
            if on_progress is not None:
                on_progress(number - 1, len(manifest.files))
            try:
                store.get_file(entry.name, folder / entry.name, sha256=entry.sha256, size=entry.bytes)
            except MissingObject:
                files.see_broken(entry, f"{store.uri_of(entry.name)} is missing: the manifest names it")
                continue
            except StoreCorrupt as error:
                files.see_broken(entry, str(error).removesuffix(DAMAGED).rstrip(" ."))
                continue
            files.see_file(entry)
            (folder / entry.name).unlink()
    return EvidenceReport(dump_sha256=manifest.digest(), checks=tuple(files.conclude()), created_at=datetime.now(UTC))
