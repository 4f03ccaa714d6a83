"""Evidence about slots: wrong labels, wrong layers and wrong lists, planted in real dumps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.dump.reader import DumpReader
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.validate import validate_dump
from tests.dumps import SPEC, Alter, Capture, capture, engine_record, unpassed, with_states, write_dump

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


def moved(**slots: str) -> Alter:
    """Put another point's states into a slot: moved(layers_1="embed")."""
    return lambda s: with_states(s, {slot.replace("_", "."): s.states[source] for slot, source in slots.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_story_a_slot_labelled_as_a_layer_holds_the_embedding(
    captured: Capture, tmp_path: Path, dtype: torch.dtype
) -> None:
    alter = moved(layers_1="embed", layers_3="layers.1", layers_5="layers.3")
    report = judge(captured, tmp_path, alter=alter, dtype=dtype)
    assert set(failed(report)) == {"embed"}
    check = failed(report)["embed"]
    assert "labelled `layers.1`, but 100.0% of its rows are the target's embedding" in check.sentence
    assert "Do not move the serving config to the label" in check.sentence
    assert check.points == ("layers.1",)


def test_the_story_the_other_way_round_a_slot_labelled_embed_holds_a_layer(captured: Capture, tmp_path: Path) -> None:
    spec = CaptureSpec(aux=("embed", "layers.1", "layers.3"))
    right = judge(captured, tmp_path / "right", spec=spec)
    assert unpassed(right) == {"attribution"}, "there was no reference"
    wrong = judge(captured, tmp_path / "wrong", spec=spec, alter=moved(embed="layers.0"))
    assert set(failed(wrong)) == {"embed"}
    assert "labelled `embed`, but only 0.0% of its rows are the embedding" in failed(wrong)["embed"].sentence


def without(parts: FinalStateParts, **changes: Any) -> FinalStateParts:
    return FinalStateParts(**(vars(parts) | changes))


def test_without_the_embedding_a_slot_labelled_embed_cannot_pass(captured: Capture, tmp_path: Path) -> None:
    blind = without(captured.parts, embedding=None)
    layers = judge(captured, tmp_path / "layers", parts=blind)
    assert check_of(layers, "embed").verdict == "warn"
    assert "embedding was not given" in check_of(layers, "embed").sentence
    embed = judge(captured, tmp_path / "embed", parts=blind, spec=CaptureSpec(aux=("embed", "layers.1", "layers.3")))
    assert set(failed(embed)) == {"embed"}
    foreign = without(captured.parts, embedding=torch.zeros(512, 32))
    assert set(failed(judge(captured, tmp_path / "foreign", parts=foreign))) == {"embed"}


def test_one_state_under_two_names_is_found(captured: Capture, tmp_path: Path) -> None:
    report = judge(captured, tmp_path, alter=moved(layers_5="layers.3"))
    assert set(failed(report)) == {"distinct_slots"}
    check = failed(report)["distinct_slots"]
    assert "layers.3 and layers.5 in sample 'p00000'" in check.sentence
    assert check.points == ("layers.3", "layers.5")


@pytest.mark.parametrize("slot", ["layers.1", "layers.5"])
def test_a_slot_that_went_through_the_final_norm_is_found(captured: Capture, tmp_path: Path, slot: str) -> None:
    norm, eps = captured.parts.final_norm, captured.parts.rms_norm_eps

    def plant(sample: Any) -> Any:
        x = sample.states[slot]
        return with_states(sample, {slot: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm})

    report = judge(captured, tmp_path, alter=plant, dtype=torch.bfloat16)
    assert set(failed(report)) == {"final_norm"}
    assert f"`{slot}` has already been through the final norm in 100%" in failed(report)["final_norm"].sentence


def test_exchanged_slots_warn_by_their_norms_and_never_fail_by_them(captured: Capture, tmp_path: Path) -> None:
    report = judge(captured, tmp_path, alter=moved(layers_1="layers.5", layers_5="layers.1"))
    assert check_of(report, "norms").verdict == "warn"
    assert "layers.5" in check_of(report, "norms").sentence
    assert failed(report) == {}
    assert check_of(report, "probe").points == ("layers.1", "layers.5")


def test_a_neighbouring_layer_is_left_to_the_probe(captured: Capture, tmp_path: Path) -> None:
    """Stated, not hidden: off by one, with a live list that agrees, is seen by none of the other checks."""
    report = judge(captured, tmp_path, alter=moved(layers_3="layers.4"))
    assert failed(report) == {}
    probe = check_of(report, "probe")
    assert probe.points == ("layers.3",)
    assert "calls a slot layers.3, but on the probe's samples its rows are layers.4" in probe.sentence


# What the engine says of itself.


@pytest.mark.parametrize(
    ("live", "sentence"),
    [
        ((1, 3, 5), "it captured layers.0, layers.2, layers.4, and the dump calls them layers.1, layers.3, layers.5"),
        ((3, 5, 7), "it captured layers.2, layers.4, layers.6"),
        ((0, 2, 4), "it captured embed, layers.1, layers.3"),
        ((2, 4), "it captured layers.1, layers.3, and the dump calls them"),
        ((2, 4, 8), r"never meets"),
        ((2, 4, 4), "names a boundary twice"),
    ],
)
def test_a_live_list_that_is_not_the_spec_fails(
    captured: Capture, tmp_path: Path, live: tuple[int, ...], sentence: str
) -> None:
    report = judge(captured, tmp_path, engine=engine_record(captured.identity, SPEC, live=live))
    assert set(failed(report)) == {"capture_list"}
    assert sentence in failed(report)["capture_list"].sentence


def test_the_order_of_the_live_list_does_not_matter_but_that_of_the_slots_does(
    captured: Capture, tmp_path: Path
) -> None:
    turned = engine_record(captured.identity, SPEC, live=(6, 2, 4))
    assert unpassed(judge(captured, tmp_path / "turned", engine=turned)) == {"attribution"}
    spec = CaptureSpec(aux=("layers.3", "layers.1", "layers.5"))
    report = judge(captured, tmp_path / "swapped", spec=spec, engine=engine_record(captured.identity, SPEC))
    assert set(failed(report)) == {"capture_list", "engine_ids"}
    assert "The slots are the right ones in another order" in failed(report)["capture_list"].sentence
    assert "cannot be had" in failed(report)["capture_list"].sentence


def test_the_same_ids_mean_other_layers_on_deepseek(tiny_deepseek: Path, tmp_path: Path) -> None:
    """[2, 4, 6] was sent for layers 2, 4, 6; from 0.5.13 on this family captures layers 1, 3, 5."""
    captured = capture(tiny_deepseek)
    spec = CaptureSpec(aux=("layers.2", "layers.4", "layers.6"))
    model_class = captured.identity.model_class
    ids = EngineIds(engine="sglang", version="0.5.23", model_class=model_class, ids=(2, 4, 6))
    engine = engine_record(captured.identity, spec, live=(2, 4, 6), ids=ids)
    broken = failed(judge(captured, tmp_path, spec=spec, engine=engine))
    assert set(broken) == {"capture_list", "engine_ids"}
    assert "The ids [2, 4, 6] mean other layers on this model class and version" in broken["capture_list"].sentence
    assert "Send [3, 5, 7] instead" in broken["capture_list"].sentence
    assert "mean layers.1, layers.3, layers.5 under sglang 0.5.23" in broken["engine_ids"].sentence


def test_ids_of_an_unknown_version_or_class_warn_because_the_live_list_decides(
    captured: Capture, tmp_path: Path
) -> None:
    for version, model_class in (("0.9.0", "LlamaForCausalLM"), ("0.5.23", "NewForCausalLM")):
        ids = EngineIds(engine="sglang", version=version, model_class=model_class, ids=(1, 3, 5))
        engine = engine_record(captured.identity, SPEC, version=version, ids=ids)
        report = judge(captured, tmp_path / f"{version}{model_class}", engine=engine)
        assert check_of(report, "engine_ids").verdict == "warn"
        assert "was not checked" in check_of(report, "engine_ids").sentence
        assert check_of(report, "capture_list").verdict == "pass"
        assert report.failed() == ()


def test_ids_declared_for_another_version_than_served_fail(captured: Capture, tmp_path: Path) -> None:
    engine = engine_record(captured.identity, SPEC, version="0.5.12")
    report = judge(captured, tmp_path, engine=engine)
    assert "declared for sglang 0.5.23, but sglang 0.5.12 served" in failed(report)["engine_ids"].sentence


def test_points_are_capture_points(captured: Capture, tmp_path: Path) -> None:
    report = judge(captured, tmp_path, alter=moved(layers_1="embed"))
    assert all(isinstance(point, CapturePoint) for check in report.checks for point in check.points)
