"""What is wrong with parameters, for a person: the key, what was expected, and what the target has to offer."""

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from eagle3.capture import CaptureError, range_of_points
from eagle3.errors import Eagle3Error

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"


def with_points(error: ValidationError, target: Any, demo: str) -> ValidationError:
    """The same errors; those about capture points also say which points the target has, where that is known here.

    `target` is what stands for TargetParams, checked or not; `demo` its path that means the demo's model.
    """
    return ValidationError.from_exception_data(error.title, [_told(one, target, demo) for one in error.errors()])


def _told(one: Any, target: Any, demo: str) -> InitErrorDetails:
    kind, context = one["type"], one.get("ctx", {})
    if isinstance(context.get("error"), CaptureError):
        said = f"{str(context['error']).rstrip('.')}. {_what_it_has(target, demo)}"
        kind, context = PydanticCustomError("capture_points", "{said}", {"said": said}), {}
    return InitErrorDetails(type=kind, loc=one["loc"], input=one["input"], ctx=context)


def _what_it_has(target: Any, demo: str) -> str:
    values = dict(target) if isinstance(target, dict | BaseModel) else {}
    num_layers = _num_layers(values.get("path", demo), values.get("shape"), demo)
    if num_layers is None:
        return "A target of N layers has embed, layers.0 ... layers.(N-1) and norm."
    return f"The target ({values.get('path', demo)}) has {range_of_points(num_layers)}."


def _num_layers(path: Any, shape: Any, demo: str) -> int | None:
    """From what is at hand; None where the folder is not here, and no shape stands for it."""
    from eagle3.target.config import read_config
    from infra.smollm2 import NUM_LAYERS

    if path == demo:
        return NUM_LAYERS
    try:
        return read_config(Path(path).expanduser()).num_layers
    except (Eagle3Error, OSError, TypeError, RuntimeError):
        pass
    given = dict(shape).get("num_layers") if isinstance(shape, dict | BaseModel) else None
    return given if isinstance(given, int) and given > 0 else None


def fault_lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line an error: the dotted key, and what does not fit."""
    lines = []
    for one in error.errors(include_url=False):
        where, said = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            said = _unknown_key(one["loc"], model)
        elif one["type"] == "string_pattern_mismatch" and one["ctx"]["pattern"] == NAME_PATTERN:
            said = f"expected lower-case letters, digits and dashes, at most 63; got {one['input']!r:.80}"
        elif one["type"] == "model_type" and not one["loc"]:
            said = f"expected parameters by name ({', '.join(model.model_fields)}); got {one['input']!r:.80}"
        lines.append(f"{where}: {said}" if where else said)
    return lines


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = _keys_beside(loc, model)
    near = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return "there is no such parameter" + (f"; did you mean {near[0]}?" if near else f" (here are {', '.join(known)})")


def _keys_beside(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """The names of the parameters among which the last part of `loc` stands."""
    schema = model.model_json_schema()
    definitions, here = schema.get("$defs", {}), schema
    for part in loc[:-1]:
        found = here.get("properties", {}).get(part, {})
        references = [found, *found.get("anyOf", [])]
        name = next((r["$ref"].rpartition("/")[2] for r in references if "$ref" in r), "")
        here = definitions.get(name, {})
    return list(here.get("properties", {}))
