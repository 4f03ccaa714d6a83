"""Training straight from a dump's files: the same samples and the same drafter as from memory, and a fair split."""

import threading
from itertools import islice
from pathlib import Path

import pytest
import torch

from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.vocab import VocabMap, count_tokens
from eagle3.dump.cache import BlockCache
from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader, SampleReader
from eagle3.dump.source import FolderSource
from eagle3.dump.stream import StreamReader
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.dump_samples import DumpSamples, split
from eagle3.training.loop import train
from eagle3.training.samples import TargetParts
from tests.dumps import SPEC, capture, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture
def reader(tiny_llama: Path, tmp_path: Path) -> DumpReader:
    """Of 8 samples in several shards."""
    write_dump(capture(tiny_llama), tmp_path / "dump")
    return DumpReader.open(tmp_path / "dump")


def test_a_sample_is_prompt_and_answer_with_its_slots_side_by_side(tiny_llama: Path, reader: DumpReader) -> None:
    captured = capture(tiny_llama).samples[3]
    sample = DumpSamples(reader, [5, 3])[1]
    assert sample.id == captured.id
    assert sample.input_ids.tolist() == [*captured.input_ids.tolist(), captured.last_token_id]
    assert torch.equal(sample.aux, torch.cat([captured.states[point] for point in SPEC.aux], dim=-1))
    assert torch.equal(sample.final, captured.states[SPEC.final])
    answer = torch.arange(len(sample.input_ids)) >= captured.prompt_tokens
    assert torch.equal(sample.loss_mask, answer)


def test_no_sample_is_kept_in_memory(reader: DumpReader) -> None:
    samples = DumpSamples(reader, range(len(reader)))
    first, again = samples[0], samples[0]
    assert torch.equal(first.aux, again.aux)
    assert first.aux.data_ptr() != again.aux.data_ptr()
    assert [s.id for s in samples[2:4]] == [s.id for s in samples][2:4]
    with pytest.raises(IndexError):
        samples[len(reader)]


def test_tokens_are_counted_without_the_states(reader: DumpReader) -> None:
    samples = DumpSamples(reader, range(len(reader)))
    counted = list(samples.tokens())
    assert all(torch.equal(ids, sample.input_ids) for (ids, _), sample in zip(counted, samples, strict=True))
    assert all(torch.equal(mask, sample.loss_mask) for (_, mask), sample in zip(counted, samples, strict=True))


def test_held_out_samples_are_spread_and_at_most_a_fifth(reader: DumpReader) -> None:
    rest, heldout = split(reader, 8)
    assert (len(rest), len(heldout)) == (7, 1)
    assert {s.id for s in rest} | {s.id for s in heldout} == {record.id for record in reader.records}
    rest, heldout = split(reader, 0)
    assert (len(rest), len(heldout)) == (8, 0)


def test_training_from_a_stream_is_training_from_the_files_bit_by_bit(
    tiny_llama: Path, reader: DumpReader, tmp_path: Path
) -> None:
    """Whatever the blocks and however much is read ahead; and the order is the one that was asked for."""
    parts, shape, vocab = prepared(tiny_llama, reader)
    recipe = TrainingConfig(budget=6, budget_unit="steps", bf16=False, seed=3)
    results = []
    for block_samples, read_ahead in ((None, 0), (1, 0), (3, 2)):
        opened: SampleReader = reader
        if block_samples is not None:
            cache = BlockCache(tmp_path / f"cache-{block_samples}", 10**8)
            opened = StreamReader.open(FolderSource(tmp_path / "dump"), cache, block_samples=block_samples)
        samples, heldout = split(opened, 1)
        order = samples.drawn_by(recipe.seed)
        result = train(samples, heldout, parts, shape, vocab, recipe, order=order, read_ahead=read_ahead)
        results.append(result.drafter.state_dict())
        assert result.acceptance is not None
    first, *others = results
    assert all(torch.equal(tensor, other[name]) for other in others for name, tensor in first.items())
    other_seed = samples.drawn_by(recipe.seed + 1)
    changed = train(samples, [], parts, shape, vocab, recipe, order=other_seed).drafter.state_dict()
    assert not torch.equal(changed["fc.weight"], first["fc.weight"])


def test_an_order_of_some_samples_draws_each_of_them_once_an_epoch(reader: DumpReader) -> None:
    samples = DumpSamples(reader, range(1, 8))
    draws = samples.drawn_by(0)([0, 2, 3, 6], 0, 1).walk()
    assert [sorted(place for place, _ in islice(draws, 4)) for _ in range(3)] == [[0, 2, 3, 6]] * 3


def test_a_reader_that_fails_stops_the_training_with_its_error(tiny_llama: Path, reader: DumpReader) -> None:
    parts, shape, vocab = prepared(tiny_llama, reader)
    recipe = TrainingConfig(budget=3, budget_unit="steps", bf16=False)
    (reader.folder / reader.manifest.shards[-1].name).unlink()
    for read_ahead in (0, 2):
        samples, _ = split(DumpReader.open(reader.folder), 0)
        with pytest.raises(DumpError, match=f"{reader.manifest.shards[-1].name} is missing"):
            train(samples, [], parts, shape, vocab, recipe, read_ahead=read_ahead)
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def prepared(target_folder: Path, reader: DumpReader) -> tuple[TargetParts, DrafterConfig, VocabMap]:
    target = Target.open(target_folder)
    parts = TargetParts.of(target)
    samples, _ = split(reader, 1)
    vocab = VocabMap.most_frequent(count_tokens(samples.tokens(), target.vocab_size), 64)
    return parts, DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=len(vocab)), vocab


def test_training_from_the_files_is_training_from_memory_bit_by_bit(tiny_llama: Path, reader: DumpReader) -> None:
    parts, shape, vocab = prepared(tiny_llama, reader)
    samples, heldout = split(reader, 1)
    recipe = TrainingConfig(budget=3, budget_unit="steps", bf16=False)
    lazy = train(samples, heldout, parts, shape, vocab, recipe)
    eager = train(list(samples), list(heldout), parts, shape, vocab, recipe)
    theirs = eager.drafter.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in lazy.drafter.state_dict().items())
    assert lazy.acceptance == eager.acceptance is not None
    assert train(samples, [], parts, shape, vocab, recipe).acceptance is None
