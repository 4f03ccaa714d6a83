"""Values on their way into MLflow: as text, within its limits, and never a secret."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.utils.validation import MAX_MODEL_REGISTRY_TAG_VALUE_LENGTH, MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH
from pydantic import BaseModel

from eagle3.digests import sha256_bytes
from infra.lineage.errors import LineageError
from infra.lineage.names import LONG_VALUES

# Beyond these MLflow truncates parameters and tags of runs silently.
PARAM_LIMIT = MAX_PARAM_VAL_LENGTH
TAG_LIMIT = MAX_TAG_VAL_LENGTH
VERSION_TAG_LIMIT = MAX_MODEL_REGISTRY_TAG_VALUE_LENGTH
DESCRIPTION_LIMIT = 5000  # the column of MLflow's database

_SECRET_NAME = re.compile(
    r"api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credential|auth_?token|hf_?token|bearer", re.I
)
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+@", re.I)
_NOT_IN_A_NAME = re.compile(r"[^\w.\- /:]")


def as_text(value: Any) -> str:
    """A string as it is, everything else as JSON."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return json.dumps(value, ensure_ascii=False)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Every value as text, under a name that MLflow takes. Raises LineageError where one looks like a secret."""
    refuse_secrets(values)
    return {_NOT_IN_A_NAME.sub("_", name): as_text(value) for name, value in values.items()}


def split_long(values: Mapping[str, str], limit: int) -> tuple[dict[str, str], dict[str, str]]:
    """What fits, with a pointer in place of every value longer than `limit` characters; and those values in full."""
    long = {name: value for name, value in values.items() if len(value) > limit}
    pointers = {
        name: f"{len(value)} characters, sha256 {sha256_bytes(value.encode())}: see the artifact {LONG_VALUES}"
        for name, value in long.items()
    }
    return {**values, **pointers}, long


def check_fits(values: Mapping[str, str], limit: int, where: str) -> None:
    """Refuse what has no artifact to move to."""
    for name, value in values.items():
        if len(value) > limit:
            raise LineageError(
                f"{where} {name!r} has {len(value)} characters, MLflow keeps {limit}: shorten it, or put it into a "
                "file and name the file"
            )


def as_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers under names that MLflow takes; a sequence becomes `name/0`, `name/1`, ...; None is no measurement.

    Raises LineageError where a value is anything else.
    """
    metrics: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            metrics |= as_metrics({f"{name}/{index}": item for index, item in enumerate(value)})
        elif isinstance(value, int | float):
            metrics[_NOT_IN_A_NAME.sub("_", name)] = float(value)
        elif value is not None:
            raise LineageError(f"the metric {name!r} must be a number, got {type(value).__name__} {value!r}")
    return metrics


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise LineageError, naming the place and not the value, where something looks like a secret."""
    for name, value in _walk(values):
        last = name.rsplit(".", 1)[-1]
        if _SECRET_NAME.search(last) and isinstance(value, str) and value:
            raise LineageError(f"{name!r} looks like a secret and is not recorded: leave it out, or leave it empty")
        if isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
            raise LineageError(f"{name!r} holds a URL with credentials and is not recorded: take them out of the URL")


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner, name)
    else:
        yield name, value
