"""Evidence that the final state belongs to the tokens beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence import alignment, head
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.validate import validate_dump
from tests import targets
from tests.dumps import Capture, capture, with_states, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


def judge(captured: Capture, folder: Path, *, parts: FinalStateParts | None = None, **options: Any) -> EvidenceReport:
    write_dump(captured, folder, **options)
    return validate_dump(DumpReader.open(folder), parts or captured.parts)


def failed(report: EvidenceReport) -> dict[str, Check]:
    """What failed beside the probe, which sees most faults too, and has tests of its own."""
    return {check.name: check for check in report.failed() if check.name != "probe"}


def check_of(report: EvidenceReport, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def normed(state: torch.Tensor, parts: FinalStateParts) -> torch.Tensor:
    x = state.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + parts.rms_norm_eps) * parts.final_norm).to(state.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [targets.make_llama, targets.make_deepseek])
def test_the_greedy_answer_comes_out_again_at_offset_0_alone(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    captured = capture(make(tmp_path / "target", dtype=dtype, seed=1), dtype=dtype, num_samples=12)
    report = judge(captured, tmp_path / "dump", dtype=torch.bfloat16)
    check = check_of(report, "final_state")
    assert check.verdict == "pass", check.sentence
    shares = {o.offset: o.share for o in report.offsets}
    assert shares.pop(0) >= 0.99
    assert max(shares.values()) < 0.05


@pytest.mark.parametrize(
    ("roll", "words"), [(1, "late by 1"), (2, "late by 2"), (-1, "early by 1"), (-2, "early by 2")]
)
def test_rows_shifted_against_the_ids_are_named(captured: Capture, tmp_path: Path, roll: int, words: str) -> None:
    report = judge(
        captured,
        tmp_path,
        alter=lambda s: with_states(s, {point: state.roll(roll, 0) for point, state in s.states.items()}),
    )
    assert set(failed(report)) == {"final_state"}
    check = failed(report)["final_state"]
    assert f"fit the tokens at offset {-roll:+d}" in check.sentence
    assert words in check.sentence


def test_one_sample_with_the_rows_of_another_request_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    captured = capture(tiny_llama, num_samples=60)
    other = captured.samples[40].states["norm"]

    def exchange(sample: CapturedSample) -> CapturedSample:
        return with_states(sample, {"norm": other[-len(sample.input_ids) :]}) if sample.id == "p00010" else sample

    report = judge(captured, tmp_path, alter=exchange)
    share = next(o.share for o in report.offsets if o.offset == 0)
    assert share > alignment.AGREEMENT  # over the whole dump nothing is to be seen
    check = failed(report)["final_state"]
    assert "sample 'p00010'" in check.sentence
    assert "rows of another request" in check.sentence


def test_a_final_state_that_was_not_normed_is_found_twice(captured: Capture, tmp_path: Path) -> None:
    report = judge(captured, tmp_path, alter=lambda s: with_states(s, {"norm": s.states["layers.7"]}))
    assert set(failed(report)) == {"final_norm", "final_state"}
    assert "has not been through the target's final norm in 100%" in failed(report)["final_norm"].sentence


def twice(captured: Capture) -> Any:
    return lambda s: with_states(s, {"norm": normed(s.states["norm"], captured.parts)})


def test_a_final_state_that_was_normed_twice_shows_in_its_tokens_where_the_weights_are_uneven(
    captured: Capture, tmp_path: Path
) -> None:
    report = judge(captured, tmp_path, alter=twice(captured))
    assert set(failed(report)) == {"final_state"}  # RMS(state / weight) is 1 after the second time as well
    assert "applied twice" in failed(report)["final_state"].sentence


def test_normed_twice_with_even_weights_cannot_be_told_by_these_checks(tmp_path: Path) -> None:
    """Stated, not hidden: with equal weights the second norm changes no direction, so no token."""
    target = targets.make_llama(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    torch.nn.init.constant_(model.model.norm.weight, 1.3)
    model.save_pretrained(target)
    captured = capture(target)
    assert failed(judge(captured, tmp_path / "dump", alter=twice(captured))) == {}


@pytest.mark.parametrize("layer", [6, 5, 3])
def test_the_final_state_of_another_layer_is_found(captured: Capture, tmp_path: Path, layer: int) -> None:
    report = judge(
        captured,
        tmp_path,
        alter=lambda s: with_states(s, {"norm": normed(s.states[f"layers.{layer}"], captured.parts)}),
    )
    assert set(failed(report)) == {"final_state"}
    assert "another layer's output than the last" in failed(report)["final_state"].sentence


def test_the_head_of_another_checkpoint_is_found(captured: Capture, tmp_path: Path) -> None:
    other = capture(targets.make_llama(tmp_path / "other", seed=7)).parts
    parts = replace(captured.parts, head=other.head)
    assert set(failed(judge(captured, tmp_path / "dump", parts=parts))) == {"final_state"}


def test_a_final_state_before_the_norm_is_normed_once(captured: Capture, tmp_path: Path) -> None:
    spec = CaptureSpec(aux=("layers.1", "layers.3", "layers.5"), final="layers.7")
    assert failed(judge(captured, tmp_path / "right", spec=spec)) == {}
    report = judge(
        captured,
        tmp_path / "already",
        spec=spec,
        alter=lambda s: with_states(s, {"layers.7": s.states["norm"]}),
    )
    assert "`layers.7` has already been through the final norm" in failed(report)["final_norm"].sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head": torch.zeros(512, 63)}, r"head is [512, 63], expected [512, 64]"),
        ({"head": torch.zeros(511, 64)}, r"head is [511, 64], expected [512, 64]"),
        ({"final_norm": torch.ones(32)}, r"final norm is [32], expected [64]"),
    ],
)
def test_what_cannot_be_measured_fails_with_the_reason(
    captured: Capture, tmp_path: Path, changes: dict[str, torch.Tensor], reason: str
) -> None:
    report = judge(captured, tmp_path, parts=replace(captured.parts, **changes))
    check = failed(report)["final_state"]
    assert check.value == "not measured"
    assert reason in check.sentence


def test_a_final_point_that_is_not_the_last_layer_fails(captured: Capture, tmp_path: Path) -> None:
    spec = CaptureSpec(aux=("layers.1", "layers.3", "layers.5"), final=CapturePoint("layers.6"))
    report = judge(captured, tmp_path, spec=spec)
    assert "`layers.6` is not the target's final state" in failed(report)["final_state"].sentence


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_head_that_says_nothing_agrees_with_nothing(captured: Capture, tmp_path: Path, value: float) -> None:
    parts = replace(captured.parts, head=torch.full((512, 64), value))
    assert "0.00% of 192" in failed(judge(captured, tmp_path, parts=parts))["final_state"].value


def test_answers_that_repeat_one_token_cannot_show_a_shift_and_say_so(tmp_path: Path) -> None:
    """A target that answers each token with itself: layers that add nothing, and the embedding for its head."""
    target = targets.make_llama(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1))
        model.model.norm.weight.fill_(1.0)
    model.save_pretrained(target)
    captured = capture(target)
    check = check_of(judge(captured, tmp_path / "dump"), "final_state")
    assert check.verdict == "warn"
    assert "repeat themselves so much that a shift of the rows could not be seen" in check.sentence


def test_a_large_dump_is_judged_on_evenly_spread_rows_and_says_how_many(
    captured: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "MAX_ROWS", 96)
    report = judge(captured, tmp_path)
    assert check_of(report, "final_state").value == "100.00% of 96 judged rows (192 predict an answer)"


def test_every_sample_of_a_dump_of_many_is_judged(captured: Capture, tmp_path: Path) -> None:
    """600 samples of 24 answer tokens: `MAX_ROWS` alone would leave 7 rows to each, too few to judge a sample."""
    many = replace(captured, samples=_copies(captured.samples, 600))
    right = judge(many, tmp_path / "right")
    assert check_of(right, "final_state").value == "100.00% of 4800 judged rows (14400 predict an answer)"
    other = captured.samples[3].states["norm"]

    def exchange(sample: CapturedSample) -> CapturedSample:
        return with_states(sample, {"norm": other[-len(sample.input_ids) :]}) if sample.id == "p00401" else sample

    report = judge(many, tmp_path / "exchanged", alter=exchange)
    assert set(failed(report)) == {"final_state"}
    assert "in sample 'p00401' (" in failed(report)["final_state"].sentence


def test_samples_too_short_to_be_judged_one_by_one_are_counted(tiny_llama: Path, tmp_path: Path) -> None:
    short = capture(tiny_llama, num_samples=3, max_new_tokens=5)
    value = check_of(judge(short, tmp_path), "final_state").value
    assert value.endswith("; 3 samples have fewer than 8 and were not judged one by one")


def _copies(samples: tuple[CapturedSample, ...], count: int) -> tuple[CapturedSample, ...]:
    return tuple(replace(samples[i % len(samples)], id=f"p{i:05d}") for i in range(count))


def test_a_small_chunk_of_the_head_at_a_time_changes_nothing(
    captured: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = judge(captured, tmp_path / "whole", alter=lambda s: with_states(s, {"norm": s.states["layers.7"]}))
    monkeypatch.setattr(head, "VOCAB_CHUNK", 100)
    monkeypatch.setattr(alignment, "BATCH_ROWS", 7)
    pieces = judge(captured, tmp_path / "pieces", alter=lambda s: with_states(s, {"norm": s.states["layers.7"]}))
    assert check_of(whole, "final_state") == check_of(pieces, "final_state")
    assert whole.offsets == pieces.offsets
