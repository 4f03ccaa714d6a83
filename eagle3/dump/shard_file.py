"""Write a safetensors file piece by piece, hashed on the way: a shard is never joined in memory, nor read again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes; the format pads its header so that the first tensor lies aligned


def write_tensors(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """Write each tensor given as parts along its first dimension; the sha256 of the file.

    Wider types come first, so that every tensor is aligned in the mapped file. Raises OSError of the file system.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))
    header, end = {}, 0
    for name in names:
        first, *_ = parts = tensors[name]
        start, end = end, end + sum(part.nbytes for part in parts)
        header[name] = {
            "dtype": _TYPES[first.dtype],
            "shape": [sum(len(part) for part in parts), *first.shape[1:]],
            "data_offsets": [start, end],
        }
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % _ALIGNMENT)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="shard-hash") as hasher, path.open("wb") as file:
        for piece in (len(told).to_bytes(8, "little"), told):
            digest.update(piece)
            file.write(piece)
        for name in names:
            for part in tensors[name]:
                data = part.contiguous().reshape(-1).view(torch.uint8).numpy()
                hashing = hasher.submit(digest.update, data)  # beside the write: either takes about as long
                file.write(data)
                hashing.result()
    return digest.hexdigest()
