"""Where the rows of a shard lie, from the header of its safetensors file: 8 bytes length, JSON, then the tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from eagle3.dump.manifest import DumpError, Manifest, ShardEntry
from eagle3.dump.writer import CU_SEQLENS, INPUT_IDS, LOSS_MASK

HEADER_FETCH = 16 * 1024
"""Bytes that are asked for at once: the header of a shard of ours is far shorter."""
_MAX_HEADER = 2**20
_LENGTH = 8
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor begins in the file, in bytes."""

    starts: Mapping[str, int]


def expected_tensors(manifest: Manifest, entry: ShardEntry) -> dict[str, tuple[str, list[int]]]:
    """Name -> (safetensors dtype, shape) of every tensor that a shard must hold, and no other."""
    expected = {
        INPUT_IDS: ("I64", [entry.tokens]),
        LOSS_MASK: ("BOOL", [entry.tokens]),
        CU_SEQLENS: ("I64", [entry.samples + 1]),
    }
    for point in manifest.spec.points:
        expected[str(point)] = (_NAMES[manifest.dtype], [entry.tokens, manifest.target.hidden_size])
    return expected


def row_widths(manifest: Manifest) -> dict[str, int]:
    """Bytes of one row of each tensor that has a row for every token: ids, mask, then the points in their order."""
    state = _WIDTHS[_NAMES[manifest.dtype]] * manifest.target.hidden_size
    return {INPUT_IDS: 8, LOSS_MASK: 1} | {str(point): state for point in manifest.spec.points}


def header_end(head: bytes, entry: ShardEntry, where: str) -> int:
    """Where the header ends, from the first bytes of the file; DumpError where that cannot be."""
    length = int.from_bytes(head[:_LENGTH], "little") if len(head) >= _LENGTH else -1
    if not 2 <= length <= min(_MAX_HEADER, entry.bytes - _LENGTH):
        raise DumpError(f"{where} is not a safetensors file: its header would have {length} bytes. {_AGAIN}")
    return _LENGTH + length


def parse_layout(header: bytes, manifest: Manifest, entry: ShardEntry, where: str) -> ShardLayout:
    """Check a header (the file's first `header_end` bytes) against the manifest: names, dtypes, shapes, places."""
    try:
        found = json.loads(header[_LENGTH:])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DumpError(f"{where} is not a safetensors file: its header is not a JSON object. {_AGAIN}")
    found.pop("__metadata__", None)
    expected = expected_tensors(manifest, entry)
    if set(found) != set(expected):
        missing, foreign = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise DumpError(
            f"{where} holds other tensors than the manifest says: missing {', '.join(missing) or 'none'}, foreign "
            f"{', '.join(foreign)[:200] or 'none'}"
        )
    starts = {}
    for name, (dtype, shape) in expected.items():
        starts[name] = len(header) + _begin(found[name], dtype, shape, entry.bytes - len(header), f"{where}, {name}")
    return ShardLayout(starts)


def _begin(tensor: Any, dtype: str, shape: list[int], room: int, where: str) -> int:
    fields = tensor if isinstance(tensor, dict) else {}
    if (fields.get("dtype"), fields.get("shape")) != (dtype, shape):
        raise DumpError(f"{where}: expected {dtype} {shape}, found {fields.get('dtype')} {fields.get('shape')}")
    offsets = fields.get("data_offsets")
    if isinstance(offsets, list) and [type(offset) for offset in offsets] == [int, int]:
        begin, end = offsets
        if 0 <= begin <= end <= room and end - begin == prod(shape) * _WIDTHS[dtype]:
            return int(begin)
    raise DumpError(f"{where}: its bytes cannot lie at {str(offsets)[:80]} of the {room} after the header. {_AGAIN}")


_AGAIN = "Extract again"
