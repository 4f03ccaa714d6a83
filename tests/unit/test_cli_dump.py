"""`eagle3 dump` as a user meets it: what each command answers, and with which exit code it refuses.

The dumps come from a tiny target whose every boundary is known, so the right answer is known too.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.dump.foreign import LAYOUTS
from eagle3.dump.writer import CapturedSample
from tests.command import dump
from tests.dumps import Capture, capture, with_states, write_dump
from tests.foreign import AUX, WRITERS, write_request_folders, write_specforge, write_state_lists
from tests.targets import LAYERS, make_llama

pytestmark = pytest.mark.unit

PROVEN, REFUTED, USAGE, NOT_CHECKED = 0, 1, 2, 3
WRONG_FIX = ("embed", "layers.2", "layers.4")


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama, num_samples=4, max_new_tokens=16)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def exchanged(sample: CapturedSample) -> CapturedSample:
    """The states of the wrong "fix" under the right names."""
    return with_states(
        sample,
        {f"layers.{i}": sample.states[CapturePoint(p)] for i, p in zip((1, 3, 5), WRONG_FIX, strict=True)},
    )


# attribute


def test_the_list_whose_first_entry_a_comment_calls_embed_is_layers_2(captured: Capture, tmp_path: Path) -> None:
    path = write_state_lists(captured, tmp_path / "hs")
    said = dump("attribute", path, "--target", captured.target)
    assert said.code == REFUTED
    assert "layers.2, not embed" in said.out
    answer = dump("attribute", path, "--target", captured.target, "--json")
    assert answer.json["answers"] == {
        "aux_0": "layers.2, not embed",
        "aux_1": "layers.4",
        "aux_2": "layers.6",
        "final": "norm",
    }
    assert (answer.code, answer.json["verdict"], answer.json["layout"]) == (REFUTED, "refuted", "state-list")


def test_the_claim_of_the_command_line_replaces_the_comments(captured: Capture, tmp_path: Path) -> None:
    path = write_state_lists(captured, tmp_path / "hs")
    said = dump("attribute", path, "--target", captured.target, "--claim", ",".join(AUX))
    assert said.code == PROVEN, said.out
    assert "proven" in said.out
    wrong = dump("attribute", path, "--target", captured.target, "--claim", "layers.2,layers.4,layers.6,layers.7")
    assert wrong.code == REFUTED
    assert "norm, not layers.7" in wrong.out


def test_the_final_state_is_held_against_the_tokens_too(captured: Capture, tmp_path: Path) -> None:
    path = write_state_lists(captured, tmp_path / "hs")
    said = dump("attribute", path, "--target", captured.target, "--claim", ",".join(AUX), "--json")
    assert said.json["alignment"]["name"] == "alignment"
    assert said.json["alignment"]["verdict"] != "fail"


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_is_told_what_its_slots_really_are(captured: Capture, tmp_path: Path, layout: str) -> None:
    """Labelled layers.2, layers.4, layers.6; made with the ids of the wrong fix."""
    path = WRITERS[layout](captured, tmp_path / "dump", aux=WRONG_FIX)
    said = dump("attribute", path, "--target", captured.target, "--claim", ",".join(AUX), "--json")
    assert said.code == REFUTED
    assert said.json["layout"] == layout
    assert [said.json["answers"][f"aux_{i}"] for i in range(3)] == [
        "embed, not layers.2",
        "layers.2, not layers.4",
        "layers.4, not layers.6",
    ]


@pytest.mark.parametrize(
    ("layout", "final", "answer"),
    [
        ("specforge", f"layers.{LAYERS - 1}", f"layers.{LAYERS - 1}, not norm"),
        ("speculators", "norm", f"norm, not layers.{LAYERS - 1}"),
    ],
)
def test_a_final_state_of_the_wrong_kind_is_refuted(
    captured: Capture, tmp_path: Path, layout: str, final: str, answer: str
) -> None:
    path = WRITERS[layout](captured, tmp_path / "dump", final=final)
    said = dump("attribute", path, "--target", captured.target, "--json")
    assert (said.code, said.json["answers"]["final"]) == (REFUTED, answer)


def doubled(sample: CapturedSample) -> CapturedSample:
    return with_states(sample, {"layers.4": 2 * sample.states[CapturePoint("layers.4")]})


def late(sample: CapturedSample) -> CapturedSample:
    states = sample.states[CapturePoint("layers.4")]
    return with_states(sample, {"layers.4": torch.cat([states[:1], states[:-1]])})


def of_other_tokens(sample: CapturedSample) -> CapturedSample:
    return with_states(sample, {"layers.4": sample.states[CapturePoint("layers.4")].flip(0)})


@pytest.mark.parametrize(
    ("alter", "answer"),
    [(doubled, "2 x layers.4"), (late, "layers.4, 1 row late"), (of_other_tokens, "none of the target's tensors")],
)
def test_a_slot_that_no_claim_could_make_right_is_refuted_where_nothing_is_claimed(
    captured: Capture, tmp_path: Path, alter: Callable[[CapturedSample], CapturedSample], answer: str
) -> None:
    spoilt = replace(captured, samples=tuple(map(alter, captured.samples)))
    path = write_specforge(spoilt, tmp_path / "dump")
    said = dump("attribute", path, "--target", captured.target, "--json")
    assert said.code == REFUTED
    assert said.json["answers"] == {"aux_0": "layers.2", "aux_1": answer, "aux_2": "layers.6", "final": "norm"}
    assert "refuted: " in dump("attribute", path, "--target", captured.target).out


def test_model_optimizers_final_state_is_named_and_not_judged(captured: Capture, tmp_path: Path) -> None:
    """Its scripts write the normed state or the last layer's, as the engine happens to give it."""
    for final in ("norm", f"layers.{LAYERS - 1}"):
        path = WRITERS["model-optimizer"](captured, tmp_path / final, final=final)
        said = dump("attribute", path, "--target", captured.target, "--json")
        assert (said.code, said.json["answers"]["final"]) == (PROVEN, final)


@pytest.mark.parametrize("reference", ["target", "probe"])
@pytest.mark.parametrize("by", [Path, Path.as_uri], ids=["path", "uri"])
def test_our_own_dump_is_proven_with_a_target_and_without(
    captured: Capture, tmp_path: Path, reference: str, by: Callable[[Path], str | Path]
) -> None:
    write_dump(captured, tmp_path / "dump")
    target = ["--target", captured.target] if reference == "target" else []
    said = dump("attribute", by(tmp_path / "dump"), *target, "--json")
    assert said.code == PROVEN, said
    assert said.json["reference"] == reference
    assert said.json["answers"] == {p: p for p in ("layers.1", "layers.3", "layers.5", "norm")}


@pytest.mark.parametrize("reference", ["target", "probe"])
def test_wrong_labels_of_our_own_dump_are_refuted(captured: Capture, tmp_path: Path, reference: str) -> None:
    write_dump(captured, tmp_path / "dump", alter=exchanged)
    said = dump("attribute", tmp_path / "dump", "--target", captured.target, "--reference", reference, "--json")
    assert said.code == REFUTED
    assert said.json["reference"] == reference
    assert said.json["answers"]["layers.1"] == "embed, not layers.1"
    assert said.json["answers"]["layers.5"] == "layers.4, not layers.5"


def test_a_dump_without_a_probe_needs_a_target(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path / "ours", probe=False)
    write_specforge(captured, tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        said = dump("attribute", path)
        assert said.code == NOT_CHECKED
        assert "has no probe" in said.err
        assert "--target DIR" in said.err


def test_states_without_ids_are_inspected_and_attributed_with_a_file_of_ids(captured: Capture, tmp_path: Path) -> None:
    path = write_request_folders(captured, tmp_path / "old")
    for file in path.glob("*/input_ids.pt"):
        file.unlink()
    said = dump("attribute", path, "--target", captured.target)
    assert said.code == NOT_CHECKED
    assert "has no token ids" in said.err
    assert dump("inspect", path, "--json").json["num_with_ids"] == 0
    ids = tmp_path / "ids.jsonl"
    ids.write_text("\n".join(json.dumps({"id": s.id, "input_ids": s.input_ids.tolist()}) for s in captured.samples))
    said = dump("attribute", path, "--target", captured.target, "--ids", ids, "--json")
    assert said.code == PROVEN
    assert said.json["answers"]["aux_0"] == "layers.2"


# inspect


def test_inspect_says_what_our_own_dump_is(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path / "dump")
    said = dump("inspect", tmp_path / "dump")
    assert said.code == PROVEN
    for words in (
        "LlamaForCausalLM, 8 layers, hidden 64",
        "layers_to_capture [2, 4, 6] of LlamaForCausalLM = layers.1, layers.3, layers.5",
        "sglang 0.5.23 LlamaForCausalLM [1, 3, 5] = layers.1, layers.3, layers.5",
        manifest.digest(),
    ):
        assert words in said.out
    described = dump("inspect", tmp_path / "dump", "--statistics", "--json").json
    assert described["num_tokens"] == manifest.num_tokens
    assert [slot["claim"] for slot in described["slots"]] == ["layers.1", "layers.3", "layers.5", "norm"]
    assert all(slot["statistics"]["rows"] == manifest.num_tokens for slot in described["slots"])


@pytest.mark.parametrize("layout", WRITERS)
def test_inspect_says_what_somebody_elses_dump_is(captured: Capture, tmp_path: Path, layout: str) -> None:
    path = WRITERS[layout](captured, tmp_path / "dump")
    described = dump("inspect", path, "--statistics", "--json").json
    assert (described["layout"], described["num_samples"], described["hidden_size"]) == (layout, 4, 64)
    assert described["num_tokens"] == sum(len(sample.input_ids) for sample in captured.samples)
    assert described["num_with_ids"] == 4
    assert [slot["label"] for slot in described["slots"]] == ["aux_0", "aux_1", "aux_2", "final"]
    assert all(slot["statistics"]["median_norm"] > 0 for slot in described["slots"])
    assert LAYOUTS[layout].made_by in dump("inspect", path).out


# compare


def test_the_same_capture_in_two_layouts_compares_equal(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path / "ours")
    theirs = write_specforge(captured, tmp_path / "theirs", aux=("layers.1", "layers.3", "layers.5"))
    said = dump("compare", tmp_path / "ours", theirs, "--json")
    assert (said.code, said.json["verdict"]) == (PROVEN, "pass"), said.out
    assert "aux_0 as layers.1" in said.json["second"]
    assert [pair["error"] for pair in said.json["paired"]] == [0, 0, 0, 0]


def test_a_capture_of_other_layers_does_not_compare(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path / "ours")
    write_dump(captured, tmp_path / "theirs", alter=exchanged)
    said = dump("compare", tmp_path / "ours", tmp_path / "theirs")
    assert said.code == REFUTED
    assert "do not hold the same states" in said.out


def test_a_comparison_says_its_measures_in_plain_words(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path / "ours")
    said = dump("compare", tmp_path / "ours", tmp_path / "ours")
    assert said.code == PROVEN
    assert "share of the squared length in the largest dimension" in said.out
    assert "energy" not in said.out


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        ({"num_hidden_layers": 9}, "decoder layers 8 against 9; digest of the weights"),
        ({"vocab_size": 640}, "vocabulary 512 against 640; digest of the weights"),
        ({}, "are of different targets: digest of the weights"),
    ],
    ids=["depth", "vocabulary", "weights"],
)
def test_dumps_of_different_targets_are_not_compared(
    captured: Capture, tmp_path: Path, overrides: dict[str, int], differs: str
) -> None:
    other = capture(make_llama(tmp_path / "other", seed=7, **overrides), num_samples=2, max_new_tokens=8)
    write_dump(captured, tmp_path / "ours")
    write_dump(other, tmp_path / "theirs")
    said = dump("compare", tmp_path / "ours", tmp_path / "theirs")
    assert (said.code, said.out) == (NOT_CHECKED, "")
    assert "are of different targets: " in said.err
    assert differs in said.err
    accepted = dump("compare", tmp_path / "ours", tmp_path / "theirs", "--accept-target", "--json")
    assert accepted.code != NOT_CHECKED
    assert "its target's weights are" in accepted.json["first"]


def test_dumps_without_a_common_slot_or_sequence_are_not_compared(captured: Capture, tmp_path: Path) -> None:
    other = capture(captured.target, num_samples=2, seed=11, max_new_tokens=8)
    write_dump(captured, tmp_path / "ours")
    foreign = write_specforge(other, tmp_path / "theirs", aux=("layers.2", "layers.4"))
    said = dump("compare", tmp_path / "ours", foreign)
    assert said.code == NOT_CHECKED
    assert "holds layers.1, layers.3, layers.5, norm" in said.err
    assert "aux_0, aux_1, final: no slot has the same name in both, and no sequence stands in both" in said.err


def test_states_of_different_widths_are_not_compared(captured: Capture, tmp_path: Path) -> None:
    narrow = write_request_folders(captured, tmp_path / "narrow")
    for file in narrow.glob("*/*.pt"):
        if file.stem != "input_ids":
            torch.save(torch.load(file)[:, :32].clone(), file)
    said = dump("compare", narrow, write_specforge(captured, tmp_path / "wide"))
    assert said.code == NOT_CHECKED
    assert "32 wide" in said.err
