"""The installed SGLang's own capture functions against the registry, and the ways in which the tool follows classes.

`tools/check_conventions.py` does the same for every published release.
"""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from eagle3.conventions.sglang import NEWEST, boundaries
from tools.capture_source import NotFollowed, Source
from tools.check_conventions import BEGIN, DOCS, ID_LISTS, Proven, check_dflash, check_sglang, differences_of, table

pytestmark = pytest.mark.unit

RELEASE = str(NEWEST)


@pytest.fixture(scope="module")
def source() -> Source:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "SGLang is not installed: run `make install`"
    assert spec.origin is not None
    assert Version(version("sglang")) == NEWEST, "another SGLang: run tools/check_conventions.py and extend the ranges"
    return Source.from_folder(Path(spec.origin).parent / "srt" / "models")


def test_every_class_of_the_installed_sglang_captures_what_the_registry_says(source: Source) -> None:
    differences, proven, not_followed = check_sglang(source, RELEASE, ID_LISTS[::4])
    assert differences == []
    assert len(proven) > 50
    assert [line.split(":")[0] for line in not_followed] == ["MindSporeForCausalLM"]


def test_every_dflash_class_of_the_installed_sglang_too(source: Source) -> None:
    assert check_dflash(source, RELEASE) == []


def test_a_difference_would_be_found(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a registry that forgot the change of 0.5.13 differs in every class of that family."""
    monkeypatch.setattr("eagle3.conventions.sglang.DEEPSEEK_CHANGED", Version("9"))
    places = source.entry_classes()
    found = {
        name: list(differences_of(source, places[name], RELEASE, (True, False)))
        for name in ("DeepseekV3ForCausalLM", "LlamaForCausalLM")
    }
    assert any("DeepseekV3ForCausalLM, 61 layers, ids (2, 30, 58)" in line for line in found["DeepseekV3ForCausalLM"])
    assert found["LlamaForCausalLM"] == []


def test_a_delegating_class_is_followed(source: Source) -> None:
    places = source.entry_classes()
    assert source.captured(places["KimiK25ForConditionalGeneration"], (2, 30, 58), 61) == (2, 30, 58)
    assert source.captured(places["Qwen3_5MoeForConditionalGeneration"], (2, 30, 58), 61) == (3, 31, 59)
    assert source.ends(places["LlamaForCausalLM"]) == (True, False)
    assert source.ends(places["Gemma3ForConditionalGeneration"]) == (True, True)


def test_two_classes_of_one_name_are_told_apart(source: Source) -> None:
    """`Qwen3_5ForCausalLM` is the backbone in one file and the text-only target in another."""
    target = source.entry_classes()["Qwen3_5ForCausalLM"]
    assert target.module == "qwen3_5_text"
    assert source.children(target)["model"].module == "qwen3_5"
    assert source.captured(target, None, 61) == boundaries(RELEASE, "Qwen3_5ForCausalLM", 61, None)


SETS_WHAT_NOBODY_READS = """
class Model:
    def forward(self, hidden_states, residual):
        for layer in self.layers:
            layer(aux_hidden_states if getattr(layer, "_is_layer_to_capture", False) else None)

class Target:
    def __init__(self):
        self.model = Model()

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [i + 1 for i in layer_ids]

EntryClass = Target
"""
NO_RESIDUAL_YET = """
class Target:
    def forward(self, hidden_states, residual):
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux_hidden_states.append(hidden_states + residual)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.layers_to_capture = [i + 1 for i in layer_ids]

EntryClass = Target
"""


def test_a_list_that_the_walk_does_not_read_is_no_capture() -> None:
    source = Source({"target": SETS_WHAT_NOBODY_READS})
    with pytest.raises(NotFollowed, match="its walk reads a flag"):
        source.captured(source.entry_classes()["Target"], (2,), 8)


def test_a_residual_that_does_not_exist_yet_is_found() -> None:
    source = Source({"target": NO_RESIDUAL_YET})
    assert source.ends(source.entry_classes()["Target"]) == (False, False)


def test_the_table_joins_what_does_the_same() -> None:
    same = (("3",) * 9, True, False)
    rows = table([Proven("0.5.9", "A", *same), Proven("0.5.10", "A", *same), Proven("0.5.9", "B", *same)])
    assert "| A | 0.5.9 to 0.5.10 |" in rows
    assert "| B | 0.5.9 |" in rows


def test_the_page_holds_the_table_of_every_class() -> None:
    generated = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2]
    for name in (
        "LlamaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "GptOssForCausalLM",
        "Qwen4ExpForConditionalGeneration",
    ):
        assert name in generated
