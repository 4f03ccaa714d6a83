"""Small JSON files of a target's folder, and the error of everything that is wrong with one."""

import json
from pathlib import Path
from typing import Any

from eagle3.errors import Eagle3Error

MAX_CONFIG_BYTES = 4 * 2**20
# A tokenizer_config.json may carry thousands of added tokens.
MAX_TOKENIZER_CONFIG_BYTES = 32 * 2**20
# A mixture of experts names every expert's tensors: Kimi-K2's index has over 200,000 lines.
MAX_INDEX_BYTES = 256 * 2**20


class TargetError(Eagle3Error, ValueError):
    """A target that cannot be used as it lies there: a folder, file, tensor or opt-in is missing or wrong."""


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes; TargetError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise TargetError(f"{path} is larger than {limit} bytes, which no such file needs; it is not read")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise TargetError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
            "A half-finished download looks like this: fetch the file again."
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise TargetError(f"{path} is not valid JSON: {type(error).__name__}. Fetch the file again.") from None
    if not isinstance(value, dict):
        raise TargetError(f"{path} must hold a JSON object; it holds a {type(value).__name__}")
    return value
