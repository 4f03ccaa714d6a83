"""What a probe proves and refutes: faults planted in real captures of tiny targets."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint, all_points
from eagle3.dump.manifest import DumpError
from eagle3.dump.probe import PROBE_NAME, Probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.attribution import MARGIN
from eagle3.evidence.probe_checks import ANCHOR_ERROR, check_probe, compare_probes, delivered
from eagle3.evidence.report import Check
from eagle3.evidence.validate import validate_dump
from tests.dumps import SPEC, Capture, capture, flip_bit, probe_of, with_states, write_dump
from tests.targets import LAYERS, make_deepseek, make_idle, make_llama

pytestmark = pytest.mark.unit

POINTS = all_points(LAYERS)


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


def judge(captured: Capture, probe: Probe, **parts: Any) -> Check:
    own = captured.parts
    given = {"embedding": own.embedding, "final_norm": own.final_norm, "rms_norm_eps": own.rms_norm_eps} | parts
    return check_probe(probe, **given)


def moved(captured: Capture, source: Callable[[CapturePoint], CapturePoint]) -> Capture:
    """The capture whose hooks call `source(point)` what is really another point."""

    def move(states: Mapping[CapturePoint, torch.Tensor]) -> dict[CapturePoint, torch.Tensor]:
        return {point: states[source(point)] for point in POINTS}

    return replace(
        captured,
        samples=tuple(replace(sample, states=move(sample.states)) for sample in captured.samples),
        texts=tuple(replace(text, boundaries=move(text.boundaries)) for text in captured.texts),
    )


def claiming(probe: Probe, **slots: str) -> Probe:
    """The dump's path delivers another boundary under a slot's name: claiming(probe, layers_3="layers.2")."""
    sources = {slot.replace("_", "."): CapturePoint(source) for slot, source in slots.items()}
    return replace(probe, captured={p: probe.rows.get(sources.get(p, p), rows) for p, rows in probe.captured.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_llama, make_deepseek])
def test_a_right_probe_passes_with_room(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    captured = capture(make(tmp_path / "target"), dtype=dtype)
    probe = probe_of(captured)
    check = judge(captured, probe)
    assert (check.verdict, check.name) == ("pass", "probe")
    assert [slot.claimed for slot in delivered(probe)] == list(SPEC.points)
    for slot in delivered(probe):
        assert slot.error <= MARGIN / 10 * slot.runner_up_error
    norm_error = float(check.value.split("norm ")[1].split(";")[0])
    assert norm_error < ANCHOR_ERROR / 4


def test_hooks_that_count_one_too_far_are_found_at_both_ends(captured: Capture) -> None:
    """As if the first layer were missed: every name holds the next boundary, and the claims agree among themselves."""
    late = moved(captured, lambda p: p if p == "norm" else POINTS[min(POINTS.index(p) + 1, LAYERS)])
    check = judge(captured, probe_of(late))
    assert check.verdict == "fail"
    assert check.points == ("embed",)
    assert "is not the embedding of the tokens" in check.sentence


def test_hooks_that_stop_one_too_early_are_found_at_the_norm(captured: Capture) -> None:
    early = moved(captured, lambda p: CapturePoint("layers.6") if p == "layers.7" else p)
    check = judge(captured, probe_of(early))
    assert check.verdict == "fail"
    assert check.points == ("norm",)
    assert "more layers follow" in check.sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_by_one_in_the_dumps_path_is_named(tiny_llama: Path, dtype: torch.dtype) -> None:
    captured = capture(tiny_llama, dtype=dtype)
    wide = probe_of(captured)
    late = {p: probe_rows(captured, CapturePoint.at_boundary((p.boundary or 0) + 1)) for p in SPEC.aux}
    check = judge(captured, replace(wide, captured=dict(wide.captured) | late))
    assert check.verdict == "fail"
    assert check.points == SPEC.aux
    for claimed, real in (("layers.1", "layers.2"), ("layers.3", "layers.4"), ("layers.5", "layers.6")):
        assert f"Asked for {claimed}, the server delivered {real}" in check.sentence
    assert "eagle3 layers" in check.sentence


def probe_rows(captured: Capture, point: CapturePoint) -> torch.Tensor:
    """Full rows of a point on the probe's sequences."""
    return probe_of(captured, SPEC.model_copy(update={"aux": (point,)})).rows[point]


def test_exchanged_slots_and_a_final_state_before_the_norm_are_named(captured: Capture) -> None:
    probe = claiming(probe_of(captured), layers_1="layers.5", layers_5="layers.1", norm="layers.7")
    check = judge(captured, probe)
    assert check.points == ("layers.1", "layers.5", "norm")
    assert "Asked for norm, the server delivered layers.7" in check.sentence


def test_another_checkpoint_of_the_same_shape_is_found(captured: Capture, tmp_path: Path) -> None:
    other = capture(make_llama(tmp_path / "other", seed=5), num_samples=1)
    check = judge(other, probe_of(captured))
    assert check.points == ("embed", "norm")
    assert "other weights than this target" in check.sentence
    narrow = judge(captured, probe_of(captured), embedding=torch.zeros(512, 32), final_norm=torch.ones(32))
    assert narrow.points == ("embed", "norm")


def test_rows_that_are_not_finite_are_never_a_match(captured: Capture) -> None:
    probe = probe_of(captured)
    broken = {**probe.captured, CapturePoint("layers.3"): torch.full_like(probe.rows[CapturePoint("embed")], torch.nan)}
    assert judge(captured, replace(probe, captured=broken)).points == ("layers.3",)


def test_projections_of_other_rows_are_found(captured: Capture) -> None:
    probe = probe_of(captured)
    check = judge(captured, replace(probe, projections=probe.projections.roll(1, dims=1)))
    assert check.verdict == "fail"
    assert "projections are not those of its rows" in check.sentence


def test_without_the_embedding_it_warns(captured: Capture) -> None:
    check = judge(captured, probe_of(captured), embedding=None)
    assert check.verdict == "warn"
    assert "`embed` was not compared" in check.sentence


# The dump beside its probe.


def probed(captured: Capture, folder: Path, **options: Any) -> Check:
    write_dump(captured, folder, **options)
    report = validate_dump(DumpReader.open(folder), captured.parts)
    return next(check for check in report.checks if check.name == "probe")


def test_the_dumps_own_rows_are_compared_with_its_probe(captured: Capture, tmp_path: Path) -> None:
    assert probed(captured, tmp_path / "right").verdict == "pass"
    late = probed(
        captured, tmp_path / "late", alter=lambda s: with_states(s, {"layers.3": s.states[CapturePoint("layers.2")]})
    )
    assert late.points == ("layers.3",)
    assert "calls a slot layers.3, but on the probe's samples its rows are layers.2" in late.sentence


def test_samples_that_were_exchanged_after_the_capture_are_named(captured: Capture, tmp_path: Path) -> None:
    names = {"p00000": "p00007", "p00007": "p00000"}
    check = probed(captured, tmp_path, alter=lambda s: replace(s, id=names.get(s.id, s.id)))
    assert check.verdict == "fail"
    assert "Other tokens stand under sample p00007, p00000" in check.sentence


def test_a_probe_of_samples_that_the_dump_lacks_is_named(captured: Capture, tmp_path: Path) -> None:
    check = probed(captured, tmp_path, alter=lambda s: replace(s, id=f"x{s.id}"))
    assert check.verdict == "fail"
    assert "samples that the dump lacks: p00000, p00004, p00007" in check.sentence


def test_a_dump_without_a_probe_warns_and_a_broken_one_fails(captured: Capture, tmp_path: Path) -> None:
    none = probed(captured, tmp_path / "none", probe=False)
    assert (none.verdict, none.value) == ("warn", "not measured")
    assert "has no probe" in none.sentence
    write_dump(captured, tmp_path / "broken")
    flip_bit(tmp_path / "broken" / PROBE_NAME)
    report = validate_dump(DumpReader.open(tmp_path / "broken"), captured.parts)
    assert {check.name for check in report.failed()} == {"integrity", "probe"}


# Two probes.


def test_two_captures_of_one_target_agree_and_another_target_does_not(
    captured: Capture, tiny_llama: Path, tmp_path: Path
) -> None:
    probe = probe_of(captured)
    half = compare_probes(probe, probe_of(capture(tiny_llama, dtype=torch.bfloat16)))
    assert half.rows == len(probe.input_ids)
    assert all(boundary.fits for boundary in half.boundaries)
    other = compare_probes(probe, probe_of(capture(make_llama(tmp_path / "other", seed=5))))
    assert not any(boundary.fits for boundary in other.boundaries[1:])


def test_probes_without_anything_in_common_cannot_be_compared(captured: Capture) -> None:
    probe = probe_of(captured)
    with pytest.raises(DumpError, match="different targets"):
        compare_probes(probe, replace(probe, info=probe.info.model_copy(update={"hidden_size": 128})))
    with pytest.raises(DumpError, match="no sequence in common"):
        compare_probes(probe, replace(probe, input_ids=probe.input_ids + 1))


def planted(captured: Capture, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Check:
    """Every slot of a dump changed."""
    return probed(
        captured, folder, alter=lambda s: with_states(s, {point: change(s.states[point]) for point in SPEC.points})
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.roll(1, dims=0), "layers.3, 1 row late"),
        (lambda state: state.roll(-2, dims=0), "layers.3, 2 rows early"),
        (lambda state: state * 2, "2 x layers.3"),
        (lambda state: state * 1.1, "1.1 x layers.3"),
        (lambda state: state * -0.5, "-0.5 x layers.3"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifts_and_scales_are_named(
    tiny_llama: Path, tmp_path: Path, dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor], named: str
) -> None:
    check = planted(capture(tiny_llama, dtype=dtype), tmp_path, change)
    assert (check.verdict, check.points) == ("fail", SPEC.points)
    assert f"on the probe's samples its rows are {named}:" in check.sentence
    assert "none of the target's boundaries" not in check.sentence
    assert "what handles the rows on their way" in check.sentence
    assert "eagle3 layers" not in check.sentence, "no id is wrong"


def test_rows_of_other_tokens_are_none_of_the_boundaries(captured: Capture, tmp_path: Path) -> None:
    check = planted(captured, tmp_path, lambda state: state.roll(5, dims=0))
    assert check.verdict == "fail"
    assert "its rows are none of the target's boundaries" in check.sentence


def test_each_remedy_is_said_once(captured: Capture, tmp_path: Path) -> None:
    """A server with wrong ids: the probe and the dump tell the same, and one cure helps."""
    wrong = with_slot(captured, "layers.3", "layers.4")
    check = probed(
        captured,
        tmp_path,
        alter=lambda s: with_states(s, {"layers.3": s.states[CapturePoint("layers.4")]}),
        probe=wrong,
    )
    assert "the server delivered layers.4" in check.sentence
    assert "its rows are layers.4" in check.sentence
    assert check.sentence.count("eagle3 layers") == check.sentence.count("extract again") == 1
    assert ".;" not in check.sentence


def with_slot(captured: Capture, slot: str, really: str) -> Probe:
    """A probe whose server delivers another layer under a slot's name."""
    rows = probe_rows(captured, CapturePoint(really))
    probe = probe_of(captured)
    return replace(probe, captured=dict(probe.captured) | {CapturePoint(slot): rows})


# Layers that hardly change the stream.


@pytest.mark.parametrize("work", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_does_next_to_nothing_is_a_doubt_and_no_fault(
    tmp_path: Path, work: float, dtype: torch.dtype
) -> None:
    target = make_idle(tmp_path / "target", 3, work)
    captured = capture(target, dtype=dtype)
    check = probed(captured, tmp_path / "right")
    assert check.verdict == "warn"
    assert check.points == ("layers.3",)
    assert "layers.3 or layers.2, which are nearly equal in this target" in check.sentence
    other = probed(
        captured, tmp_path / "wrong", alter=lambda s: with_states(s, {"layers.3": s.states[CapturePoint("layers.1")]})
    )
    assert other.verdict == "fail"
    assert "its rows are layers.1" in other.sentence
    equals = probed(
        captured, tmp_path / "equals", alter=lambda s: with_states(s, {"layers.1": s.states[CapturePoint("layers.2")]})
    )
    assert equals.verdict == "fail"
    assert "or layers." in equals.sentence
