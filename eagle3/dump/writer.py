"""Write a dump: samples come in, shards of whole samples go to the disk, the manifest follows last."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.digests import canonical_json, sha256_file, sha256_ids
from eagle3.dump.answers import KeptAnswers, answers_of, answers_path, write_answers
from eagle3.dump.content import DTYPES, content_digest, dtype_name, loss_mask, sample_digest
from eagle3.dump.files import publish
from eagle3.dump.manifest import (
    MANIFEST_NAME,
    SAMPLES_NAME,
    DumpError,
    FileEntry,
    SampleRecord,
    ShardEntry,
    wrong_spans,
)
from eagle3.dump.shard_file import write_tensors
from eagle3.errors import first_fault

GIB = 2**30
INPUT_IDS, LOSS_MASK, CU_SEQLENS = "input_ids", "loss_mask", "cu_seqlens"


@dataclass(frozen=True)
class CapturedSample:
    """A prompt, its answer, and the target's states.

    Row i is token i and the state after reading it. rows = prompt_tokens + output_tokens - 1: the last token of the
    answer was never read by the target, it has an id (`last_token_id`) but no row.

    A conversation has several answers: `spans` are their tokens [start, end), from `prompt_tokens` to the last token.
    """

    id: str
    input_ids: torch.Tensor  # [rows] int64
    last_token_id: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    states: Mapping[CapturePoint, torch.Tensor]  # each [rows, H]
    spans: tuple[tuple[int, int], ...] = ()
    texts: tuple[str, ...] = ()  # of each answer; kept beside the shard where they are known
    left_out: int = 0  # messages beyond the length cap


@dataclass(frozen=True)
class DumpFiles:
    """What a finished writer knows, and a manifest needs."""

    shards: tuple[ShardEntry, ...]
    samples: FileEntry
    content_digest: str
    num_samples: int
    num_tokens: int
    num_cut: int
    dtype: str


@dataclass(frozen=True)
class PackedShard:
    """A shard and what lies in it, in order. The records' `shard` counts the shards of one writer."""

    entry: ShardEntry
    records: tuple[SampleRecord, ...]

    def files(self, path: Path) -> list[tuple[Path, FileEntry]]:
        """The files of a shard that lies at `path`, its answers (if they are kept) before the states."""
        answers = self.entry.answers
        return [*([(path.with_name(answers.name), answers)] if answers else []), (path, self.entry)]


def assemble(folder: Path, packed: Sequence[PackedShard], *, dtype: str, samples_name: str = SAMPLES_NAME) -> DumpFiles:
    """Number the shards as they stand in `packed` and write the list of their samples into `folder`.

    The shards may come from several writers, and need not lie here. Raises DumpError where there is no sample, one
    comes twice, or the disk refuses.
    """
    records = [
        record.model_copy(update={"shard": place}) for place, shard in enumerate(packed) for record in shard.records
    ]
    if not records:
        raise DumpError("a dump needs at least one sample; got none. Check the prompts and the server's answers")
    if len({record.id for record in records}) < len(records):
        raise DumpError("a sample is in two shards: every sample needs an id of its own")
    lines = [canonical_json(record.model_dump(mode="json")) + b"\n" for record in records]
    path = folder / samples_name
    publish(path, lambda temporary: _write_lines(temporary, lines))
    return DumpFiles(
        shards=tuple(shard.entry for shard in packed),
        samples=FileEntry(name=samples_name, bytes=path.stat().st_size, sha256=sha256_file(path)),
        content_digest=content_digest((record.id, record.digest) for record in records),
        num_samples=len(records),
        num_tokens=sum(record.rows for record in records),
        num_cut=sum(record.finish_reason == "length" for record in records),
        dtype=dtype,
    )


class DumpWriter:
    """Packs samples into shards of about `shard_bytes`; holds one shard in memory, never the dump.

    A shard is a safetensors file: a tensor per capture point named by it [tokens, H], `input_ids` [tokens] int64,
    `loss_mask` [tokens] bool (True where the row's token belongs to the answer) and `cu_seqlens` [samples + 1] int64.
    The answers' texts, where samples bring them, go into a file beside it (`shard.entry.answers`).
    `on_shard(path, shard)` is called when both are whole on the disk; it may move them away. A sample larger
    than `shard_bytes` gets a shard of its own. `stem` begins the names of the shards, `dtype` is that of the states
    where it is known before the first sample.

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
        stem: str = "shard",
        dtype: str | None = None,
        on_shard: Callable[[Path, PackedShard], None] | None = None,
    ) -> None:
        if (folder / MANIFEST_NAME).exists():
            raise DumpError(f"{folder} holds a finished dump (it has a manifest): choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._spec, self._on_shard = folder, spec, on_shard
        self._hidden_size, self._vocab_size, self._shard_bytes = hidden_size, vocab_size, shard_bytes
        self._stem = stem
        self._dtype = DTYPES[dtype] if dtype else None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="dump-copy")
        self._ids: set[str] = set()
        self._shards: list[PackedShard] = []
        self._finished = False
        self._start_shard()

    def add(self, sample: CapturedSample) -> SampleRecord:
        """Check a sample and pack it; the record says where it lies. A refused sample leaves the dump as it was."""
        if self._finished:
            raise DumpError(f"sample {sample.id!r} comes after the dump was finished")
        self._check(sample)
        size = sum(tensor.nbytes for tensor in (*sample.states.values(), sample.input_ids))
        if self._lengths and self._bytes + size > self._shard_bytes:
            self.flush()
        states, ids = _Copies(sample.states, self._spec.points, self._copier), _own(sample.input_ids)
        record = self._record(sample, ids, states)
        self._dtype = states[self._spec.final].dtype
        for point, state in states.items():
            self._states[point].append(state)
        self._input_ids.append(ids)
        self._masks.append(loss_mask(record))
        if sample.texts:
            self._answers.append(answers_of(record, [*ids.tolist(), sample.last_token_id], sample.texts))
        self._lengths.append(len(ids))
        self._bytes += size
        self._records.append(record)
        self._ids.add(sample.id)
        return record

    def finish(self) -> DumpFiles:
        """Write the last shard and samples.jsonl. The dump exists only when `write_manifest` has followed."""
        if self._finished:
            raise DumpError("the dump was finished before")
        self.flush()
        self._finished = bool(self._shards)
        return assemble(self._folder, self._shards, dtype=dtype_name(self._dtype) if self._dtype else "none")

    def _start_shard(self) -> None:
        self._states: dict[CapturePoint, list[torch.Tensor]] = {point: [] for point in self._spec.points}
        self._input_ids: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._records: list[SampleRecord] = []  # of the samples in this shard
        self._answers: list[KeptAnswers] = []  # of the same, or none
        self._bytes = 0

    def flush(self) -> None:
        """Write what is packed so far as a shard; nothing where nothing is."""
        if not self._lengths:
            return
        tensors = {
            INPUT_IDS: self._input_ids,
            LOSS_MASK: self._masks,
            CU_SEQLENS: [torch.tensor([0, *self._lengths]).cumsum(0)],
            **{str(point): parts for point, parts in self._states.items()},
        }
        path = self._folder / f"{self._stem}-{len(self._shards):05d}.safetensors"
        answers = write_answers(answers_path(path), self._answers) if self._answers else None
        digests: list[str] = []
        publish(path, lambda temporary: digests.append(write_tensors(temporary, tensors)))
        entry = ShardEntry(
            name=path.name,
            bytes=path.stat().st_size,
            sha256=digests[0],
            samples=len(self._lengths),
            tokens=sum(self._lengths),
            answers=answers,
        )
        shard = PackedShard(entry, tuple(self._records))
        self._shards.append(shard)
        self._start_shard()
        if self._on_shard is not None:
            self._on_shard(path, shard)

    def _record(
        self, sample: CapturedSample, ids: torch.Tensor, states: Mapping[CapturePoint, torch.Tensor]
    ) -> SampleRecord:
        ids_sha256 = sha256_ids([*ids.tolist(), sample.last_token_id])
        spans = sample.spans if len(sample.spans) > 1 else ()
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
                spans=spans,
                left_out=sample.left_out,
                ids_sha256=ids_sha256,
                digest=sample_digest(sample.id, ids_sha256, sample.prompt_tokens, states, self._spec.points, spans),
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
        if wrong := wrong_spans(sample.spans, sample.prompt_tokens, sample.output_tokens):
            raise DumpError(f"{name}: {wrong}")
        if sample.texts and len(sample.texts) != max(1, len(sample.spans)):
            raise DumpError(f"{name} has {len(sample.texts)} texts for {max(1, len(sample.spans))} answers")
        if self._records and bool(sample.texts) != bool(self._answers):
            raise DumpError(f"{name}: the answers of all samples are kept, or of none; others of its shard differ")
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


class _Copies(Mapping[CapturePoint, torch.Tensor]):
    """A sample's states in memory of their own, copied in this order while whoever reads them hashes those before."""

    def __init__(
        self,
        states: Mapping[CapturePoint, torch.Tensor],
        points: Sequence[CapturePoint],
        copier: ThreadPoolExecutor,
    ) -> None:
        self._copies = {point: copier.submit(_own, states[point]) for point in points}

    def __getitem__(self, point: CapturePoint) -> torch.Tensor:
        return self._copies[point].result()

    def __iter__(self) -> Iterator[CapturePoint]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)


def _write_lines(path: Path, lines: list[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(lines)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, contiguous: a view would keep a batch in memory, or a whole staged file mapped."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
