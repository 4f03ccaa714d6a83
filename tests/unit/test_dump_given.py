"""Dumps of conversations: several answers in a sample, the answers kept beside the states, and training on them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.conversations import GivenSettings
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.vocab import VocabMap, count_tokens
from eagle3.dump.answers import read_answers
from eagle3.dump.manifest import DumpError, Generation, Manifest, SampleRecord
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.files import verify_integrity
from eagle3.evidence.report import Check
from eagle3.evidence.validate import validate_dump
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.dump_samples import DumpSamples, split
from eagle3.training.loop import train
from eagle3.training.loss import valid_states
from eagle3.training.samples import TargetParts
from tests.dumps import SPEC, Capture, capture, flip_bit, reseal, with_states, write_dump

pytestmark = pytest.mark.unit

GIVEN = Generation(source="given", max_new_tokens=None, given=GivenSettings(thinking="mask"))


def spans_of(sample: CapturedSample) -> tuple[tuple[int, int], ...]:
    """Two answers in what the target answered, with another turn between them."""
    start, end = sample.prompt_tokens, len(sample.input_ids) + 1
    return ((start, start + 4), (start + 9, end))


def talked(sample: CapturedSample) -> CapturedSample:
    cut = {"finish_reason": "length", "left_out": 2} if sample.id == "p00001" else {"finish_reason": "given"}
    return replace(sample, spans=spans_of(sample), texts=(f"one of {sample.id}", "two"), **cut)


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture
def dump(captured: Capture, tmp_path: Path) -> Path:
    write_dump(captured, tmp_path / "dump", alter=talked, generation=GIVEN)
    return tmp_path / "dump"


def check_of(captured: Capture, folder: Path, name: str) -> Check:
    report = validate_dump(DumpReader.open(folder), captured.parts)
    return next(check for check in report.checks if check.name == name)


def test_a_sample_with_several_answers_reads_back_with_its_places_and_mask(captured: Capture, dump: Path) -> None:
    reader = DumpReader.open(dump)
    for original, sample in zip(captured.samples, reader, strict=True):
        (start, first), (second, end) = spans_of(original)
        assert sample.record.spans == sample.record.answer_spans == ((start, first), (second, end))
        marked = sample.full_mask().nonzero()[:, 0].tolist()
        assert marked == [*range(start, first), *range(second, end)]
    assert reader.manifest.generation == GIVEN
    assert reader.manifest.num_cut == 1
    assert [record.left_out for record in reader.records] == [0, 2, 0, 0, 0, 0, 0, 0]


def test_every_check_holds_on_it(captured: Capture, dump: Path) -> None:
    report = validate_dump(DumpReader.open(dump), captured.parts)
    wrong = [f"{check.name}: {check.sentence}" for check in report.checks if check.verdict == "fail"]
    assert not wrong
    assert check_of(captured, dump, "token_ids").verdict == "pass"


def test_one_answer_of_a_given_conversation_is_a_plain_sample(captured: Capture, tmp_path: Path) -> None:
    alone = write_dump(captured, tmp_path / "plain")
    spanned = write_dump(
        captured, tmp_path / "spanned", alter=lambda s: replace(s, spans=((s.prompt_tokens, len(s.input_ids) + 1),))
    )
    assert alone.content_digest == spanned.content_digest
    assert alone.samples.sha256 == spanned.samples.sha256


def test_the_content_digest_moves_with_the_places_of_the_answers(captured: Capture, tmp_path: Path, dump: Path) -> None:
    def elsewhere(sample: CapturedSample) -> CapturedSample:
        (start, first), last = spans_of(sample)
        return replace(sample, spans=((start, first - 1), last))

    other = write_dump(captured, tmp_path / "other", alter=elsewhere)
    plain = write_dump(captured, tmp_path / "plain")
    digests = {m.content_digest for m in (other, plain, DumpReader.open(dump).manifest)}
    assert len(digests) == 3


def test_answers_are_kept_as_ids_and_text_with_why_they_ended(captured: Capture, dump: Path) -> None:
    manifest = DumpReader.open(dump).manifest
    kept = [answers for shard in manifest.shards for answers in read_answers(dump, shard)]
    assert [answers.id for answers in kept] == [sample.id for sample in captured.samples]
    for sample, answers in zip(captured.samples, kept, strict=True):
        ids = [*sample.input_ids.tolist(), sample.last_token_id]
        assert [list(answer.token_ids) for answer in answers.answers] == [ids[a:b] for a, b in spans_of(sample)]
        assert [answer.text for answer in answers.answers] == [f"one of {sample.id}", "two"]
        assert (answers.cut, answers.finish_reason) == ((True, "length") if sample.id == "p00001" else (False, "given"))
    assert {shard.answers.name for shard in manifest.shards if shard.answers} <= {file.name for file in manifest.files}


def test_a_dump_whose_samples_bring_no_texts_keeps_no_answers(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path / "dump")
    assert all(shard.answers is None for shard in manifest.shards)
    assert not list((tmp_path / "dump").glob("*.answers.jsonl"))
    assert read_answers(tmp_path / "dump", manifest.shards[0]) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda s: replace(s, spans=((s.prompt_tokens, 9999),)), "reach from token"),
        (lambda s: replace(s, spans=((s.prompt_tokens + 1, len(s.input_ids) + 1),)), "reach from token"),
        (lambda s: replace(s, spans=spans_of(s)[::-1]), "must be in order"),
        (lambda s: replace(s, spans=((s.prompt_tokens, s.prompt_tokens), *spans_of(s))), "not empty"),
        (lambda s: replace(s, spans=spans_of(s), texts=("one",)), "1 texts for 2 answers"),
        (lambda s: replace(s, texts=("one",) if s.id == "p00000" else ()), "of all samples are kept, or of none"),
    ],
)
def test_places_and_texts_that_do_not_fit_are_refused(
    captured: Capture, tmp_path: Path, wrong: Callable[[CapturedSample], CapturedSample], words: str
) -> None:
    with pytest.raises(DumpError, match=words):
        write_dump(captured, tmp_path, alter=wrong, shard_bytes=2**20)


def test_a_record_whose_places_do_not_fit_is_refused_with_its_line(dump: Path) -> None:
    records: list[Any] = [json.loads(line) for line in (dump / "samples.jsonl").read_bytes().splitlines()]
    records[2]["spans"][0][0] += 1
    (dump / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    reseal(dump)
    with pytest.raises(DumpError, match=r"samples.jsonl, line 3: .*spans must be in order"):
        DumpReader.open(dump)


def test_answers_that_move_after_the_capture_are_found(captured: Capture, dump: Path) -> None:
    records: list[SampleRecord] = list(DumpReader.open(dump).records)
    (start, end), last = records[3].spans
    records[3] = records[3].model_copy(update={"spans": ((start, end + 1), last)})
    reseal(dump, records)
    assert check_of(captured, dump, "content").verdict == "fail"
    assert "sample 'p00003': the loss mask does not mark its answers" in check_of(captured, dump, "token_ids").sentence


def test_a_count_of_cut_samples_that_is_not_theirs_is_refused(dump: Path) -> None:
    reseal(dump, num_cut=0)
    with pytest.raises(DumpError, match="the length cap cut 1 samples; the manifest says 0"):
        DumpReader.open(dump)


def rewrite_answers(dump: Path, change: Callable[[list[Any]], None]) -> Manifest:
    path = next(dump / shard.answers.name for shard in DumpReader.open(dump).manifest.shards if shard.answers)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return reseal(dump)


def test_kept_answers_that_are_not_the_tokens_of_the_shard_are_found(captured: Capture, dump: Path) -> None:
    rewrite_answers(dump, lambda lines: lines[0]["answers"][1]["token_ids"].reverse())
    check = check_of(captured, dump, "token_ids")
    assert check.verdict == "fail"
    assert "sample 'p00000': the kept answers are not the tokens under its loss mask" in check.sentence


def test_a_file_of_answers_that_lacks_a_sample_is_found(captured: Capture, dump: Path) -> None:
    rewrite_answers(dump, lambda lines: lines.pop())
    assert "holds answers of" in check_of(captured, dump, "token_ids").sentence


def test_a_flipped_bit_in_the_answers_is_found(captured: Capture, dump: Path) -> None:
    flip_bit(dump / "shard-00000.answers.jsonl")
    assert check_of(captured, dump, "integrity").verdict == "fail"
    assert any(check.verdict == "fail" for check in verify_integrity(dump).checks)
    with pytest.raises(DumpError, match="is not the file that the manifest names"):
        read_answers(dump, DumpReader.open(dump).manifest.shards[0])


def parts_of(target: Target) -> TargetParts:
    return TargetParts(
        embedding=target.embedding_table(),
        head=target.head(),
        final_norm=target.final_norm(),
        rms_norm_eps=target.rms_norm_eps,
        num_layers=target.num_layers,
    )


def test_training_learns_from_the_answers_of_every_turn_and_from_nothing_between(tiny_llama: Path, dump: Path) -> None:
    target = Target.open(tiny_llama)
    reader = DumpReader.open(dump)
    samples = DumpSamples(reader, range(len(reader)))
    vocab = VocabMap.most_frequent(count_tokens(samples.tokens(), target.vocab_size), 64)
    for sample, record in zip(samples, reader.records, strict=True):
        places = (valid_states(sample, parts_of(target), vocab, SPEC.final).nonzero()[:, 0] + 1).tolist()
        (start, first), (second, end) = record.spans
        assert {place for place in places if place < first} <= set(range(start, first))
        assert {place for place in places if place >= first} <= set(range(second, end))
        assert places[0] < first <= second <= places[-1]  # both are learned from


def test_states_between_the_answers_are_context_and_no_target_of_the_training(
    captured: Capture, tiny_llama: Path, tmp_path: Path
) -> None:
    """Final states between the answers change nothing; those of an answer do."""
    target = Target.open(tiny_llama)

    def trained(name: str, shift: int) -> dict[str, torch.Tensor]:
        def alter(sample: CapturedSample) -> CapturedSample:
            norm, (_, (second, _)) = sample.states[SPEC.final].clone(), spans_of(sample)
            if shift:
                norm[second - shift] += 3.0
            return with_states(talked(sample), {"norm": norm})

        write_dump(captured, tmp_path / name, alter=alter, generation=GIVEN)
        samples, _ = split(DumpReader.open(tmp_path / name), 0)
        vocab = VocabMap.most_frequent(count_tokens(samples.tokens(), target.vocab_size), 64)
        shape = DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=len(vocab))
        recipe = TrainingConfig(budget=2, budget_unit="steps", bf16=False)
        return train(samples, [], parts_of(target), shape, vocab, recipe).drafter.state_dict()

    right, between, inside = trained("right", 0), trained("between", 2), trained("inside", 1)
    assert all(torch.equal(right[name], between[name]) for name in right)
    assert any(not torch.equal(right[name], inside[name]) for name in right)
