"""Two captures side by side, and a new dump beside what passed before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import DumpReader
from eagle3.dump.slots import SlotSample
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.baseline import Baseline, BaselineError, baseline_key
from eagle3.evidence.compare import Comparison, compare_captures
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.validate import validate_dump
from tests.dumps import Capture, capture, with_states, write_dump

pytestmark = pytest.mark.unit

POINTS = ("layers.1", "layers.3", "layers.5", "norm")


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture(scope="module")
def elsewhere(tiny_llama: Path) -> Capture:
    """Other prompts of the same target."""
    return capture(tiny_llama, seed=11)


States = dict[str, torch.Tensor]


def slots(captured: Capture, alter: Callable[[str, States], States] | None = None) -> list[SlotSample]:
    samples = []
    for sample in captured.samples:
        states: States = {name: sample.states[CapturePoint(name)] for name in (*POINTS, "embed", "layers.4")}
        states = alter(sample.id, states) if alter else states
        samples.append(
            SlotSample(sample.id, sample.input_ids, {k: v for k, v in states.items() if k[-1] != "4" and k != "embed"})
        )
    return samples


def compared(first: list[SlotSample], second: list[SlotSample]) -> Comparison:
    return compare_captures(first, second, dtypes=("float32", "float32"), names=("training", "inference"))


def test_a_capture_is_like_itself_and_like_its_16_bit_copy(captured: Capture) -> None:
    assert compared(slots(captured), slots(captured)).verdict == "pass"
    rounded = slots(captured, lambda _id, states: {k: v.bfloat16().float() for k, v in states.items()})
    found = compared(slots(captured), rounded)
    assert found.verdict == "pass", found.sentences()
    assert found.paired_samples == len(captured.samples)
    assert {slot.slot for slot in found.paired} == set(POINTS)
    assert all(slot.error is not None and 0 < slot.error < 0.01 for slot in found.paired)


def test_other_prompts_of_the_same_target_do_not_fail(captured: Capture, elsewhere: Capture) -> None:
    for first, second in ((captured, elsewhere), (elsewhere, captured)):
        found = compared(slots(first), [SlotSample(f"x{s.id}", s.input_ids, s.states) for s in slots(second)])
        assert found.verdict != "fail", found.sentences()
        assert found.paired_samples == 0
        assert "prove no layer" in found.summary()


@pytest.mark.parametrize(
    ("slot", "state"),
    [
        ("layers.3", lambda s: 2 * s["layers.3"]),
        ("layers.3", lambda s: s["layers.3"] / 2),
        ("layers.5", lambda s: s["embed"]),
        ("norm", lambda s: 3 * s["norm"]),
    ],
)
def test_gross_differences_fail_by_statistics_alone(
    captured: Capture, elsewhere: Capture, slot: str, state: Callable[[States], torch.Tensor]
) -> None:
    wrong = slots(elsewhere, lambda _id, states: states | {slot: state(states)})
    found = compared(slots(captured), [SlotSample(f"x{s.id}", s.input_ids, s.states) for s in wrong])
    assert found.verdict == "fail"
    failed = [row for row in found.measures if row.verdict == "fail"]
    assert {(row.slot, row.measure) for row in failed} == {(slot, "median norm")}
    assert "no change of domain does that" in found.sentences()[0]


def test_a_small_drift_of_the_norms_warns(captured: Capture) -> None:
    found = compare_captures(
        slots(captured),
        [SlotSample(f"x{s.id}", s.input_ids, {k: 1.4 * v for k, v in s.states.items()}) for s in slots(captured)],
        dtypes=("float32", "float32"),
        names=("a", "b"),
    )
    assert any("norms cannot tell" in sentence for sentence in found.sentences())


def test_rows_that_are_not_finite_in_the_second_alone_fail(captured: Capture) -> None:
    spoiled = slots(captured, lambda _id, s: s | {"layers.1": torch.full_like(s["layers.1"], float("nan"))})
    found = compared(slots(captured), spoiled)
    assert found.verdict == "fail"
    assert any("not finite in the second" in sentence for sentence in found.sentences())


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (
            lambda _id, s: s | {"layers.1": s["layers.5"], "layers.5": s["layers.1"]},
            "the second holds in `layers.1` what the first calls `layers.5` (0.00% apart)",
        ),
        (
            lambda _id, s: {k: v.roll(1, 0) for k, v in s.items()},
            "what the first calls `layers.3`, 1 row late",
        ),
        (
            lambda _id, s: {k: v.roll(-2, 0) for k, v in s.items()},
            "what the first calls `norm`, 2 rows early",
        ),
        (
            lambda _id, s: s | {"layers.3": s["layers.4"]},
            "`layers.3` is",
        ),
        (
            lambda i, s: {k: v.flip(0) for k, v in s.items()} if i == "p00005" else s,
            "but not in 'p00005'",
        ),
    ],
    ids=["exchanged", "late", "early", "neighbour", "one sample"],
)
def test_the_same_tokens_tell_what_the_second_holds(
    captured: Capture, alter: Callable[[str, States], States], words: str
) -> None:
    found = compared(slots(captured), slots(captured, alter))
    assert found.verdict == "fail"
    assert any(words in sentence for sentence in found.sentences()), found.sentences()


def test_slots_without_names_are_told_by_the_firsts(captured: Capture) -> None:
    renamed = [
        SlotSample(s.id, s.input_ids, {f"aux_{i}": s.states[p] for i, p in enumerate(("layers.3", "layers.1"))})
        for s in slots(captured)
    ]
    found = compared(slots(captured), renamed)
    assert [slot.sentence for slot in found.paired] == [
        "The second holds in `aux_0` what the first calls `layers.3` (0.00% apart).",
        "The second holds in `aux_1` what the first calls `layers.1` (0.00% apart).",
    ]
    assert found.verdict == "warn"  # four slots of the first are not in the second by name


def test_answers_that_go_on_otherwise_pair_by_their_common_beginning(captured: Capture) -> None:
    def cut(sample: SlotSample) -> SlotSample:
        half = len(sample.input_ids) // 2
        ids = torch.cat([sample.input_ids[:half], torch.zeros(3, dtype=torch.int64)])
        rows = {k: torch.cat([v[:half], torch.randn(3, v.shape[1])]) for k, v in sample.states.items()}
        return SlotSample(sample.id, ids, rows)

    found = compared(slots(captured), [cut(sample) for sample in slots(captured)])
    assert found.paired_samples == len(captured.samples)
    assert all(slot.verdict == "pass" for slot in found.paired), [slot.sentence for slot in found.paired]


def test_the_page_shows_both_sides_and_cannot_be_broken_by_names(captured: Capture) -> None:
    found = compare_captures(
        slots(captured), slots(captured), dtypes=("float32", "float32"), names=("a | <b>", "second\n# x")
    )
    page = found.markdown()
    assert page.startswith("## ✅")
    assert "<b>" not in page
    assert "\n# x" not in page
    assert any(line.startswith("| `layers.3` | median norm | ") for line in page.splitlines())
    assert {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("|")} == {6}
    assert all(len(row) == 5 for row in found.rows())
    assert Comparison.model_validate_json(found.model_dump_json()) == found


def examined(
    captured: Capture, folder: Path, alter: Callable[[CapturedSample], CapturedSample] | None = None
) -> tuple[EvidenceReport, Manifest]:
    manifest = write_dump(captured, folder, alter=alter, probe=False)
    report = validate_dump(DumpReader.open(folder), captured.parts)
    return report, manifest


def test_a_dump_that_passed_is_the_baseline_of_the_next(captured: Capture, elsewhere: Capture, tmp_path: Path) -> None:
    report, manifest = examined(captured, tmp_path / "first")
    baseline = Baseline.parse(Baseline.of(report, manifest).canonical(), where="b")
    assert baseline_key(manifest) == f"baselines/{manifest.target.weights_sha256}-float32.json"
    assert set(baseline.points) == set(POINTS)
    assert all(held.dump_sha256 == manifest.digest() for held in baseline.points.values())

    again, _ = examined(elsewhere, tmp_path / "again")
    assert baseline.compare(again, "again").verdict != "fail"
    scaled, _ = examined(
        elsewhere,
        tmp_path / "scaled",
        alter=lambda s: with_states(s, {"layers.3": 2 * s.states[CapturePoint("layers.3")]}),
    )
    found = baseline.compare(scaled, "scaled")
    assert found.verdict == "fail"
    assert "The rows of `layers.3` are 2" in found.sentences()[0]


def test_other_points_of_the_same_target_are_kept_beside_the_new_ones(captured: Capture, tmp_path: Path) -> None:
    report, manifest = examined(captured, tmp_path)
    part = Baseline.of(report.model_copy(update={"statistics": report.statistics[:1]}), manifest)
    rest = Baseline.of(report.model_copy(update={"statistics": report.statistics[1:]}), manifest, part)
    assert set(rest.points) == set(POINTS)
    assert len(part.compare(report, "new").measures) < len(rest.compare(report, "new").measures)


def test_a_failed_report_or_another_dumps_makes_no_baseline(
    captured: Capture, elsewhere: Capture, tmp_path: Path
) -> None:
    _, other = examined(elsewhere, tmp_path / "other")
    report, manifest = examined(captured, tmp_path / "one")
    with pytest.raises(BaselineError, match="needs a dump that passed"):
        Baseline.of(report, other)
    broken, manifest = examined(
        captured, tmp_path / "broken", lambda s: with_states(s, {"norm": s.states["norm"].roll(1, 0)})
    )
    with pytest.raises(BaselineError, match="says fail"):
        Baseline.of(broken, manifest)


def test_what_is_no_baseline_is_named() -> None:
    with pytest.raises(BaselineError, match=r"x: not a baseline: target: Field required"):
        Baseline.parse(b"{}", where="x")
