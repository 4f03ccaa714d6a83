"""Canonical JSON and the digests made from it."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_ids(ids: Iterable[int]) -> str:
    """Digest of a token sequence, the same on every machine (comma-separated decimals)."""
    return sha256_bytes(",".join(str(int(i)) for i in ids).encode())


def merkle(leaves: Iterable[str]) -> str:
    """Merkle root over hex digests, in the order given.

    Leaves and inner nodes are hashed under different prefixes, so that a node can never pass for a leaf (RFC 6962).
    An odd node moves up unchanged.
    """
    level = [sha256_bytes(b"\x00" + leaf.encode()) for leaf in leaves]
    if not level:
        return sha256_bytes(b"")
    while len(level) > 1:
        pairs = [sha256_bytes(b"\x01" + (a + b).encode()) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    return level[0]
