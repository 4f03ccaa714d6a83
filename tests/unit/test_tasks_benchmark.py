"""What the benchmark refuses before a prompt is sent: another target, and layer ids that mean other layers here.

And which answers are compared with which.
"""

import json
from pathlib import Path

import pytest

from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds, ids_of
from eagle3.drafter.checkpoint import Checkpoint
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.sglang.client import Generated
from tasks.benchmark import BenchmarkRefused, check_contract, check_served, same_text, with_layers
from tasks.inputs import PromptFile
from tests.drafters import ENGINE_IDS, make_contract, make_drafter, make_vocab
from tests.targets import LAYERS

pytestmark = pytest.mark.unit

POINTS = tuple(CapturePoint(f"layers.{i}") for i in (2, 4, 6))


def ids(version: str, model_class: str) -> EngineIds:
    return ids_of(POINTS, engine="sglang", version=version, model_class=model_class, num_layers=LAYERS)


def test_ids_are_judged_by_the_version_that_serves_them(tiny_deepseek: Path) -> None:
    target = Target.open(tiny_deepseek)
    new = ids("0.5.23", target.model_class)
    assert new.ids == (3, 5, 7)
    check_served(new, "0.5.23", POINTS, target)
    check_served(new, "0.5.13", POINTS, target)
    with pytest.raises(BenchmarkRefused, match=r"asks SGLang 0\.5\.12 for \[3, 5, 7\]"):
        check_served(new, "0.5.12", POINTS, target)
    old = ids("0.5.12", target.model_class)
    assert old.ids == (2, 4, 6)
    with pytest.raises(BenchmarkRefused) as refused:
        check_served(old, "0.5.23", POINTS, target)
    assert "captures layers.1, layers.3, layers.5; it must be served layers.2, layers.4, layers.6" in str(refused.value)
    assert "Right there: [3, 5, 7]" in str(refused.value)


def test_ids_that_mean_the_same_in_the_serving_version_are_served(tiny_llama: Path) -> None:
    check_served(ids("0.5.12", "LlamaForCausalLM"), "0.5.23", POINTS, Target.open(tiny_llama))


def test_ids_are_judged_by_the_model_class_that_serves_them(tiny_deepseek: Path) -> None:
    with pytest.raises(BenchmarkRefused, match="DeepseekV3ForCausalLM"):
        check_served(ids("0.5.23", "LlamaForCausalLM"), "0.5.23", POINTS, Target.open(tiny_deepseek))


def test_a_version_that_nobody_checked_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(BenchmarkRefused, match=r"0\.6\.0 .* is not known"):
        check_served(ids("0.5.23", "LlamaForCausalLM"), "0.6.0", POINTS, Target.open(tiny_llama))


def test_a_drafter_of_another_target_is_refused_by_the_field_that_differs(tiny_llama: Path) -> None:
    drafter, vocab = make_drafter(), make_vocab()
    checkpoint = Checkpoint(drafter, vocab, make_contract(drafter, vocab), ENGINE_IDS)
    with pytest.raises(BenchmarkRefused, match=r"is not made-up, for which the drafter was trained: .*weights_sha256"):
        check_contract(checkpoint, Target.open(tiny_llama))


def test_the_deliberate_mistake_is_written_for_the_version_that_serves(tiny_deepseek: Path, tmp_path: Path) -> None:
    target = Target.open(tiny_deepseek)
    folder = tmp_path / "drafter"
    folder.mkdir()
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 7]}}
    (folder / "config.json").write_text(json.dumps(config))
    points = tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5))
    trained = ids("0.5.23", target.model_class)
    served = with_layers(folder, tmp_path / "wrong", points, trained, "0.5.12", target)
    written = json.loads((served.folder / "config.json").read_text())
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5] == list(served.ids.ids)
    check_served(served.ids, "0.5.12", served.points, target)
    with pytest.raises(BenchmarkRefused, match="needs 3 points"):
        with_layers(folder, tmp_path / "two", points[:2], trained, "0.5.23", target)


def answer(rid: str, *output_ids: int) -> Generated:
    return Generated.model_validate(
        {
            "rid": rid,
            "output_ids": output_ids,
            "text": "",
            "finish_reason": "length",
            "prompt_tokens": 2,
            "completion_tokens": len(output_ids),
            "latency_s": 0.1,
            "counts": {"verifications": 0, "correct": 0, "proposed": 0},
        }
    )


def test_an_answer_is_compared_with_the_same_prompts_and_not_with_the_same_ids() -> None:
    plain: dict[tuple[int, ...], tuple[int, ...]] = {(1, 2): (7, 8), (1, 3): (7, 9)}
    heldout = PromptFile("a (held out)", (TokenizedPrompt("p1", (1, 2)), TokenizedPrompt("p2", (1, 3))))
    answers = [answer("r1", 7, 8), answer("r2", 7, 7)]
    assert same_text(heldout, answers, plain) == 1
    other = PromptFile("b", (TokenizedPrompt("p1", (5, 5)), TokenizedPrompt("p2", (5, 6))))
    assert same_text(other, answers, plain) is None
    assert same_text(heldout, answers, None) is None
