"""Read a dump that lies elsewhere: ranges of its shards, through a bounded local cache, each sample verified."""

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from eagle3.capture import CapturePoint
from eagle3.digests import sha256_bytes, sha256_ids
from eagle3.dump.cache import BlockCache
from eagle3.dump.content import DTYPES, loss_mask, sample_digest
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DumpError, Manifest, SampleRecord, ShardEntry
from eagle3.dump.order import samples_per_block
from eagle3.dump.reader import Sample, check_expected, parse_records
from eagle3.dump.shard_layout import HEADER_FETCH, ShardLayout, header_end, parse_layout, row_widths
from eagle3.dump.source import ByteSource
from eagle3.dump.writer import INPUT_IDS, LOSS_MASK

T = TypeVar("T")

_REQUESTS = 4  # at a time
_TRIES = 2  # what is wrong once may have been damaged on its way
_MAX_SAMPLES_BYTES = 2**30


@dataclass(frozen=True)
class _Piece:
    """Neighbouring samples of one shard, fetched together: rows first_row ... end_row - 1 of each tensor."""

    shard: int
    first: int  # index of its first sample
    end: int
    first_row: int
    end_row: int

    @property
    def rows(self) -> int:
        return self.end_row - self.first_row

    @property
    def name(self) -> str:
        """Of its file in the cache."""
        return f"{self.shard}-{self.first}-{self.end}"


class StreamReader:
    """A dump behind a `ByteSource`; `open` it. Reads like a `DumpReader`, from one thread at a time.

    What is fetched is a block: `block_samples` neighbours, or as many of them as lie in one shard. It stays in the
    cache under the manifest's digest, so several readers and processes can share one. Every sample is compared with its
    digest whenever it is read, from the store or from the cache; a block that is exactly a shard is compared with the
    shard's sha256 as well. What is damaged is fetched once more, then a DumpError names the sample and its object.

    A sample's tensors are its own memory; of a block no more than one copy is in memory, and only while it is fetched.
    """

    def __init__(
        self, source: ByteSource, manifest: Manifest, records: list[SampleRecord], cache: BlockCache, block_samples: int
    ) -> None:
        self.manifest, self.records = manifest, records
        self.block_samples = block_samples
        self._source, self._cache = source, cache
        self._prefix = manifest.digest()[:32]
        widths = row_widths(manifest)
        del widths[LOSS_MASK]  # it follows from the record
        self._widths = widths
        self._row_bytes = sum(widths.values())
        self._layouts: dict[int, ShardLayout] = {}
        self._ids: tuple[int, bytes] = (-1, b"")  # a shard's token ids, as they lie
        self._starts = [0]
        for shard in manifest.shards:
            self._starts.append(self._starts[-1] + shard.samples)
        largest = self._largest_block()
        if block_samples > 1 and largest > cache.max_bytes:
            raise DumpError(
                f"the cache of {cache.max_bytes} bytes is smaller than a block of {block_samples} samples, which has "
                f"up to {largest}: every sample would fetch its whole block. Give it more room, or take smaller blocks"
            )

    @classmethod
    def open(
        cls,
        source: ByteSource,
        cache: BlockCache,
        *,
        block_samples: int | None = None,
        expect_sha256: str | None = None,
    ) -> Self:
        """Fetch and check the manifest and samples.jsonl. DumpError as `DumpReader.open` raises it.

        Unless they are given, blocks are those of the order in which training reads (`samples_per_block`).
        """
        manifest, records = _twice(lambda: _read_index(source, expect_sha256))
        return cls(source, manifest, records, cache, block_samples or samples_per_block(manifest))

    def with_blocks(self, block_samples: int) -> "StreamReader":
        """The same dump and cache with blocks of another size: of 1 for samples that are read without neighbours."""
        return StreamReader(self._source, self.manifest, self.records, self._cache, block_samples)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> Sample:
        """The sample at that place of samples.jsonl, verified."""
        record = self.records[index]
        piece = self._piece(index)
        name = f"{self._prefix}-{piece.name}"
        spans = self._spans_in(piece, record)
        parts = self._cache.read(name, piece.rows * self._row_bytes, spans)
        if parts is not None and (sample := self._verified(record, parts)) is not None:
            return sample
        self._cache.drop(name)
        for _ in range(_TRIES):
            fetched = self._fetch(piece)
            sample = self._verified(record, _cut(fetched, spans)) if fetched is not None else None
            if fetched is not None and sample is not None:
                self._cache.write(name, fetched)
                return sample
            self._layouts.pop(record.shard, None)  # it came from the store as well
        raise DumpError(
            f"{self._where(record.shard)}: sample {record.id!r}, rows {record.start} to "
            f"{record.start + record.rows - 1}, came {_TRIES} times with another digest than the dump has for it. The "
            "object is damaged: `eagle3 dump verify` says what else is; extract again"
        )

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, loss mask), each [rows + 1]; the token ids of one shard are fetched, and no state."""
        record = self.records[index]
        for _ in range(_TRIES):
            data = bytearray(self._shard_ids(record.shard)[record.start * 8 : (record.start + record.rows) * 8])
            if (ids := self._checked_ids(record, data)) is not None:
                sample = Sample(record.id, record, ids, loss_mask(record), {})
                return sample.full_ids(), sample.full_mask()
            self._ids = (-1, b"")
            self._layouts.pop(record.shard, None)
        raise DumpError(
            f"{self._where(record.shard)}: the token ids of sample {record.id!r} came {_TRIES} times with another "
            "digest than the dump has for them. The object is damaged: `eagle3 dump verify` says what else is; extract "
            "again"
        )

    def _shard_ids(self, shard: int) -> bytes:
        if self._ids[0] != shard:
            layout, entry = self._layout(shard), self.manifest.shards[shard]
            self._ids = (shard, self._source.read(entry.name, layout.starts[INPUT_IDS], entry.tokens * 8))
        return self._ids[1]

    def _piece(self, index: int) -> _Piece:
        shard = self.records[index].shard
        block = index // self.block_samples * self.block_samples
        first = max(block, self._starts[shard])
        end = min(block + self.block_samples, self._starts[shard + 1])
        last = self.records[end - 1]
        return _Piece(shard, first, end, self.records[first].start, last.start + last.rows)

    def _largest_block(self) -> int:
        rows = [
            sum(record.rows for record in self.records[first : first + self.block_samples])
            for first in range(0, len(self.records), self.block_samples)
        ]
        return max(rows) * self._row_bytes

    def _spans_in(self, piece: _Piece, record: SampleRecord) -> list[tuple[int, int]]:
        """Where a sample's rows lie in a piece: (start, bytes) for each tensor."""
        spans, start = [], 0
        for width in self._widths.values():
            spans.append((start + (record.start - piece.first_row) * width, record.rows * width))
            start += piece.rows * width
        return spans

    def _fetch(self, piece: _Piece) -> list[memoryview] | None:
        """A piece's rows of each tensor; None where a whole shard came and is not the one that the manifest names."""
        entry = self.manifest.shards[piece.shard]
        if piece.rows == entry.tokens:
            return self._fetch_shard(piece.shard, entry)
        layout = self._layout(piece.shard)
        spans = [
            (layout.starts[name] + piece.first_row * width, piece.rows * width) for name, width in self._widths.items()
        ]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(lambda span: memoryview(self._source.read(entry.name, *span)), spans))

    def _fetch_shard(self, shard: int, entry: ShardEntry) -> list[memoryview] | None:
        data = self._source.read(entry.name, 0, entry.bytes)
        if sha256_bytes(data) != entry.sha256:
            return None
        where = self._where(shard)
        layout = parse_layout(data[: header_end(data, entry, where)], self.manifest, entry, where)
        spans = [(layout.starts[name], entry.tokens * width) for name, width in self._widths.items()]
        return [memoryview(data)[start : start + length] for start, length in spans]

    def _layout(self, shard: int) -> ShardLayout:
        if shard not in self._layouts:
            entry, where = self.manifest.shards[shard], self._where(shard)
            if (size := self._source.size(entry.name)) != entry.bytes:
                raise DumpError(f"{where} has {size} bytes instead of {entry.bytes}. Extract again")
            self._layouts[shard] = _twice(lambda: self._read_layout(entry, where))
        return self._layouts[shard]

    def _read_layout(self, entry: ShardEntry, where: str) -> ShardLayout:
        head = self._source.read(entry.name, 0, min(HEADER_FETCH, entry.bytes))
        end = header_end(head, entry, where)
        if end > len(head):
            head = self._source.read(entry.name, 0, end)
        return parse_layout(head[:end], self.manifest, entry, where)

    def _verified(self, record: SampleRecord, parts: Sequence[bytearray]) -> Sample | None:
        """The sample made of these rows; None where they are not its."""
        ids = self._checked_ids(record, parts[0])
        if ids is None:
            return None
        points, dtype = self.manifest.spec.points, DTYPES[self.manifest.dtype]
        states: dict[CapturePoint, torch.Tensor] = {
            point: torch.frombuffer(part, dtype=dtype).view(record.rows, -1)
            for point, part in zip(points, parts[1:], strict=True)
        }
        found = sample_digest(record.id, record.ids_sha256, record.prompt_tokens, states, points, record.spans)
        return Sample(record.id, record, ids, loss_mask(record), states) if found == record.digest else None

    def _checked_ids(self, record: SampleRecord, data: bytearray) -> torch.Tensor | None:
        ids = torch.frombuffer(data, dtype=torch.int64)
        return ids if sha256_ids([*ids.tolist(), record.last_token_id]) == record.ids_sha256 else None

    def _where(self, shard: int) -> str:
        return f"{self._source.where}/{self.manifest.shards[shard].name}"


def _cut(parts: Sequence[memoryview], spans: Sequence[tuple[int, int]]) -> list[bytearray]:
    """Spans of the parts laid end to end, none of which leaves its part."""
    cut, start = [], 0
    for part, (begin, length) in zip(parts, spans, strict=True):
        cut.append(bytearray(part[begin - start : begin - start + length]))
        start += len(part)
    return cut


def _read_index(source: ByteSource, expect_sha256: str | None) -> tuple[Manifest, list[SampleRecord]]:
    where = f"{source.where}/{MANIFEST_NAME}"
    size = source.size(MANIFEST_NAME)
    if size > MAX_MANIFEST_BYTES:
        raise DumpError(f"{where}: a manifest of {size} bytes is refused (limit {MAX_MANIFEST_BYTES})")
    manifest = Manifest.parse(source.read(MANIFEST_NAME, 0, size), where=where)
    check_expected(manifest, expect_sha256, source.where)
    entry = manifest.samples
    if entry.bytes > _MAX_SAMPLES_BYTES:
        raise DumpError(f"{source.where}/{entry.name}: {entry.bytes} bytes are refused (limit {_MAX_SAMPLES_BYTES})")
    lines = io.BytesIO(source.read(entry.name, 0, entry.bytes))
    records = parse_records(lines, manifest, f"{source.where}/{entry.name}")
    return manifest, records


def _twice(read: Callable[[], T]) -> T:
    """What came wrong may have been damaged on its way: it is read once more before it is believed."""
    try:
        return read()
    except DumpError:
        return read()
