"""Dumps and checkpoints between this machine's disk and the store; what arrives is checked against its reference."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DumpError, FileEntry, Manifest
from eagle3.errors import Eagle3Error
from eagle3.refs import CheckpointRef, DumpRef
from infra.settings import Settings
from infra.store import Store, StoreError, open_store

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
    """A local folder with the dump, every file checked against the manifest's sha256. Cached by manifest digest."""
    store = open_store(ref.uri, settings)
    manifest = read_manifest(ref.uri, store)
    if manifest.digest() != ref.sha256:
        raise WrongArtifact(
            f"{ref.uri} holds a dump with manifest digest {manifest.digest()[:16]}, the reference names "
            f"{ref.sha256[:16]}: it was replaced after the reference was made"
        )
    folder = settings.root / "cache" / "dumps" / ref.sha256
    if (folder / MANIFEST_NAME).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    entries: tuple[FileEntry, ...] = (*manifest.shards, manifest.samples)
    for entry in entries:
        store.get_file(entry.name, folder / entry.name, sha256=entry.sha256, size=entry.bytes)
    from eagle3.dump.writer import write_manifest

    write_manifest(folder, manifest)
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
    folder = settings.root / "cache" / "drafters" / ref.sha256
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in _CHECKPOINT_FILES:
            store.get_file(name, partial / name)
        partial.rename(folder)
    checkpoint = load_checkpoint(folder)
    if checkpoint.contract != contract:
        raise WrongArtifact(f"{folder} is not the drafter that {ref.uri} names: remove that folder and run again")
    return folder, checkpoint


def verify_dump(uri: str, settings: Settings) -> "EvidenceReport":
    """Integrity of a dump wherever it lies; CannotCheck where it cannot be read."""
    from eagle3.evidence.validate import verify_integrity

    if "://" not in uri:
        uri = Path(uri).expanduser().resolve().as_uri()
    try:
        if uri.startswith("file://"):
            return verify_integrity(Path(uri.removeprefix("file://")))
        store = open_store(uri, settings)
        manifest = read_manifest(uri, store)
        folder = settings.root / "cache" / "verify" / manifest.digest()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name in (MANIFEST_NAME, manifest.samples.name, *(shard.name for shard in manifest.shards)):
                store.get_file(name, folder / name)
            return verify_integrity(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except (StoreError, DumpError) as error:
        raise CannotCheck(str(error)) from None
