"""A dump read by ranges: the samples of its folder, verified, through a cache that may be small or damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.dump.cache import BlockCache
from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.order import row_bytes
from eagle3.dump.reader import DumpReader, Sample
from eagle3.dump.source import FolderSource
from eagle3.dump.stream import StreamReader
from tests.dumps import Capture, capture, flip_bit, reseal, write_dump

pytestmark = pytest.mark.unit

ROOM = 10**9


class CountingSource(FolderSource):
    """Counts what is asked for, and damages bytes on their way as often as it is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[str, int, int]] = []
        self.damage: Callable[[str, int], bool] = lambda name, start: False

    def read(self, name: str, start: int, length: int) -> bytes:
        self.reads.append((name, start, length))
        data = super().read(name, start, length)
        return bytes([data[0] ^ 1]) + data[1:] if self.damage(name, start) else data

    def shard_bytes(self) -> int:
        return sum(length for name, _, length in self.reads if name.startswith("shard"))


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture
def dump(captured: Capture, tmp_path: Path) -> Path:
    """8 samples in several shards, the last one alone in its own."""
    write_dump(captured, tmp_path / "dump")
    return tmp_path / "dump"


@pytest.fixture
def packed(captured: Capture, tmp_path: Path) -> Path:
    """8 samples in one shard."""
    write_dump(captured, tmp_path / "packed", shard_bytes=2**30)
    return tmp_path / "packed"


def stream(source: FolderSource, tmp_path: Path, *, block_samples: int = 3, room: int = ROOM) -> StreamReader:
    return StreamReader.open(source, BlockCache(tmp_path / "cache", room), block_samples=block_samples)


def same(one: Sample, other: Sample) -> bool:
    return (
        one.record == other.record
        and torch.equal(one.input_ids, other.input_ids)
        and torch.equal(one.loss_mask, other.loss_mask)
        and list(one.states) == list(other.states)
        and all(
            torch.equal(state, other.states[p]) and state.dtype == other.states[p].dtype
            for p, state in one.states.items()
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_samples", [1, 3, 100])
@pytest.mark.parametrize("room", [ROOM, 0])
def test_a_stream_gives_what_the_folder_gives(
    captured: Capture, tmp_path: Path, dtype: torch.dtype, block_samples: int, room: int
) -> None:
    write_dump(captured, tmp_path / "dump", dtype=dtype)
    mapped, source = DumpReader.open(tmp_path / "dump"), FolderSource(tmp_path / "dump")
    if room == 0 and block_samples > 1:
        with pytest.raises(DumpError, match=f"smaller than a block of {block_samples} samples"):
            stream(source, tmp_path, block_samples=block_samples, room=room)
        return
    reader = stream(source, tmp_path, block_samples=block_samples, room=room)
    assert len(reader) == len(mapped)
    for _ in range(2):
        for index in (5, 0, 7, 1, 2, 6, 3, 4):
            assert same(reader.read(index), mapped.read(index))
            assert all(torch.equal(a, b) for a, b in zip(reader.tokens(index), mapped.tokens(index), strict=True))


def test_only_the_rows_of_a_block_are_fetched_and_only_once(packed: Path, tmp_path: Path) -> None:
    source = CountingSource(packed)
    reader = stream(source, tmp_path)
    assert source.shard_bytes() == 0
    reader.read(4)
    rows = sum(reader.records[index].rows for index in (3, 4, 5))
    of_header = 16 * 1024
    assert source.shard_bytes() - of_header == rows * (
        row_bytes(reader.manifest) - 1
    )  # the mask follows from the record
    before = len(source.reads)
    for index in (3, 4, 5, 3):
        reader.read(index)
    assert len(source.reads) == before
    reader.read(6)
    assert len(source.reads) > before


def test_token_ids_are_read_without_the_states(packed: Path, tmp_path: Path) -> None:
    source = CountingSource(packed)
    reader = stream(source, tmp_path)
    for index in range(len(reader)):
        reader.tokens(index)
    assert source.shard_bytes() == 16 * 1024 + 8 * reader.manifest.num_tokens


def test_a_block_that_is_a_shard_is_taken_whole(dump: Path, tmp_path: Path) -> None:
    source = CountingSource(dump)
    reader = stream(source, tmp_path, block_samples=100)
    reader.read(0)
    entry = reader.manifest.shards[0]
    assert [read for read in source.reads if read[0] == entry.name] == [(entry.name, 0, entry.bytes)]


@pytest.mark.parametrize("block_samples", [1, 3, 100])
def test_a_flipped_bit_is_found_in_the_sample_that_has_it(packed: Path, tmp_path: Path, block_samples: int) -> None:
    last_row_of_all = packed / "shard-00000.safetensors"
    size = last_row_of_all.stat().st_size
    flip_bit(last_row_of_all, at=(size - DumpReader.open(packed).manifest.num_tokens - 4) / size)  # masks end the file
    reader = stream(FolderSource(packed), tmp_path, block_samples=block_samples)
    damaged = len(reader) - 1
    if block_samples < 100:  # where a whole shard comes, nothing of it is believed
        for index in range(damaged):
            assert reader.read(index).id == reader.records[index].id
    with pytest.raises(
        DumpError, match=rf"{packed}/shard-00000.safetensors: sample '{reader.records[damaged].id}', rows"
    ):
        reader.read(damaged)


def test_flipped_token_ids_are_found(packed: Path, tmp_path: Path) -> None:
    shard = packed / "shard-00000.safetensors"
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    start = 8 + header + json.loads(shard.read_bytes()[8 : 8 + header])["input_ids"]["data_offsets"][0]
    flip_bit(shard, at=(start + 0.5) / shard.stat().st_size)
    reader = stream(FolderSource(packed), tmp_path)
    with pytest.raises(DumpError, match=f"the token ids of sample '{reader.records[0].id}' came 2 times"):
        reader.tokens(0)
    with pytest.raises(DumpError, match=f"sample '{reader.records[0].id}'"):
        reader.read(0)
    assert reader.tokens(1)[0].tolist()
    assert reader.read(1).id == reader.records[1].id


@pytest.mark.parametrize("block_samples", [3, 100])
def test_what_was_damaged_on_its_way_once_is_fetched_again(packed: Path, tmp_path: Path, block_samples: int) -> None:
    source = CountingSource(packed)
    reader = stream(source, tmp_path, block_samples=block_samples)
    left = [1]
    source.damage = lambda name, start: (
        name.startswith("shard") and (block_samples == 100 or start > 100_000) and bool(left and left.pop())
    )
    assert same(reader.read(0), DumpReader.open(packed).read(0))
    assert not left


def test_a_damaged_cache_is_noticed_and_mended(packed: Path, tmp_path: Path) -> None:
    source = CountingSource(packed)
    reader, mapped = stream(source, tmp_path), DumpReader.open(packed)
    reader.read(0)
    (piece,) = (path for path in (tmp_path / "cache").iterdir() if path.name[0] != ".")
    for spoil in (lambda: flip_bit(piece, at=0.99), lambda: piece.write_bytes(piece.read_bytes()[:-1]), piece.unlink):
        spoil()
        before = len(source.reads)
        assert all(same(reader.read(index), mapped.read(index)) for index in range(3))
        assert len(source.reads) > before
        before = len(source.reads)
        assert all(same(reader.read(index), mapped.read(index)) for index in range(3))
        assert len(source.reads) == before


def test_readers_share_a_cache_and_never_another_dumps(captured: Capture, packed: Path, tmp_path: Path) -> None:
    stream(CountingSource(packed), tmp_path).read(0)
    again = CountingSource(packed)
    stream(again, tmp_path).read(1)
    assert again.shard_bytes() == 0
    write_dump(captured, tmp_path / "other", shard_bytes=2**30, dtype=torch.float32, packages={"torch": "other"})
    other = CountingSource(tmp_path / "other")
    stream(other, tmp_path).read(1)
    assert other.shard_bytes() > 0


def test_a_cache_of_a_third_of_the_dump_stays_so(packed: Path, tmp_path: Path) -> None:
    mapped = DumpReader.open(packed)
    room = mapped.manifest.num_tokens * row_bytes(mapped.manifest) // 3
    reader = stream(FolderSource(packed), tmp_path, block_samples=1, room=room)
    for index in (*range(8), *range(8)):
        assert same(reader.read(index), mapped.read(index))
        assert BlockCache(tmp_path / "cache", 0).used() <= room


def test_a_dump_that_is_not_there_or_another_is_refused(dump: Path, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", ROOM)
    with pytest.raises(DumpError, match=f"expected manifest digest {'0' * 64}, found"):
        StreamReader.open(FolderSource(dump), cache, expect_sha256="0" * 64)
    samples = dump / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-2] + b" \n")
    with pytest.raises(DumpError, match=r"samples\.jsonl is not the file that the manifest names"):
        StreamReader.open(FolderSource(dump), cache)
    samples.write_bytes(samples.read_bytes()[:-2])
    with pytest.raises(DumpError, match=r"samples\.jsonl is truncated"):
        StreamReader.open(FolderSource(dump), cache)
    (dump / "manifest.json").unlink()
    with pytest.raises(DumpError, match=r"manifest\.json is missing"):
        StreamReader.open(FolderSource(dump), cache)


def test_a_truncated_and_a_missing_shard_are_named(packed: Path, tmp_path: Path) -> None:
    shard = packed / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DumpError, match=r"shard-00000\.safetensors has \d+ bytes instead of \d+"):
        stream(FolderSource(packed), tmp_path).read(0)
    with pytest.raises(DumpError, match=r"shard-00000\.safetensors is truncated"):
        stream(FolderSource(packed), tmp_path, block_samples=100).read(0)
    shard.unlink()
    with pytest.raises(DumpError, match=r"shard-00000\.safetensors is missing"):
        stream(FolderSource(packed), tmp_path).read(0)


def rewrite_header(folder: Path, change: Callable[[dict], object], *, raw: bytes | None = None) -> None:
    """Change a shard's header and seal the dump again, as an attacker would: the file's own digest is right."""
    shard = folder / "shard-00000.safetensors"
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    told = raw if raw is not None else json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    shard.write_bytes(len(told).to_bytes(8, "little") + told + data[end:])
    reseal(folder)


HEADERS: list[tuple[str, Callable[[dict], object], str]] = [
    ("beyond the end", lambda h: h["norm"].update(data_offsets=[2**40, 2**40 + 1]), "cannot lie at"),
    ("before the start", lambda h: h["norm"].update(data_offsets=[-8, 8]), "cannot lie at"),
    ("no numbers", lambda h: h["norm"].update(data_offsets=[True, None]), "cannot lie at"),
    ("no tensor", lambda h: h.update(norm=7), "expected F32"),
    ("another shape", lambda h: h["norm"].update(shape=[1, 64]), "expected F32"),
    ("another dtype", lambda h: h["norm"].update(dtype="F64"), "expected F32"),
    ("a foreign tensor", lambda h: h.update(extra=h["norm"]), "foreign extra"),
    ("a missing tensor", lambda h: h.pop("norm"), "missing norm"),
    ("swapped tensors", lambda h: h.update({"norm": h["layers.1"], "layers.1": h["norm"]}), "sample 'p00000', rows"),
]


@pytest.mark.parametrize(("change", "message"), [h[1:] for h in HEADERS], ids=[h[0] for h in HEADERS])
@pytest.mark.parametrize("block_samples", [3, 100])
def test_a_header_that_lies_is_refused(
    packed: Path, tmp_path: Path, block_samples: int, change: Callable[[dict], object], message: str
) -> None:
    rewrite_header(packed, change)
    with pytest.raises(DumpError, match=message):
        stream(FolderSource(packed), tmp_path, block_samples=block_samples).read(0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"[]", "not a JSON object"), (b'{"a": ', "not a JSON object"), (b"[" * 100_000, "not a JSON object")],
)
def test_a_header_that_is_none_is_refused(packed: Path, tmp_path: Path, raw: bytes, message: str) -> None:
    rewrite_header(packed, lambda _: None, raw=raw)
    with pytest.raises(DumpError, match=message):
        stream(FolderSource(packed), tmp_path).read(0)
    shard = packed / "shard-00000.safetensors"
    shard.write_bytes((2**62).to_bytes(8, "little") + shard.read_bytes()[8:])
    reseal(packed)
    with pytest.raises(DumpError, match=f"its header would have {2**62} bytes"):
        stream(FolderSource(packed), tmp_path).read(0)


def test_a_long_header_is_read_in_full(packed: Path, tmp_path: Path) -> None:
    rewrite_header(packed, lambda header: header.update(__metadata__={"note": "x" * 40_000}))
    assert same(stream(FolderSource(packed), tmp_path).read(0), DumpReader.open(packed).read(0))


def test_blocks_of_another_size_read_the_same_dump(packed: Path, tmp_path: Path) -> None:
    source = CountingSource(packed)
    alone = stream(source, tmp_path).with_blocks(1)
    before = source.shard_bytes()
    assert same(alone.read(2), DumpReader.open(packed).read(2))
    fetched = source.shard_bytes() - before - 16 * 1024
    assert fetched == alone.records[2].rows * (row_bytes(alone.manifest) - 1)


def test_what_was_read_may_be_written_to_and_outlives_the_cache(packed: Path, tmp_path: Path) -> None:
    reader = stream(FolderSource(packed), tmp_path)
    first, again = reader.read(0), reader.read(0)
    for state in first.states.values():
        state.zero_()
    shutil.rmtree(tmp_path / "cache")
    assert same(again, DumpReader.open(packed).read(0))
    assert same(reader.read(1), DumpReader.open(packed).read(1))


def test_manifest_comes_as_it_is(packed: Path, tmp_path: Path) -> None:
    manifest = stream(FolderSource(packed), tmp_path).manifest
    assert manifest == Manifest.parse((packed / "manifest.json").read_bytes(), where="")
