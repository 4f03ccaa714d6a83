"""The slip that explains why slots claimed as one thing hold another."""

import pytest

from eagle3.capture import CapturePoint
from eagle3.conventions.slips import explain

pytestmark = pytest.mark.unit

LLAMA, KIMI = "LlamaForCausalLM", "KimiK25ForConditionalGeneration"


def _points(names: str) -> tuple[CapturePoint, ...]:
    return tuple(CapturePoint(name) for name in names.split())


@pytest.mark.parametrize(
    ("claimed", "found", "num_layers", "model_class", "words"),
    [
        (
            "layers.2 layers.30 layers.58 norm",
            "layers.1 layers.29 layers.57 norm",
            61,
            KIMI,
            ("Ids [2, 30, 58]", "SGLang up to 0.5.12.post1", "SGLang from 0.5.13 on", "write [3, 31, 59]"),
        ),
        (
            "layers.2 layers.30 layers.58",
            "layers.3 layers.31 layers.59",
            61,
            KIMI,
            ("Ids [3, 31, 59]", "SGLang from 0.5.13 on", "write [2, 30, 58] for SGLang up to 0.5.12.post1"),
        ),
        (
            "layers.2 layers.15 layers.27",
            "layers.3 layers.16 layers.28",
            30,
            LLAMA,
            ("Ids [3, 16, 28]", "vLLM", "transformers' hidden_states", "write [2, 15, 27] for SGLang"),
        ),
        (
            "layers.2 layers.15 layers.27",
            "layers.1 layers.14 layers.26",
            30,
            None,
            ("Ids [2, 15, 27]", "vLLM, speculators", "write [3, 16, 28]"),
        ),
        (
            "layers.3 layers.15 layers.27",
            "layers.1 layers.14 layers.26",
            30,
            LLAMA,
            ("is the default of SGLang for 30 layers", "missing or misspelt", "eagle_config."),
        ),
        (
            "layers.2 layers.15 layers.27",
            "embed layers.2 layers.15",
            30,
            LLAMA,
            ("ids like [-1, 2, 15]", "-1 captures the embedding", "[2, 15, 27] in SGLang"),
        ),
        (
            "embed layers.2 layers.15",
            "layers.2 layers.15 layers.27",
            30,
            LLAMA,
            ("named as if the embedding came first",),
        ),
        ("layers.15 layers.2", "layers.2 layers.15", 30, LLAMA, ("another order", "in the order of the layers")),
        ("layers.2 layers.15", "layers.15 layers.2", 30, LLAMA, ("another order", "columns of fc were swapped")),
        ("layers.2 norm", "layers.2 layers.29", 30, LLAMA, ("before the final norm", "vLLM")),
        ("layers.2 layers.29", "layers.2 norm", 30, LLAMA, ("transformers overwrites hidden_states[30]",)),
        ("layers.2 norm", "layers.2 layers.28", 30, LLAMA, ("boundary 29 (layers.28) instead of 30",)),
        (
            "layers.0 layers.15 layers.28",
            "embed layers.14 layers.27",
            30,
            LLAMA,
            ("Ids [0, 15, 28]", "SGLang", "vLLM"),
        ),
    ],
)
def test_the_likeliest_slip_comes_first_with_ids_and_cure(
    claimed: str, found: str, num_layers: int, model_class: str | None, words: tuple[str, ...]
) -> None:
    sentences = explain(_points(claimed), _points(found), num_layers=num_layers, model_class=model_class)
    assert 1 <= len(sentences) <= 5
    for word in words:
        assert word in sentences[0]


def test_slots_and_final_state_may_both_be_wrong() -> None:
    found = explain(
        _points("layers.2 layers.15 norm"), _points("layers.3 layers.16 layers.29"), num_layers=30, model_class=LLAMA
    )
    assert "Ids [3, 16]" in found[0]
    assert "before the final norm" in found[1]


@pytest.mark.parametrize(
    ("claimed", "found"),
    [
        ("layers.2 layers.15", "layers.2 layers.15"),
        ("layers.2 layers.15", "layers.9 layers.15"),
        ("layers.2 layers.15", "layers.2"),
    ],
    ids=["no difference", "no known slip", "another number of slots"],
)
def test_what_no_slip_explains_has_no_sentence(claimed: str, found: str) -> None:
    assert explain(_points(claimed), _points(found), num_layers=30, model_class=LLAMA) == ()


def test_the_same_question_has_the_same_answer() -> None:
    asked = (_points("layers.2 layers.15 layers.27"), _points("layers.1 layers.14 layers.26"))
    assert len({explain(*asked, num_layers=30, model_class="FooForCausalLM") for _ in range(3)}) == 1
