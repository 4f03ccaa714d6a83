"""What the installed SGLang does with layer ids: `set_eagle3_layers_to_capture` of every class that we claim to know.

Importing SGLang's models needs a GPU or stand-ins, so the functions are taken out of the source files and run on a
stand-in that has what they touch: a config, a pipeline group, layers, and the modules that they delegate to.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, Optional

import pytest
from packaging.version import Version

from eagle3.conventions.sglang import boundaries, known_model_classes

pytestmark = pytest.mark.unit

CAPTURE = "set_eagle3_layers_to_capture"
NUM_LAYERS = 61
ID_LISTS = (None, (2, 30, 58), (1, 29, 57), (3, 31, 59), (1, 30, 58), (30, 1, 58), (0, 3, 31), (5,))
ON_THE_EDGE = ((-1, 2, 30), (2, 30, 61))  # boundaries that some classes never meet


class Source:
    """The classes of SGLang's `srt/models`, by name."""

    def __init__(self, models: Path) -> None:
        self._texts = {path: path.read_text(encoding="utf-8-sig") for path in sorted(models.glob("*.py"))}
        self._places: dict[str, Path] = {}
        for path, text in self._texts.items():
            for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
                self._places.setdefault(name, path)
        self._classes: dict[str, ast.ClassDef] = {}

    def class_of(self, name: str) -> ast.ClassDef | None:
        if name in self._places and name not in self._classes:
            tree = ast.parse(self._texts[self._places[name]])
            self._classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        return self._classes.get(name)

    def function(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method of a class, or of the first of its bases that has it."""
        found = self.class_of(class_name)
        if found is None:
            return None
        for node in found.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        bases = (self.function(base.id, name) for base in found.bases if isinstance(base, ast.Name))
        return next((function for function in bases if function), None)

    def children(self, class_name: str) -> Iterator[tuple[str, str]]:
        """(attribute, class) of the modules that the constructor makes by name: `self.model = Qwen2MoeModel(...)`."""
        constructor = self.function(class_name, "__init__")
        for node in ast.walk(constructor) if constructor else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target, called = node.targets[0], node.value.func
                if isinstance(target, ast.Attribute) and isinstance(called, ast.Name):
                    yield target.attr, called.id


def stand_in(source: Source, class_name: str, num_layers: int) -> SimpleNamespace:
    """What the capture function of a class may touch, its children's capture functions included."""
    made = _module(num_layers)
    function = source.function(class_name, CAPTURE)
    if function:
        scope: dict[str, Any] = {"Optional": Optional, "List": list, "__name__": class_name}
        exec(compile(ast.Module([function], []), class_name, "exec"), scope)
        setattr(made, CAPTURE, MethodType(scope[CAPTURE], made))
    children = dict(source.children(class_name))
    for attribute in ("model", "language_model"):
        child = children.get(attribute)
        setattr(made, attribute, stand_in(source, child, num_layers) if child else _module(num_layers))
    return made


def _module(num_layers: int) -> SimpleNamespace:
    config = SimpleNamespace(num_hidden_layers=num_layers)
    group = SimpleNamespace(is_last_rank=True)
    layers = [SimpleNamespace() for _ in range(num_layers)]
    return SimpleNamespace(config=config, pp_group=group, layers=layers, layers_to_capture=[])


def captured_by(source: Source, class_name: str, ids: tuple[int, ...] | None) -> tuple[int, ...]:
    model = stand_in(source, class_name, NUM_LAYERS)
    getattr(model, CAPTURE)(None if ids is None else list(ids))
    return next(tuple(held) for held in _lists(model) if held)


def _lists(module: SimpleNamespace) -> Iterator[list[int]]:
    yield module.layers_to_capture
    for attribute in ("model", "language_model"):
        if hasattr(module, attribute):
            yield from _lists(getattr(module, attribute))


@pytest.fixture(scope="module")
def source() -> Source:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "SGLang is not installed: run `make install`"
    assert spec.origin is not None
    return Source(Path(spec.origin).parent / "srt" / "models")


@pytest.mark.parametrize("model_class", known_model_classes("0.5.23"))
def test_every_class_that_we_know_captures_what_we_say(source: Source, model_class: str) -> None:
    assert Version(version("sglang")) == Version("0.5.23"), "another SGLang: look at its classes and extend the ranges"
    for ids in ID_LISTS:
        expected = boundaries("0.5.23", model_class, NUM_LAYERS, ids)
        assert captured_by(source, model_class, ids) == expected, f"{model_class} {ids}"


def test_the_embedding_and_the_last_layer_too(source: Source) -> None:
    for model_class in ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"):
        for ids in ON_THE_EDGE:
            expected = boundaries("0.5.23", model_class, NUM_LAYERS, ids)
            assert captured_by(source, model_class, ids) == expected, f"{model_class} {ids}"
    assert captured_by(source, "GptOssForCausalLM", (2, 30, 61)) == (2, 30, 61)
