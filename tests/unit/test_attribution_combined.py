"""Two mistakes in one dump, mistakes that no catalogue lists, and targets whose layers are nearly equal: the words."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.attributed import Attribution, Candidate
from eagle3.evidence.attribution_check import check_attribution
from eagle3.evidence.report import Check
from tests.dumps import SPEC, Capture, capture, reference_of, with_states, write_dump
from tests.planting import later
from tests.targets import HIDDEN, make_idle

pytestmark = pytest.mark.unit

LOW, MID, HIGH = SPEC.aux
NO_CONVENTION = "no known convention"
Change = Callable[[CapturedSample], Mapping[str, torch.Tensor]]


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


def judged(captured: Capture, folder: Path, change: Change, dtype: torch.dtype | None = None) -> Check:
    return attributed(captured, folder, change, dtype)[0]


def attributed(
    captured: Capture, folder: Path, change: Change, dtype: torch.dtype | None = None
) -> tuple[Check, Attribution]:
    write_dump(captured, folder, alter=lambda s: with_states(s, change(s)), dtype=dtype)
    check, attribution = check_attribution(DumpReader.open(folder), reference_of(captured.target))
    assert attribution is not None
    return check, attribution


# Two at once: each is named.


def test_a_list_that_slipped_is_named_where_one_slot_is_scaled_too(captured: Capture, tmp_path: Path) -> None:
    embed = CapturePoint("embed")
    check = judged(captured, tmp_path, lambda s: {LOW: s.states[embed], MID: s.states[LOW], HIGH: s.states[MID] * 0.5})
    assert "The embedding stands first and every layer one slot later" in check.sentence
    assert "layers.5 was multiplied by 0.5" in check.sentence
    assert NO_CONVENTION not in check.sentence


def test_one_layer_late_is_named_where_one_slot_is_scaled_too(captured: Capture, tmp_path: Path) -> None:
    check = judged(captured, tmp_path, lambda s: {p: s.states[later(p, 1)] * (2 if p == MID else 1) for p in SPEC.aux})
    assert "they were written for one and read by another" in check.sentence
    assert "layers.3 was multiplied by 2" in check.sentence
    assert NO_CONVENTION not in check.sentence


def test_a_swap_is_named_where_the_slots_are_scaled_too(captured: Capture, tmp_path: Path) -> None:
    check = judged(captured, tmp_path, lambda s: {LOW: s.states[HIGH] * 2, HIGH: s.states[LOW] * 2})
    assert "the right layers in another order" in check.sentence
    assert "layers.1 was multiplied by 2" in check.sentence


def test_another_layer_is_named_where_the_rows_are_late_too(captured: Capture, tmp_path: Path) -> None:
    check = judged(captured, tmp_path, lambda s: {p: s.states[later(p, 1)].roll(1, 0) for p in SPEC.aux})
    assert "Rows are late by 1" in check.sentence
    assert "they were written for one and read by another" in check.sentence


def test_a_slip_is_named_beside_a_slot_that_fits_nothing(captured: Capture, tmp_path: Path) -> None:
    check = judged(
        captured,
        tmp_path,
        lambda s: {p: s.states[later(p, 1)] if p != HIGH else s.states[p].roll(7, 0) for p in SPEC.aux},
    )
    assert "they were written for one and read by another" in check.sentence
    assert "layers.5 holds none of the target's tensors" in check.sentence
    assert NO_CONVENTION not in check.sentence


def test_a_mistyped_id_is_still_said_to_be_no_convention(captured: Capture, tmp_path: Path) -> None:
    check = judged(captured, tmp_path, lambda s: {LOW: s.states[CapturePoint("layers.6")]})
    assert NO_CONVENTION in check.sentence


# Rows that were normalised one by one.


@pytest.mark.parametrize(("length", "dtype"), [(1.0, None), (HIDDEN**0.5, None), (1.0, torch.bfloat16)])
def test_rows_of_one_length_are_named_with_their_layer(
    captured: Capture, tmp_path: Path, length: float, dtype: torch.dtype | None
) -> None:
    def even(sample: CapturedSample) -> dict[str, torch.Tensor]:
        return {p: length * torch.nn.functional.normalize(sample.states[p], dim=-1) for p in SPEC.aux}

    check, attribution = attributed(captured, tmp_path, even, dtype)
    assert check.verdict == "fail"
    for slot in attribution.slots[:3]:
        assert slot.claimed is not None
        assert slot.found == Candidate(point=slot.claimed, length=slot.found.length)
        assert slot.found.length == pytest.approx(length, rel=0.01)
    assert f"Every row of layers.3 has length {length:g}" in check.sentence
    assert "none of the target's tensors" not in check.sentence
    assert "quantised" not in check.sentence


def test_rows_of_one_length_and_another_layer_are_both_named(captured: Capture, tmp_path: Path) -> None:
    def even(sample: CapturedSample) -> dict[str, torch.Tensor]:
        return {p: torch.nn.functional.normalize(sample.states[later(p, 1)], dim=-1) for p in SPEC.aux}

    sentence = judged(captured, tmp_path, even).sentence
    assert "layers.3 holds layers.4 with every row scaled to length 1" in sentence
    assert "they were written for one and read by another" in sentence


# A part of the rows.


def of_part(prompt: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def plant(sample: CapturedSample) -> dict[str, torch.Tensor]:
        border, states = sample.prompt_tokens, {p: sample.states[p] for p in SPEC.aux}
        if prompt:
            return {p: torch.cat([change(s[:border]), s[border:]]) for p, s in states.items()}
        return {p: torch.cat([s[:border], change(s[border:])]) for p, s in states.items()}

    return plant


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "answer"])
def test_rows_that_are_late_in_one_part_are_said_to_be_late(captured: Capture, tmp_path: Path, prompt: bool) -> None:
    check = judged(captured, tmp_path, of_part(prompt, lambda rows: rows.roll(1, 0)))
    assert check.verdict == "fail"
    assert "layers.3, 1 row late" in check.sentence
    assert "Rows are cut at another place there" in check.sentence
    assert "prefix cache" not in check.sentence


def test_answers_of_another_layer_are_said_to_be_of_it(captured: Capture, tmp_path: Path) -> None:
    def next_layer(sample: CapturedSample) -> dict[str, torch.Tensor]:
        border = sample.prompt_tokens
        return {MID: torch.cat([sample.states[MID][:border], sample.states[later(MID, 1)][border:]])}

    check, attribution = attributed(captured, tmp_path, next_layer)
    slot = attribution.slots[1]
    assert slot.verdict == "refuted"
    assert {"layers.3", "layers.4"} <= set(slot.sentence.replace(",", "").split())
    assert "two paths of the server" in check.sentence


@pytest.mark.parametrize("wrong", [3, 5])
def test_samples_of_two_captures_are_told_apart_and_the_right_ones_called_right(
    captured: Capture, tmp_path: Path, wrong: int
) -> None:
    check, attribution = attributed(
        captured, tmp_path, lambda s: {MID: s.states[later(MID, 1)]} if int(s.id[1:]) < wrong else {}
    )
    assert check.verdict == "fail"
    for finding in attribution.misfits:
        right = int(finding.sample[1:]) >= wrong
        assert ("as the label says" in finding.sentence) == right
        assert ("they are layers.4" in finding.sentence) != right
    assert len(attribution.misfits) == min(wrong, 8 - wrong)


def test_half_of_the_samples_from_another_layer_are_not_called_the_whole(captured: Capture, tmp_path: Path) -> None:
    check = judged(captured, tmp_path, lambda s: {MID: s.states[later(MID, 1)]} if int(s.id[1:]) % 2 else {})
    assert check.verdict == "fail"
    assert "of its rows" in check.sentence
    assert "the others hold layers.3" in check.sentence


# Layers that are nearly equal.


@pytest.mark.parametrize("work", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_does_next_to_nothing_warns_in_a_right_dump(
    tmp_path: Path, work: float, dtype: torch.dtype
) -> None:
    captured = capture(make_idle(tmp_path / "target", 3, work), dtype=dtype)
    check = judged(captured, tmp_path / "right", lambda _: {})
    assert check.verdict == "warn", check.sentence
    assert "nearly equal in this target" in check.sentence
    wrong = judged(captured, tmp_path / "wrong", lambda s: {MID: s.states[LOW]})
    assert wrong.verdict == "fail"
    assert "layers.3 holds layers.1" in wrong.sentence


# Too few rows.


def short(captured: Capture, rows: int) -> Capture:
    first = captured.samples[0]
    cut = replace(
        first,
        input_ids=first.input_ids[:rows],
        last_token_id=int(first.input_ids[rows]),
        prompt_tokens=rows,
        output_tokens=1,
        states={p: state[:rows] for p, state in first.states.items()},
    )
    return replace(captured, samples=(cut,), max_new_tokens=1)


def test_too_few_rows_are_called_too_few_and_not_a_disagreement(captured: Capture, tmp_path: Path) -> None:
    few = short(captured, 5)
    right = judged(few, tmp_path / "right", lambda _: {})
    assert right.verdict == "warn"
    wrong = judged(few, tmp_path / "wrong", lambda s: {p: s.states[later(p, 1)] for p in SPEC.aux})
    assert wrong.verdict == "fail"
    for check in (right, wrong):
        assert "5 rows to compare, 8 are needed" in check.sentence
        assert "Labels and tensors disagree" not in check.sentence
    assert "What the labels say was not found" in wrong.sentence
