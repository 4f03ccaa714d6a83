"""Several dumps read as one."""

from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.vocab import VocabMap, count_tokens
from eagle3.dump.joined import JoinedReader
from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.dump_samples import split
from eagle3.training.loop import train
from eagle3.training.samples import TargetParts
from tests.dumps import capture, write_dump
from tests.targets import make_llama

pytestmark = pytest.mark.unit


def opened(target: Path, folder: Path, seed: int = 0, **options: object) -> DumpReader:
    write_dump(capture(target, seed=seed), folder, **options)
    return DumpReader.open(folder)


def test_every_sample_of_every_dump_is_read_under_an_id_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    one, two = opened(tiny_llama, tmp_path / "one"), opened(tiny_llama, tmp_path / "two", seed=1)
    joined = JoinedReader([one, two])
    assert len(joined.records) == len(one) + len(two) == len({record.id for record in joined.records})
    for index, record in enumerate(joined.records):
        reader, own = (one, index) if index < len(one) else (two, index - len(one))
        sample, original = joined.read(index), reader.read(own)
        assert sample.id == record.id == f"{reader.manifest.digest()[:12]}/{original.id}"
        assert torch.equal(sample.full_ids(), original.full_ids())
        assert all(torch.equal(state, original.states[point]) for point, state in sample.states.items())
        assert all(torch.equal(a, b) for a, b in zip(joined.tokens(index), reader.tokens(own), strict=True))


def test_a_drafter_trains_on_two_dumps(tiny_llama: Path, tmp_path: Path) -> None:
    joined = JoinedReader([opened(tiny_llama, tmp_path / "one"), opened(tiny_llama, tmp_path / "two", seed=1)])
    target = Target.open(tiny_llama)
    samples, heldout = split(joined, 3)
    vocab = VocabMap.most_frequent(count_tokens(samples.tokens(), target.vocab_size), 64)
    shape = DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=len(vocab))
    recipe = TrainingConfig(budget=3, bf16=False)
    parts = TargetParts.of(target)
    result = train(samples, heldout, parts, shape, vocab, recipe, order=samples.drawn_by(0))
    assert (result.metrics["samples"], result.metrics["steps"]) == (13, 3)
    assert result.acceptance is not None


def test_dumps_that_differ_are_refused_by_what_differs(tiny_llama: Path, tmp_path: Path) -> None:
    one = opened(tiny_llama, tmp_path / "one")
    with pytest.raises(DumpError, match="is given twice"):
        JoinedReader([one, DumpReader.open(tmp_path / "one")])
    spec = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 4)))
    with pytest.raises(DumpError, match=r"cannot be trained on together: capture spec is .*layers\.5.*layers\.4"):
        JoinedReader([one, opened(tiny_llama, tmp_path / "two", spec=spec)])
    other = make_llama(tmp_path / "other", seed=1)
    with pytest.raises(DumpError, match=r"together: target is "):
        JoinedReader([one, opened(other, tmp_path / "three")])
    with pytest.raises(DumpError, match="at least one is needed"):
        JoinedReader([])
