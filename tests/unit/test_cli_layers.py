"""`eagle3 layers` as a user meets it: every direction, what it explains, what it warns of, how it refuses."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3.errors import Eagle3Error
from flows.cli import app

pytestmark = pytest.mark.unit

KIMI = ("--model-class", "KimiK25ForConditionalGeneration", "--num-layers", "61")
LLAMA = ("--model-class", "LlamaForCausalLM", "--num-layers", "30")


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["layers", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_run(*arguments, "--json"))
    return answer


def test_ids_of_one_engine_are_carried_to_another() -> None:
    arguments = ("--engine", "sglang", "--engine-version", "0.5.12", *KIMI, "--ids", "2,30,58", "--to", "vllm")
    answer = _json(*arguments)
    assert answer["points"] == ["layers.2", "layers.30", "layers.58"]
    assert answer["ids"] == [2, 30, 58]
    assert answer["engine"] | {"ids": None} == {
        "engine": "sglang",
        "version": "0.5.12",
        "model_class": "KimiK25ForConditionalGeneration",
        "ids": None,
    }
    assert answer["to"]["ids"] == [3, 31, 59]
    assert answer["to"]["engine"] == "vllm"
    assert answer["explanation"][0] == "layers.2: captured at the input of layer 3 = output of layer 2"
    text = _run(*arguments)
    assert "to      vllm 0.33.0 KimiK25ForConditionalGeneration [3, 31, 59]" in text
    assert "captured at the input of layer 3 = output of layer 2" in text


def test_a_neighbouring_version_that_means_something_else_is_named() -> None:
    warnings = _json("--engine-version", "0.5.12", *KIMI, "--ids", "2,30,58")["warnings"]
    assert any("In SGLang 0.5.13 to 0.5.23" in line and "layers.1, layers.29, layers.57" in line for line in warnings)
    assert any("vLLM 0.33.0" in line and "layers.1, layers.29, layers.57" in line for line in warnings)
    later = _json("--engine-version", "0.5.23", *KIMI, "--ids", "2,30,58")["warnings"]
    assert any("In SGLang 0.5.10 to 0.5.12.post1" in line for line in later)
    assert any("On LlamaForCausalLM the same ids mean something else" in line for line in later)
    assert not any("In SGLang" in line for line in _json(*LLAMA, "--ids", "2,15,27")["warnings"])


def test_points_give_the_ids_of_the_newest_known_version() -> None:
    answer = _json(*KIMI, "--points", "layers.2,layers.30,layers.58")
    assert (answer["ids"], answer["engine"]["version"]) == ([3, 31, 59], "0.5.23")


def test_points_that_no_ids_lead_back_to_are_not_printed() -> None:
    with pytest.raises(Eagle3Error, match=r"no id list for layers\.0, layers\.30, layers\.58"):
        _run(*KIMI, "--points", "layers.0,layers.30,layers.58")


@pytest.mark.parametrize("ids", ["-1,2,15", "-1, 2, 15"])
def test_negative_ids_are_read_and_warned_of(ids: str) -> None:
    answer = _json(*LLAMA, "--ids", ids)
    assert answer["points"] == ["embed", "layers.2", "layers.15"]
    assert answer["explanation"][0] == "embed: the token embedding = the input of layer 0"
    assert any("Id -1 captures the token embedding" in line for line in answer["warnings"])


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (
            (*LLAMA, "--ids", "27,2,15"),
            "delivers the states in the order of the layers, layers.2, layers.15, layers.27",
        ),
        ((*LLAMA, "--ids", "2,15,27"), "captures its default without a word: layers.1, layers.14, layers.26"),
        ((*LLAMA, "--ids", "5"), "skips its fc"),
        ((*LLAMA, "--ids", "2,15,27", "--to", "vllm"), "The final hidden state differs"),
        ((*LLAMA, "--ids", "2,15,27", "--to", "vllm"), "carries the ids twice"),
        (("--engine", "speculators", "--num-layers", "30", "--ids", "2,15,27"), "In speculators 0.3.0 to 0.4.0.1"),
    ],
)
def test_a_silent_trap_is_said(arguments: tuple[str, ...], warning: str) -> None:
    assert any(warning in line for line in _json(*arguments)["warnings"])


def test_the_default_is_shown_with_the_ids_that_write_it_down() -> None:
    answer = _json(*KIMI, "--default")
    assert answer["points"] == ["layers.1", "layers.29", "layers.57"]
    assert answer["ids"] == [1, 29, 57]
    hard_coded = _json("--engine", "eagle", "--num-layers", "61", "--default")
    assert hard_coded["points"] == answer["points"]
    assert hard_coded["ids"] == []


def test_a_fork_is_settled_by_its_live_list() -> None:
    with pytest.raises(Eagle3Error, match="`eagle3 layers --live-list`"):
        _run(*LLAMA, "--ids", "2,15,27", "--engine-version", "0.5.23+fork")
    answer = _json(*LLAMA, "--live-list", "3,16,28", "--engine-version", "0.5.23+fork", "--to", "transformers")
    assert answer["points"] == ["layers.2", "layers.15", "layers.27"]
    assert answer["ids"] == []
    assert answer["engine"] == {"engine": "sglang", "version": "0.5.23+fork", "model_class": None, "ids": None}
    assert answer["to"]["ids"] == [3, 16, 28]
    assert "is not a release" in answer["warnings"][0]
    known = _json(*KIMI, "--live-list", "3,31,59")
    assert known["ids"] == [3, 31, 59]


def test_a_model_class_is_asked_for_only_where_it_decides() -> None:
    assert _json("--engine", "modelopt", "--num-layers", "30", "--ids", "2,15,27")["engine"]["model_class"] == "any"
    done = CliRunner().invoke(app, ["layers", "--num-layers", "30", "--ids", "2,15,27"])
    assert done.exit_code == 2
    assert "--model-class is needed" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        LLAMA,
        (*LLAMA, "--ids", "2,x"),
        (*LLAMA, "--ids", "2", "--points", "layers.2"),
        (*LLAMA, "--live-list", "3", "--engine", "vllm"),
        (*LLAMA, "--ids", "2", "--to-version", "0.33.0"),
    ],
    ids=[
        "nothing asked",
        "ids that are no integers",
        "two questions",
        "a live list of another engine",
        "a version of no engine",
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["layers", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "tgi", *LLAMA, "--ids", "2"), "unknown engine 'tgi': known are sglang"),
        ((*LLAMA, "--ids", "2,15,27", "--to", "vllm", "--to-version", "0.29.0"), "known are 0.30.0 to 0.33.0"),
        ((*LLAMA, "--points", "layer2"), "unknown capture point 'layer2'"),
        ((*LLAMA, "--points", "layers.2,layers.30"), r"no layers\.30: it has 30 decoder layers"),
        ((*LLAMA, "--ids", "-1,2,15", "--to", "modelopt"), "Model-Optimizer 0.47.0 has no id list for embed"),
        (("--engine", "modelopt", "--num-layers", "30", "--points", "embed"), "no id list for embed with 30 layers"),
        ((*LLAMA, "--ids", "2,15,27", "--to", "eagle"), r"always keeps the inputs of layers 2, 15 and 27 \(2, N//2"),
        (("--engine", "eagle", "--num-layers", "4", "--default"), "EAGLE takes no layer ids: such a target cannot"),
        (("--model-class", "LlamaForCausalLM", "--num-layers", "4", "--default"), "default needs more layers than 4"),
    ],
)
def test_what_is_not_known_or_possible_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(Eagle3Error, match=message):
        _run(*arguments)


def test_where_the_first_id_decides_the_order_is_not_called_harmless() -> None:
    kimi = ("--model-class", "KimiK25ForConditionalGeneration", "--num-layers", "61")
    warnings = " ".join(_json(*kimi, "--ids", "30,1,58")["warnings"])
    assert "The order of the ids matters here: [1, 30, 58] means layers.1, layers.30, layers.58" in warnings
    assert "The order of the ids changes nothing" in " ".join(_json(*kimi, "--ids", "58,30,2")["warnings"])


def test_releases_that_refuse_the_ids_are_named() -> None:
    warnings = " ".join(_json(*LLAMA, "--ids", "-1,2,15")["warnings"])
    assert "In SGLang 0.5.9 to 0.5.21 the same ids do not work on LlamaForCausalLM" in warnings


def test_the_stream_after_the_last_layer_is_not_called_the_input_of_one_more() -> None:
    answer = _json("--engine", "vllm", "--model-class", "LlamaForCausalLM", "--num-layers", "30", "--ids", "2,16,30")
    assert answer["explanation"][2] == "layers.29: output of layer 29, the last one, before the final norm"


def test_a_live_list_without_a_model_class_says_what_is_missing() -> None:
    answer = _json("--num-layers", "30", "--live-list", "3,16,28")
    assert answer["warnings"] == [
        "Which ids gave this list depends on the model class: name --model-class, and --engine-version."
    ]


def test_an_engine_without_ids_shows_what_its_code_keeps() -> None:
    arguments = ("--engine", "eagle", "--num-layers", "30", "--default", "--to", "vllm", "--model-class")
    said = _run(*arguments, "LlamaForCausalLM")
    assert said.startswith("ids     none: eagle takes no ids\npoints  layers.1, layers.14, layers.26\n")
    assert "final hidden state of EAGLE: after the final norm" in said
    assert "LlamaForCausalLM [2, 15, 27]" in said
    assert "The final hidden state differs: in EAGLE it is after the final norm (`norm`), in vLLM before" in said
    assert "takes no layer ids" not in said  # the user did not give any
    answer = _json(*arguments[:5])
    assert (answer["ids"], answer["engine"]["ids"], answer["warnings"]) == ([], None, [])


@pytest.mark.parametrize(
    ("source", "to", "word"),
    [
        ("sglang", "transformers", None),
        ("speculators", "vllm", None),
        ("sglang", "angelslim", None),
        ("sglang", "speculators", "differs"),
        ("sglang", "torchspec", "may differ"),
        ("modelopt", "torchspec", None),
    ],
)
def test_a_final_state_is_called_another_only_where_it_is(source: str, to: str, word: str | None) -> None:
    warnings = " ".join(_json("--engine", source, *LLAMA, "--ids", "2,15,27", "--to", to)["warnings"])
    if word is None:
        assert "The final hidden state" not in warnings
    else:
        assert f"The final hidden state {word}: " in warnings


def test_a_model_class_that_changes_nothing_is_not_shown_as_one() -> None:
    said = _run("--engine", "tensorrt_llm", "--num-layers", "30", "--ids", "2,15,27")
    assert said.startswith("ids     tensorrt_llm f933a60 [2, 15, 27], any model class\n")
