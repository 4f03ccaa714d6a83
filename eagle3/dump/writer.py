"""Write a dump: samples come in, shards of whole samples go to the disk, the manifest follows last."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.digests import canonical_json, sha256_file, sha256_ids
from eagle3.dump.content import DTYPES, content_digest, dtype_name, sample_digest
from eagle3.dump.files import publish
from eagle3.dump.manifest import MANIFEST_NAME, SAMPLES_NAME, DumpError, FileEntry, SampleRecord, ShardEntry
from eagle3.errors import first_fault

GIB = 2**30
INPUT_IDS, LOSS_MASK, CU_SEQLENS = "input_ids", "loss_mask", "cu_seqlens"


@dataclass(frozen=True)
class CapturedSample:
    """A prompt, its answer, and the target's states.

    Row i is token i and the state after reading it. rows = prompt_tokens + output_tokens - 1: the last token of the
    answer was never read by the target, it has an id (`last_token_id`) but no row.
    """

    id: str
    input_ids: torch.Tensor  # [rows] int64
    last_token_id: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    states: Mapping[CapturePoint, torch.Tensor]  # each [rows, H]


@dataclass(frozen=True)
class DumpFiles:
    """What a finished writer knows, and a manifest needs."""

    shards: tuple[ShardEntry, ...]
    samples: FileEntry
    content_digest: str
    num_samples: int
    num_tokens: int
    dtype: str


class DumpWriter:
    """Packs samples into shards of about `shard_bytes`; holds at most two shards in memory, never the dump.

    A shard is a safetensors file: a tensor per capture point named by it [tokens, H], `input_ids` [tokens] int64,
    `loss_mask` [tokens] bool (True where the row's token belongs to the answer) and `cu_seqlens` [samples + 1] int64.
    `on_shard(path, entry)` is called when a shard is whole on the disk; it may move the file away. A sample larger
    than `shard_bytes` gets a shard of its own.

    Raises DumpError: a sample that does not fit the spec, a folder that holds a finished dump, a disk that is full.
    """

    def __init__(
        self,
        folder: Path,
        spec: CaptureSpec,
        *,
        hidden_size: int,
        vocab_size: int | None = None,
        shard_bytes: int = GIB,
        on_shard: Callable[[Path, ShardEntry], None] | None = None,
    ) -> None:
        if (folder / MANIFEST_NAME).exists():
            raise DumpError(f"{folder} holds a finished dump (it has a manifest): choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._spec, self._on_shard = folder, spec, on_shard
        self._hidden_size, self._vocab_size, self._shard_bytes = hidden_size, vocab_size, shard_bytes
        self._dtype: torch.dtype | None = None
        self._records: list[SampleRecord] = []
        self._ids: set[str] = set()
        self._shards: list[ShardEntry] = []
        self._finished = False
        self._start_shard()

    def add(self, sample: CapturedSample) -> SampleRecord:
        """Check a sample and pack it; the record says where it lies. A refused sample leaves the dump as it was."""
        if self._finished:
            raise DumpError(f"sample {sample.id!r} comes after the dump was finished")
        self._check(sample)
        states = {point: _own(sample.states[point]) for point in self._spec.points}
        ids = _own(sample.input_ids)
        size = sum(state.nbytes for state in states.values()) + ids.nbytes
        if self._lengths and self._bytes + size > self._shard_bytes:
            self._flush()
        record = self._record(sample, ids, states)
        self._dtype = states[self._spec.final].dtype
        for point, state in states.items():
            self._states[point].append(state)
        self._input_ids.append(ids)
        self._masks.append(torch.arange(len(ids)) >= sample.prompt_tokens)
        self._lengths.append(len(ids))
        self._bytes += size
        self._records.append(record)
        self._ids.add(sample.id)
        return record

    def finish(self) -> DumpFiles:
        """Write the last shard and samples.jsonl. The dump exists only when `write_manifest` has followed."""
        if self._finished:
            raise DumpError("the dump was finished before")
        if not self._records or self._dtype is None:
            raise DumpError("a dump needs at least one sample; got none. Check the prompts and the server's answers")
        if self._lengths:
            self._flush()
        self._finished = True
        lines = [canonical_json(record.model_dump(mode="json")) + b"\n" for record in self._records]
        path = self._folder / SAMPLES_NAME
        publish(path, lambda temporary: _write_lines(temporary, lines))
        return DumpFiles(
            shards=tuple(self._shards),
            samples=FileEntry(name=SAMPLES_NAME, bytes=path.stat().st_size, sha256=sha256_file(path)),
            content_digest=content_digest((record.id, record.digest) for record in self._records),
            num_samples=len(self._records),
            num_tokens=sum(record.rows for record in self._records),
            dtype=dtype_name(self._dtype),
        )

    def _start_shard(self) -> None:
        self._states: dict[CapturePoint, list[torch.Tensor]] = {point: [] for point in self._spec.points}
        self._input_ids: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._bytes = 0

    def _flush(self) -> None:
        tokens, samples = sum(self._lengths), len(self._lengths)
        tensors = {
            INPUT_IDS: torch.cat(self._input_ids),
            LOSS_MASK: torch.cat(self._masks),
            CU_SEQLENS: torch.tensor([0, *self._lengths]).cumsum(0),
        }
        for point in self._spec.points:  # one point at a time, so that a shard is never in memory twice
            tensors[str(point)] = torch.cat(self._states.pop(point))
        self._start_shard()
        path = self._folder / f"shard-{len(self._shards):05d}.safetensors"
        publish(path, lambda temporary: save_file(tensors, temporary))
        entry = ShardEntry(
            name=path.name, bytes=path.stat().st_size, sha256=sha256_file(path), samples=samples, tokens=tokens
        )
        self._shards.append(entry)
        if self._on_shard is not None:
            self._on_shard(path, entry)

    def _record(
        self, sample: CapturedSample, ids: torch.Tensor, states: Mapping[CapturePoint, torch.Tensor]
    ) -> SampleRecord:
        ids_sha256 = sha256_ids([*ids.tolist(), sample.last_token_id])
        try:
            return SampleRecord(
                id=sample.id,
                shard=len(self._shards),
                start=sum(self._lengths),
                rows=len(ids),
                prompt_tokens=sample.prompt_tokens,
                output_tokens=sample.output_tokens,
                last_token_id=sample.last_token_id,
                finish_reason=sample.finish_reason,
                ids_sha256=ids_sha256,
                digest=sample_digest(sample.id, ids_sha256, sample.prompt_tokens, states, self._spec.points),
            )
        except ValidationError as error:
            field, what = first_fault(error)
            raise DumpError(f"sample {sample.id[:80]!r}: {field}: {what}") from None

    def _check(self, sample: CapturedSample) -> None:
        name = f"sample {sample.id[:80]!r}"
        if sample.id in self._ids:
            raise DumpError(f"{name} was added before: every sample needs an id of its own")
        if sample.prompt_tokens < 1 or sample.output_tokens < 1:
            raise DumpError(
                f"{name} has {sample.prompt_tokens} prompt and {sample.output_tokens} output tokens; both need to be "
                "at least 1"
            )
        expected = sample.prompt_tokens + sample.output_tokens - 1
        if sample.input_ids.dtype != torch.int64 or tuple(sample.input_ids.shape) != (expected,):
            raise DumpError(
                f"{name}: expected input_ids int64 [{expected}] ({sample.prompt_tokens} prompt + "
                f"{sample.output_tokens} output tokens - 1), got {_describe(sample.input_ids)}. Rows go missing where "
                "a prefix cache is on or a request is cut; do not pad them"
            )
        self._check_ids(name, [int(sample.input_ids.min()), int(sample.input_ids.max()), sample.last_token_id])
        if set(sample.states) != set(self._spec.points):
            raise DumpError(
                f"{name} brings {', '.join(sorted(sample.states)) or 'no states'}; the spec asks for "
                f"{', '.join(self._spec.points)}"
            )
        wanted = self._dtype or sample.states[self._spec.final].dtype
        if wanted not in DTYPES.values():
            raise DumpError(f"{name}: states in {dtype_name(wanted)}; a dump holds {', '.join(DTYPES)}")
        for point in self._spec.points:
            state = sample.states[point]
            if tuple(state.shape) != (expected, self._hidden_size) or state.dtype != wanted:
                raise DumpError(
                    f"{name}, {point}: expected {dtype_name(wanted)} [{expected}, {self._hidden_size}], got "
                    f"{_describe(state)}. A dump has one dtype, and a row for every token that the target read"
                )

    def _check_ids(self, name: str, ids: list[int]) -> None:
        limit = self._vocab_size if self._vocab_size is not None else 2**63
        wrong = [i for i in ids if not 0 <= i < limit]
        if wrong:
            bound = f"0 ... {limit - 1}" if self._vocab_size is not None else "at least 0"
            raise DumpError(f"{name} holds token id {wrong[0]}; the target's ids are {bound}")


def _write_lines(path: Path, lines: list[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(lines)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and not a view that would keep a larger tensor (a batch) in memory."""
    mine = tensor.detach().cpu().contiguous()
    return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
