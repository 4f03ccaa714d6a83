"""How a training reads its dump: from a fetched copy, or as a stream where this machine's disk cannot hold one."""

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.refs import DumpRef
from infra.settings import Settings
from tasks.artifacts import dump_folder, fetch_dump, named_dump
from tasks.room import NoRoom

if TYPE_CHECKING:
    from eagle3.dump.reader import SampleReader
    from eagle3.dump.source import ByteSource

LEAST_CACHE = 2**30  # bytes: 8 blocks of 64 MiB are in use at a time, and sizes vary
_READ_AHEAD = 2  # batches
_SPARE = 0.9  # of the free disk: others write there too


@dataclass(frozen=True)
class TrainingData:
    """An open dump. Which way it is read changes no result of a training, only its pace."""

    reader: "SampleReader"
    heldout_reader: "SampleReader"  # of the same dump, for samples that lie far apart
    read_ahead: int  # batches
    streamed: str | None  # what to tell a person; None where a copy is read


def open_training_data(ref: DumpRef, settings: Settings) -> TrainingData:
    """Fetch the dump, or stream it: as EAGLE3_DUMP_STREAMING says, and by itself where a copy does not fit the disk.

    WrongArtifact where the store holds another dump than the reference names; NoRoom where neither a copy nor the
    cache of a stream fits.
    """
    from eagle3.dump.reader import DumpReader
    from infra.store_source import StoreSource

    store, manifest = named_dump(ref, settings)
    needed, free = sum(entry.bytes for entry in manifest.files), _free(settings)
    if not _streams(ref, settings, needed, free):
        reader = DumpReader.open(fetch_dump(ref, settings), expect_sha256=ref.sha256)
        return TrainingData(reader, reader, 0, None)
    return _stream(ref, settings, StoreSource(store), needed, free)


def _streams(ref: DumpRef, settings: Settings, needed: int, free: int) -> bool:
    if settings.dump_streaming == "auto":
        return not dump_folder(ref, settings).exists() and needed > _SPARE * free
    return settings.dump_streaming == "always"


def _stream(ref: DumpRef, settings: Settings, source: "ByteSource", needed: int, free: int) -> TrainingData:
    from eagle3.dump.cache import BlockCache
    from eagle3.dump.stream import StreamReader

    folder = settings.root / "cache" / "streams"
    held = BlockCache(folder, 0).used()
    room = min(int(settings.dump_cache), int(_SPARE * (free + held)))
    if room < LEAST_CACHE:
        raise NoRoom(
            f"the dump {ref.uri} has {needed / 1e9:.1f} GB, and the disk of {settings.root} has {free / 1e9:.1f} GB "
            f"free: neither a copy nor the cache of a stream ({LEAST_CACHE / 1e9:.1f} GB) fits. Free some space, or "
            "set EAGLE3_HOME to a larger disk"
        )
    reader = StreamReader.open(source, BlockCache(folder, room), expect_sha256=ref.sha256)
    told = (
        f"the dump has {needed / 1e9:.1f} GB and this disk {free / 1e9:.1f} GB free: it is read from {ref.uri} in "
        f"blocks of {reader.block_samples} samples, through a cache of {room / 1e9:.1f} GB (EAGLE3_DUMP_CACHE). Every "
        "pass over the samples reads from the store what the cache does not hold"
    )
    return TrainingData(reader, reader.with_blocks(1), _READ_AHEAD, told)


def _free(settings: Settings) -> int:
    settings.root.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(settings.root).free
