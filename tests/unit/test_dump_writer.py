"""The writer: what it packs, what it refuses, and that a dump exists only as a whole."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.digests import sha256_file
from eagle3.dump.files import write_manifest
from eagle3.dump.manifest import DumpError, SampleRecord, ShardEntry
from eagle3.dump.writer import CapturedSample, DumpFiles, DumpWriter, PackedShard
from tests.dumps import SPEC, Capture, capture, with_states, write_dump
from tests.targets import HIDDEN, VOCAB

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


def pack(folder: Path, samples: list[CapturedSample], **options: Any) -> tuple[DumpFiles, list[SampleRecord]]:
    writer = DumpWriter(folder, SPEC, hidden_size=HIDDEN, **options)
    records = [writer.add(only_spec(sample)) for sample in samples]
    return writer.finish(), records


def only_spec(sample: CapturedSample) -> CapturedSample:
    return replace(sample, states={point: sample.states[point] for point in SPEC.points})


def test_a_shard_holds_the_states_under_their_names_beside_ids_mask_and_lengths(
    captured: Capture, tmp_path: Path
) -> None:
    files, records = pack(tmp_path, list(captured.samples), shard_bytes=96 * 1024)
    assert len(files.shards) > 2
    for index, entry in enumerate(files.shards):
        tensors = load_file(tmp_path / entry.name)
        assert set(tensors) == {"layers.1", "layers.3", "layers.5", "norm", "input_ids", "loss_mask", "cu_seqlens"}
        here = [
            (record, sample) for record, sample in zip(records, captured.samples, strict=True) if record.shard == index
        ]
        assert tensors["cu_seqlens"].tolist() == [0, *(record.start + record.rows for record, _ in here)]
        assert tensors["norm"].shape == (entry.tokens, HIDDEN)
        for record, sample in here:
            rows = slice(record.start, record.start + record.rows)
            assert torch.equal(tensors["layers.3"][rows], sample.states["layers.3"])
            assert torch.equal(tensors["input_ids"][rows], sample.input_ids)
            expected = [False] * sample.prompt_tokens + [True] * (sample.output_tokens - 1)
            assert tensors["loss_mask"][rows].tolist() == expected


def test_entries_carry_the_size_and_digest_of_their_files(captured: Capture, tmp_path: Path) -> None:
    files, _ = pack(tmp_path, list(captured.samples), shard_bytes=96 * 1024)
    for entry in (*files.shards, files.samples):
        assert (tmp_path / entry.name).stat().st_size == entry.bytes
        assert sha256_file(tmp_path / entry.name) == entry.sha256
    assert files.num_tokens == sum(entry.tokens for entry in files.shards)
    assert files.num_samples == len(captured.samples) == sum(entry.samples for entry in files.shards)
    assert files.dtype == "float32"


def test_shards_keep_to_their_size_and_a_larger_sample_gets_its_own(captured: Capture, tmp_path: Path) -> None:
    small, _ = pack(tmp_path / "small", list(captured.samples), shard_bytes=1)
    assert [entry.samples for entry in small.shards] == [1] * len(captured.samples)
    limit = 80 * 1024
    medium, _ = pack(tmp_path / "medium", list(captured.samples), shard_bytes=limit)
    assert all(entry.bytes < limit + 4096 for entry in medium.shards)  # the header comes on top


def test_the_content_digest_is_the_same_however_the_dump_is_packed_or_ordered(
    captured: Capture, tmp_path: Path
) -> None:
    samples = list(captured.samples)
    one, _ = pack(tmp_path / "one", samples)
    many, _ = pack(tmp_path / "many", samples, shard_bytes=96 * 1024)
    turned, _ = pack(tmp_path / "turned", samples[::-1], shard_bytes=128 * 1024)
    assert len({len(one.shards), len(many.shards)}) == 2
    assert one.content_digest == many.content_digest == turned.content_digest


@pytest.mark.parametrize("what", ["value", "slots", "names", "dtype", "answer", "left out"])
def test_the_content_digest_moves_with_the_content(captured: Capture, tmp_path: Path, what: str) -> None:
    samples = list(captured.samples)
    right, _ = pack(tmp_path / "right", samples)
    first = samples[0]
    if what == "value":
        state = first.states["layers.1"].clone()
        state[0, 0] += 1
        samples[0] = with_states(first, {"layers.1": state})
    elif what == "slots":
        samples[0] = with_states(first, {"layers.1": first.states["layers.3"], "layers.3": first.states["layers.1"]})
    elif what == "names":
        samples[0], samples[1] = replace(first, id=samples[1].id), replace(samples[1], id=first.id)
    elif what == "dtype":
        samples = [with_states(s, {p: s.states[p].bfloat16() for p in SPEC.points}) for s in samples]
    elif what == "answer":
        samples[0] = replace(first, prompt_tokens=first.prompt_tokens + 1, output_tokens=first.output_tokens - 1)
    else:
        samples = samples[1:]
    other, _ = pack(tmp_path / "other", samples)
    assert other.content_digest != right.content_digest


def test_on_shard_may_take_the_file_away(captured: Capture, tmp_path: Path) -> None:
    taken: list[ShardEntry] = []

    def take(path: Path, shard: PackedShard) -> None:
        assert sha256_file(path) == shard.entry.sha256
        assert sum(record.rows for record in shard.records) == shard.entry.tokens
        path.unlink()
        taken.append(shard.entry)

    files, _ = pack(tmp_path, list(captured.samples), shard_bytes=96 * 1024, on_shard=take)
    assert tuple(taken) == files.shards
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_shard_is_in_memory_once(captured: Capture, tmp_path: Path) -> None:
    """Views of a large batch are copied, so that the batch can go; a flush frees what it wrote."""
    sample = captured.samples[0]
    batch = torch.randn(4096, HIDDEN)
    view = replace(sample, states={point: batch[: len(sample.input_ids)] for point in SPEC.points})
    writer = DumpWriter(tmp_path, SPEC, hidden_size=HIDDEN)
    writer.add(view)
    held = [state for states in writer._states.values() for state in states]
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in held)


def spoil(sample: CapturedSample, how: str) -> CapturedSample:
    norm = sample.states["norm"]
    return {
        "a row too few": lambda: replace(sample, input_ids=sample.input_ids[:-1]),
        "state rows": lambda: with_states(sample, {"norm": norm[:-1]}),
        "width": lambda: with_states(sample, {"norm": norm[:, :-1].contiguous()}),
        "dtype": lambda: with_states(sample, {"norm": norm.bfloat16()}),
        "double": lambda: with_states(sample, {p: s.double() for p, s in sample.states.items()}),
        "missing": lambda: replace(sample, states={p: s for p, s in sample.states.items() if p != "norm"}),
        "foreign": lambda: with_states(sample, {"layers.0": norm}),
        "int32": lambda: replace(sample, input_ids=sample.input_ids.int()),
        "id": lambda: replace(sample, last_token_id=VOCAB),
        "negative id": lambda: replace(sample, input_ids=sample.input_ids - 10_000),
        "no answer": lambda: replace(sample, prompt_tokens=len(sample.input_ids), output_tokens=0),
        "empty name": lambda: replace(sample, id=""),
        "twice": lambda: replace(sample, id="p00000"),
    }[how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a row too few", r"expected input_ids int64 \[31\] .* got int64 \[30\]"),
        ("state rows", r"norm: expected float32 \[31, 64\], got float32 \[30, 64\]"),
        ("width", r"norm: expected float32 \[31, 64\], got float32 \[31, 63\]"),
        ("dtype", r"norm: expected float32 \[31, 64\], got bfloat16"),
        ("double", "expected float32"),
        ("missing", "the spec asks for layers.1, layers.3, layers.5, norm"),
        ("foreign", "the spec asks for layers.1, layers.3, layers.5, norm"),
        ("int32", "expected input_ids int64"),
        ("id", "token id 512; the target's ids are 0 ... 511"),
        ("negative id", "token id -"),
        ("no answer", "0 output tokens; both need to be at least 1"),
        ("empty name", "id: String should have at least 1 character"),
        ("twice", "added before"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_and_leaves_the_dump_as_it_was(
    captured: Capture, tmp_path: Path, how: str, message: str
) -> None:
    first, second = only_spec(captured.samples[0]), only_spec(captured.samples[1])
    writer = DumpWriter(tmp_path / "with", SPEC, hidden_size=HIDDEN, vocab_size=VOCAB)
    writer.add(first)
    with pytest.raises(DumpError, match=message):
        writer.add(spoil(second, how))
    writer.add(second)
    without, _ = pack(tmp_path / "without", [first, second])
    assert writer.finish() == without


def test_states_of_a_dtype_that_no_dump_holds_are_refused(captured: Capture, tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, SPEC, hidden_size=HIDDEN)
    with pytest.raises(DumpError, match="states in float64; a dump holds float32, bfloat16, float16"):
        writer.add(spoil(only_spec(captured.samples[0]), "double"))


def test_an_empty_dump_and_a_second_finish_are_refused(captured: Capture, tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, SPEC, hidden_size=HIDDEN)
    with pytest.raises(DumpError, match="at least one sample"):
        writer.finish()
    writer.add(only_spec(captured.samples[0]))
    writer.finish()
    with pytest.raises(DumpError, match="finished before"):
        writer.finish()
    with pytest.raises(DumpError, match="after the dump was finished"):
        writer.add(only_spec(captured.samples[1]))


def test_a_finished_dump_is_never_overwritten(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(DumpError, match="never overwritten"):
        write_manifest(tmp_path, manifest.model_copy(update={"git_commit": "0" * 40}))
    with pytest.raises(DumpError, match="holds a finished dump"):
        DumpWriter(tmp_path, SPEC, hidden_size=HIDDEN)
    assert (tmp_path / "manifest.json").read_bytes() == before


@contextmanager
def small_files_only() -> Iterator[None]:
    """The kernel refuses to write a file beyond 16 KiB, as a full disk would.

    Only around what is tested: pytest's own report may go to a longer file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_refuses_leaves_no_half_written_shard(captured: Capture, tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, SPEC, hidden_size=HIDDEN)
    writer.add(only_spec(captured.samples[0]))
    with small_files_only(), pytest.raises(DumpError, match=r"cannot write .*shard-00000.safetensors.*room"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_starts_follow_each_other_without_gap(captured: Capture, tmp_path: Path) -> None:
    _, records = pack(tmp_path, list(captured.samples), shard_bytes=96 * 1024)
    for before, after in pairwise(records):
        assert after.start == (before.start + before.rows if after.shard == before.shard else 0)
