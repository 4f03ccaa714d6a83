"""Read a dump: the manifest and the index at once, the states sample by sample from mapped files."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from eagle3.capture import CapturePoint
from eagle3.dump.files import OtherBytes, check_layout, check_size, inside, named_file, read_manifest
from eagle3.dump.manifest import DumpError, Manifest, SampleRecord, ShardEntry
from eagle3.dump.shard_layout import expected_tensors
from eagle3.dump.slots import SlotSample
from eagle3.dump.writer import CU_SEQLENS, INPUT_IDS, LOSS_MASK
from eagle3.errors import first_fault

MAX_LINE_BYTES = 64 * 2**10  # places of up to 1024 answers, 20 characters each
MAX_OPEN_SHARDS = 16


@dataclass(frozen=True)
class Sample:
    """A sample as it lies in its shard. Tensors are views of the mapped file: clone before you write to them."""

    id: str
    record: SampleRecord
    input_ids: torch.Tensor  # [rows] int64
    loss_mask: torch.Tensor  # [rows] bool
    states: Mapping[CapturePoint, torch.Tensor]  # each [rows, H]

    def full_ids(self) -> torch.Tensor:
        """[rows + 1] int64: prompt and answer, with the last token, which has no row."""
        return torch.cat([self.input_ids, torch.tensor([self.record.last_token_id])])

    def slots(self) -> SlotSample:
        """The sample under its points' names, for attribution and comparison."""
        states = {str(point): state for point, state in self.states.items()}
        return SlotSample(self.id, self.input_ids, states, prompt_tokens=self.record.prompt_tokens)

    def full_mask(self) -> torch.Tensor:
        """[rows + 1] bool: the loss mask of `full_ids`. The last token ends the last answer."""
        return torch.cat([self.loss_mask, torch.ones(1, dtype=torch.bool)])


class SampleReader(Protocol):
    """An open dump, wherever it lies: `DumpReader` maps a folder, `eagle3.dump.stream.StreamReader` fetches ranges."""

    manifest: Manifest
    records: list[SampleRecord]

    def read(self, index: int) -> Sample:
        """The sample at that place of samples.jsonl."""

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, loss mask), each [rows + 1], with the last token, which has no row; no state is read."""


class DumpReader:
    """A dump in a folder; `open` it. Samples come in the order in which they were packed.

    Raises DumpError where the dump does not exist, is not the one that was expected, or where a file is not what the
    manifest says (size, names, shapes and dtypes). Bytes are compared with their digests by `eagle3.evidence`.
    """

    def __init__(self, folder: Path, manifest: Manifest, records: list[SampleRecord]) -> None:
        self.folder, self.manifest, self.records = folder, manifest, records
        self._open: OrderedDict[int, Any] = OrderedDict()
        counts = Counter(record.shard for record in records)
        ends = accumulate((counts[shard] for shard in range(len(manifest.shards))), initial=0)
        self._ranges = [range(start, end) for start, end in pairwise(ends)]

    @classmethod
    def open(cls, folder: Path, *, expect_sha256: str | None = None) -> Self:
        """Read and check the manifest and samples.jsonl; no shard is touched yet."""
        manifest = _expected_manifest(folder, expect_sha256)
        return cls(folder, manifest, read_records(folder, manifest))

    @classmethod
    def open_part(cls, folder: Path, shards: range, *, expect_sha256: str) -> Self:
        """The samples of neighbouring shards alone, of a dump that was opened as a whole before, in another process.

        Indices count from the first of them; the lines of samples.jsonl for other shards are not parsed.
        """
        manifest = _expected_manifest(folder, expect_sha256)
        path = named_file(folder, manifest.samples)
        start = sum(entry.samples for entry in manifest.shards[: shards.start])
        count = sum(manifest.shards[shard].samples for shard in shards)
        with path.open("rb") as file:
            lines = islice(file, start, start + count)
            return cls(folder, manifest, [SampleRecord.model_validate_json(line) for line in lines])

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Sample]:
        return (self.read(index) for index in range(len(self)))

    def read(self, index: int) -> Sample:
        """The sample at that place; its shard is mapped, and only the sample's rows are touched."""
        record = self.records[index]
        shard = self._shard(record.shard)
        rows = slice(record.start, record.start + record.rows)
        return Sample(
            id=record.id,
            record=record,
            input_ids=shard.get_slice(INPUT_IDS)[rows],
            loss_mask=shard.get_slice(LOSS_MASK)[rows],
            states={point: shard.get_slice(point)[rows] for point in self.manifest.spec.points},
        )

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, loss mask), each [rows + 1]; no state is read."""
        sample = self.read(index)
        return sample.full_ids(), sample.full_mask()

    def samples_of(self, shard: int) -> range:
        """Indices of the samples in a shard."""
        return self._ranges[shard]

    def cu_seqlens(self, shard: int) -> torch.Tensor:
        """[samples + 1] int64: where each sample starts and the last one ends, as the shard itself says."""
        lengths: torch.Tensor = self._shard(shard).get_tensor(CU_SEQLENS)
        return lengths

    def _shard(self, index: int) -> Any:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        shard = _open_shard(self.folder, self.manifest, self.manifest.shards[index])
        self._open[index] = shard
        if len(self._open) > MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard


def _expected_manifest(folder: Path, expect_sha256: str | None) -> Manifest:
    manifest = read_manifest(folder)
    check_expected(manifest, expect_sha256, str(folder))
    return manifest


def check_expected(manifest: Manifest, expect_sha256: str | None, where: str) -> None:
    """A DumpError where a digest was asked for and the manifest has another."""
    if expect_sha256 is not None and manifest.digest() != expect_sha256:
        raise DumpError(
            f"{where} holds another dump than asked for: expected manifest digest {expect_sha256}, found "
            f"{manifest.digest()}. Use the reference that the extraction returned"
        )


def read_records(folder: Path, manifest: Manifest) -> list[SampleRecord]:
    """The lines of samples.jsonl, checked against the manifest: size, digest, order, and no row in two samples."""
    path = inside(folder, manifest.samples.name)
    check_size(path, manifest.samples.bytes)
    with path.open("rb") as file:
        return parse_records(file, manifest, str(path))


def parse_records(file: BufferedReader | BytesIO, manifest: Manifest, path: str) -> list[SampleRecord]:
    """The same from an open file, whose size is known to be right; `path` is named in errors."""
    if (found := hashlib.file_digest(file, "sha256").hexdigest()) != manifest.samples.sha256:
        raise OtherBytes(path, manifest.samples, found)
    file.seek(0)
    records: list[SampleRecord] = []
    while line := file.readline(MAX_LINE_BYTES):
        if len(records) == manifest.num_samples:
            raise DumpError(f"{path} has more lines than the {manifest.num_samples} samples of the manifest")
        try:
            records.append(SampleRecord.model_validate_json(line))
        except ValidationError as error:
            field, what = first_fault(error, "the line")
            raise DumpError(f"{path}, line {len(records) + 1}: {field}: {what}") from None
    _check_records(path, manifest, records)
    return records


def _check_records(path: str, manifest: Manifest, records: list[SampleRecord]) -> None:
    seen: set[str] = set()
    tokens, samples = [0] * len(manifest.shards), [0] * len(manifest.shards)
    previous = 0
    for number, record in enumerate(records, start=1):
        where = f"{path}, line {number} (sample {record.id!r})"
        if record.id in seen:
            raise DumpError(f"{where}: this id came before")
        seen.add(record.id)
        if not previous <= record.shard < len(manifest.shards):
            raise DumpError(f"{where}: shard {record.shard}; lines follow the {len(manifest.shards)} shards in order")
        if record.start != tokens[record.shard]:
            raise DumpError(
                f"{where}: starts at row {record.start} of its shard, but the samples before it end at row "
                f"{tokens[record.shard]}"
            )
        previous = record.shard
        tokens[record.shard] += record.rows
        samples[record.shard] += 1
    for shard, entry in enumerate(manifest.shards):
        if (samples[shard], tokens[shard]) != (entry.samples, entry.tokens):
            raise DumpError(
                f"{path} puts {samples[shard]} samples and {tokens[shard]} rows into {entry.name}; the manifest says "
                f"{entry.samples} and {entry.tokens}"
            )
    if (len(records), sum(tokens)) != (manifest.num_samples, manifest.num_tokens):
        raise DumpError(
            f"{path} holds {len(records)} samples and {sum(tokens)} rows; the manifest says {manifest.num_samples} "
            f"and {manifest.num_tokens}"
        )
    cut = sum(record.finish_reason == "length" for record in records)
    if manifest.schema_version > 2 and cut != manifest.num_cut:
        raise DumpError(f"{path}: the length cap cut {cut} samples; the manifest says {manifest.num_cut}")


def _open_shard(folder: Path, manifest: Manifest, entry: ShardEntry) -> Any:
    path = inside(folder, entry.name)
    check_size(path, entry.bytes)
    try:
        shard = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DumpError(f"{path} is not a safetensors file: {error}. Fetch the dump again, or extract again") from None
    check_layout(path, shard, expected_tensors(manifest, entry))
    return shard
