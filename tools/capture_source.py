"""SGLang's own capture functions, taken out of its source and run.

Importing SGLang's models needs a GPU or stand-ins, and every release wants its own environment. So the classes are read
from the source text (of a wheel or of an installed package), `set_eagle3_layers_to_capture` and what it delegates to
are run on a stand-in that has what they touch (a config, a pipeline group, layers), and the walk over the layers is
read for what happens at its two ends.
"""

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, Optional, Self

EAGLE3, DFLASH = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
# Drafters, prediction heads and embedding models inherit a target's function; nobody captures from them.
NOT_TARGETS = re.compile(r"(NextN|Eagle3?|MTP|AssistantForCausalLM|EmbeddingGemmaModel)$")
_MODELS = re.compile(r"sglang/srt/models/\w+\.py")
_FLAG = "_is_layer_to_capture"
_LIST = "layers_to_capture"


class NotFollowed(Exception):
    """A class that delegates to something which is not in SGLang's model files, or that was not understood."""


@dataclass(frozen=True)
class Place:
    """A class and the file that defines it: two files of SGLang define classes of the same name."""

    module: str
    node: ast.ClassDef

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.node.name

    def method(self, name: str) -> ast.FunctionDef | None:
        return next((f for f in self.node.body if isinstance(f, ast.FunctionDef) and f.name == name), None)


class Source:
    """The model classes of one SGLang release."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._modules: dict[str, dict[str, ast.ClassDef | tuple[str, str]]] = {}
        self._trees: dict[str, ast.Module] = {}
        self._entry_classes: dict[str, Place] = {}
        self._children: dict[tuple[str, str], dict[str, Place]] = {}
        self._walks: dict[tuple[str, str], ast.FunctionDef] = {}
        self._compiled: dict[tuple[str, str, str], CodeType | None] = {}

    @classmethod
    def from_wheel(cls, wheel: Path) -> Self:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _MODELS.fullmatch(name)]
            return cls({PurePosixPath(name).stem: archive.read(name).decode("utf-8-sig") for name in names})

    @classmethod
    def from_folder(cls, models: Path) -> Self:
        return cls({path.stem: path.read_text(encoding="utf-8-sig") for path in models.glob("*.py")})

    def entry_classes(self, function: str = EAGLE3) -> dict[str, Place]:
        """The target classes that SGLang offers by name (`EntryClass`) and that have the capture function."""
        return {name: place for name, place in self._entries().items() if self.inherited(place, function)}

    def _entries(self) -> dict[str, Place]:
        if not self._entry_classes:
            for module, text in sorted(self._texts.items()):
                for name in _entry_names(self._tree(module)) if "EntryClass" in text else ():
                    place = self.resolve(module, name)
                    if place and not NOT_TARGETS.search(name):
                        self._entry_classes[name] = place
        return self._entry_classes

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self._texts.get(module, ""))
        return self._trees[module]

    def resolve(self, module: str, name: str) -> Place | None:
        """The class that a name means inside a module: its own, or one imported from another model file."""
        if "." in name:  # `qwen3_5.Qwen3_5ForCausalLM`
            module, _, name = name.rpartition(".")
        for _ in range(8):
            held = self._names(module).get(name)
            if held is None:
                return None
            if isinstance(held, ast.ClassDef):
                return Place(module, held)
            module, name = held
        return None

    def inherited(self, place: Place, name: str) -> tuple[Place, ast.FunctionDef] | None:
        """A method of a class, or of the first of its bases that has it, with the class that defines it."""
        own = place.method(name)
        if own:
            return place, own
        for base in place.node.bases:
            above = self.resolve(place.module, base.id) if isinstance(base, ast.Name) else None
            found = self.inherited(above, name) if above else None
            if found:
                return found
        return None

    def children(self, place: Place) -> dict[str, Place]:
        """The model classes that a constructor makes: `self.model = Qwen2MoeModel(...)`.

        Followed are a name, a parameter (`language_model_cls=Qwen3LLMModel`) that a subclass passes to
        `super().__init__`, a class attribute (`self.body_cls`) and a method that returns what it makes
        (`self._init_model(...)`), which a subclass may override.
        """
        if place.key not in self._children:
            found = self.inherited(place, "__init__")
            self._children[place.key] = self._made(place, *found, {}) if found else {}
        return self._children[place.key]

    def _made(
        self, concrete: Place, owner: Place, constructor: ast.FunctionDef, passed: Mapping[str, Place]
    ) -> dict[str, Place]:
        given = {name: self.resolve(owner.module, value) for name, value in _defaults(constructor).items()}
        classes = {name: place for name, place in given.items() if place} | dict(passed)
        made: dict[str, Place] = {}
        for node in ast.walk(constructor):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                made = self._made_above(concrete, owner, node, classes) | made
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target, child = node.targets[0], self._class_called(concrete, owner, node.value, classes)
                if isinstance(target, ast.Attribute) and child:
                    made[target.attr] = child
        return made

    def _made_above(
        self, concrete: Place, owner: Place, call: ast.Call, classes: Mapping[str, Place]
    ) -> dict[str, Place]:
        for base in owner.node.bases:
            above = self.resolve(owner.module, base.id) if isinstance(base, ast.Name) else None
            found = self.inherited(above, "__init__") if above else None
            if not found:
                continue
            names = [argument.arg for argument in found[1].args.args][1:]
            values = {**dict(zip(names, call.args, strict=False)), **{k.arg: k.value for k in call.keywords if k.arg}}
            passed = {
                name: classes.get(ast.unparse(v)) or self.resolve(owner.module, ast.unparse(v))
                for name, v in values.items()
            }
            return self._made(concrete, *found, {name: place for name, place in passed.items() if place})
        return {}

    def _class_called(
        self, concrete: Place, owner: Place, call: ast.Call, classes: Mapping[str, Place]
    ) -> Place | None:
        name = ast.unparse(call.func)
        if not name.startswith("self."):
            return classes.get(name) or self.resolve(owner.module, name)
        attribute = name.removeprefix("self.")
        method = self.inherited(concrete, attribute)
        if method:
            returned = next((n.value for n in ast.walk(method[1]) if isinstance(n, ast.Return)), None)
            return self._class_called(concrete, method[0], returned, {}) if isinstance(returned, ast.Call) else None
        return self._class_attribute(concrete, attribute)

    def _class_attribute(self, place: Place, attribute: str) -> Place | None:
        for node in place.node.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute:
                return self.resolve(place.module, ast.unparse(node.value))
        for base in place.node.bases:
            above = self.resolve(place.module, base.id) if isinstance(base, ast.Name) else None
            found = self._class_attribute(above, attribute) if above else None
            if found:
                return found
        return None

    def captured(
        self, place: Place, ids: Sequence[int] | None, num_layers: int, function: str = EAGLE3
    ) -> tuple[int, ...]:
        """`layers_to_capture` after the class's own function was run with these ids; what it raises is passed on."""
        model = self._stand_in(place, num_layers, function)
        getattr(model, function)(None if ids is None else list(ids))
        holder = next((each for each in _modules(model) if each.layers_to_capture), None)
        if holder is None:
            raise NotFollowed(f"{place.node.name} sets no {_LIST} on anything that this reads")
        held = tuple(holder.layers_to_capture)
        flagged = {i for i, layer in enumerate(holder.layers) if hasattr(layer, _FLAG)}
        if _LIST not in _reads(self._walk(place)) and flagged != {b for b in held if b < num_layers}:
            raise NotFollowed(
                f"{place.node.name} sets {_LIST}, but its walk reads a flag of the layers: {sorted(flagged)}"
            )
        return held

    def ends(self, place: Place) -> tuple[bool, bool]:
        """Whether the walk over the layers captures boundary 0 (the embedding) and boundary N (after the last
        layer)."""
        embed, last = True, False
        for node in ast.walk(self._walk(place)):
            if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith(_LIST):
                last |= ast.unparse(node.left) in _LAST
            if isinstance(node, ast.If) and _LIST in ast.unparse(node.test):
                embed &= all(_evaluates(value) for value in _appended(node))
        return embed, last

    def _walk(self, place: Place) -> ast.FunctionDef:
        """The function that walks the layers and reads the list: the class's own, or that of the model that it
        holds."""
        if place.key not in self._walks:
            self._walks[place.key] = self._find_walk(place)
        return self._walks[place.key]

    def _find_walk(self, place: Place) -> ast.FunctionDef:
        for above in self._lineage(place):
            forward = above.method("forward")
            if forward and _reads(forward):
                return forward
        children = self.children(place)
        for attribute in ("language_model", "model"):
            if attribute in children:
                return self._walk(children[attribute])
        raise NotFollowed(f"no walk over layers was found below {place.node.name}")

    def _lineage(self, place: Place) -> Iterator[Place]:
        yield place
        for base in place.node.bases:
            above = self.resolve(place.module, base.id) if isinstance(base, ast.Name) else None
            if above:
                yield from self._lineage(above)

    def _stand_in(self, place: Place, num_layers: int, function: str) -> SimpleNamespace:
        made = _module(num_layers)
        code = self._code(place, function)
        if code:
            scope: dict[str, Any] = {"Optional": Optional, "List": list, "__name__": place.node.name}
            scope |= {"get_pp_group": lambda: made.pp_group, "get_parallel": lambda: made}
            exec(code, scope)
            setattr(made, function, MethodType(scope[function], made))
        children = self.children(place)
        for attribute in ("model", "language_model"):
            child = children.get(attribute)
            setattr(made, attribute, self._stand_in(child, num_layers, function) if child else _module(num_layers))
        return made

    def _code(self, place: Place, function: str) -> CodeType | None:
        key = (*place.key, function)
        if key not in self._compiled:
            found = self.inherited(place, function)
            self._compiled[key] = compile(ast.Module([found[1]], []), place.node.name, "exec") if found else None
        return self._compiled[key]

    def _names(self, module: str) -> dict[str, ast.ClassDef | tuple[str, str]]:
        if module not in self._modules:
            names: dict[str, ast.ClassDef | tuple[str, str]] = {}
            tree = self._tree(module)
            names |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            for node in ast.walk(tree):  # imports inside functions too
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models."):
                    source = (node.module or "").rpartition(".")[2]
                    for alias in node.names:
                        names.setdefault(alias.asname or alias.name, (source, alias.name))
            self._modules[module] = names
        return self._modules[module]


# How the walks of SGLang's models write boundary N.
_LAST = ("self.end_layer", "num_layers", "len(self.layers)", "self.config.num_hidden_layers", "i + 1")


def _entry_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            return [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
    return []


def _defaults(function: ast.FunctionDef) -> dict[str, str]:
    arguments, defaults = function.args.args, function.args.defaults
    named = zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    return {argument.arg: value.id for argument, value in named if isinstance(value, ast.Name)}


def _appended(block: ast.If) -> Iterator[ast.expr]:
    """What a block appends for the very first layer."""
    for node in ast.walk(block):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("aux_hidden_states.append"):
            yield node.args[0]


def _evaluates(value: ast.expr) -> bool:
    """Whether an expression has a value at the first layer, where there is no residual yet."""
    if any(isinstance(node, ast.Call) for node in ast.walk(value)) or isinstance(value, ast.Name):
        return True  # SGLang's own helpers (`snapshot`, `clone`) know a missing residual
    try:
        eval(compile(ast.Expression(value), "capture", "eval"), {"hidden_states": 1.0, "residual": None})
    except TypeError:
        return False
    return True


def _module(num_layers: int) -> SimpleNamespace:
    config = SimpleNamespace(num_hidden_layers=num_layers)
    config.text_config = config
    group = SimpleNamespace(is_last_rank=True, world_size=1)
    layers = [SimpleNamespace() for _ in range(num_layers)]
    return SimpleNamespace(config=config, pp_group=group, layers=layers, layers_to_capture=[])


def _modules(module: SimpleNamespace) -> Iterator[SimpleNamespace]:
    yield module
    for attribute in ("model", "language_model"):
        if hasattr(module, attribute):
            yield from _modules(getattr(module, attribute))


@cache
def _reads(walk: ast.FunctionDef) -> frozenset[str]:
    """Which of the two marks a walk reads: the list of the model, or the flag of each layer."""
    text = ast.unparse(walk)
    return frozenset(
        mark for mark in (_LIST, _FLAG) if re.search(rf"\bself\.{mark}\b|['\"]{mark}['\"]|layer\.{mark}", text)
    )
