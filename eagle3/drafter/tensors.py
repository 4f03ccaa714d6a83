"""The named tensors of a drafter: their names in memory and on disk, their digest, and what a file lacks of them.

In memory the decoder layer is `midlayer`, as SGLang and vLLM name it for the Llama drafter; on disk it may be
`layers.0`. SGLang skips names that it does not know and leaves missing ones unset, both silently, so every missing,
renamed, unexpected or wrongly shaped tensor is named here.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.digests import canonical_json, merkle, sha256_bytes
from eagle3.drafter.config import DrafterConfig, MlaDrafterConfig
from eagle3.drafter.mla import build_drafter
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.errors import Eagle3Error

EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")
MAX_JSON_BYTES = 2**20  # config.json, contract.json and the header of model.safetensors: a few kB in truth

Header = dict[str, tuple[str, tuple[int, ...]]]
_FLOATS = ("F32", "BF16", "F16")
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class CheckpointError(Eagle3Error, ValueError):
    """A checkpoint that is incomplete, damaged or inconsistent; the message names each tensor that is wrong."""


class CheckpointUnreadable(CheckpointError):
    """A file of a checkpoint that is not there, or that cannot be read."""


def checkpoint_tensors(drafter: Drafter, vocab: VocabMap) -> dict[str, Tensor]:
    """The named tensors of a drafter: its parameters, `d2t` and `t2d`, on the CPU."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    return {**tensors, "d2t": vocab.d2t, "t2d": vocab.t2d}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Identity of a drafter: Merkle root over (name, dtype, shape, sha256 of the bytes), in order of name.

    It depends on neither the form on disk, the file's layout nor its metadata, and leaves an embedding out, which is
    the target's. Tensors must be on the CPU, under either name of the decoder layer.
    """
    named = sorted((memory_name(name), name) for name in tensors if name != EMBEDDING)
    return merkle(_leaf(name, tensors[key]) for name, key in named)


def memory_name(name: str) -> str:
    """A tensor's name in memory: `layers.0.*` is `midlayer.*`."""
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def disk_names(config: DrafterConfig, engine: str) -> dict[str, str]:
    """Name in memory -> name in the file of that engine's form, of every tensor that the file holds."""
    deep = engine == "speculators" or isinstance(config, MlaDrafterConfig)  # as published files of these forms have it
    names = expected_shapes(config)
    if full_vocabulary(config) and engine != "sglang":
        # vLLM has no place for a map of the whole vocabulary: it would refuse to load one.
        names = {name: shape for name, shape in names.items() if name not in MAPS}
    return {name: name.replace("midlayer.", "layers.0.", 1) if deep else name for name in names}


def full_vocabulary(config: DrafterConfig) -> bool:
    """Whether the drafter proposes every token of the target, so that its map says nothing."""
    return config.draft_vocab_size == config.target_vocab_size


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name in memory and shape of every tensor of a drafter of this shape."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in build_drafter(config).state_dict().items()}
    return {**shapes, "d2t": (config.draft_vocab_size,), "t2d": (config.target_vocab_size,)}


def check_header(
    header: Header,
    config: DrafterConfig,
    *,
    where: str,
    names: Mapping[str, str],
    optional: Iterable[str] = (),
    cure: str,
) -> None:
    """Refuse a file whose tensors are not those of the config; the error names every one, and what to do (`cure`).

    `names`: name in memory -> name in the file; of `optional` ones (in memory) nothing need be there.
    """
    expected = {names.get(name, name): shape for name, shape in expected_shapes(config).items()}
    expected[EMBEDDING] = (config.target_vocab_size, config.hidden_size)
    may_lack = {EMBEDDING, *(names.get(name, name) for name in optional), *(set(MAPS) - set(names))}
    missing = {name: shape for name, shape in expected.items() if name not in header and name not in may_lack}
    unexpected = {name: shape for name, (_, shape) in header.items() if name not in expected}
    problems = []
    for name, shape in missing.items():
        twins = [other for other, other_shape in unexpected.items() if other_shape == shape]
        guess = f" (renamed? {', '.join(twins)} has its shape)" if twins else ""
        problems.append(f"missing {name} {list(shape)}{guess}")
    problems += [f"unexpected {name} {list(shape)}" for name, shape in unexpected.items()]
    for name in expected.keys() & header.keys():
        dtype, shape = header[name]
        if shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, config.json asks for {list(expected[name])}")
        allowed = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, _FLOATS)
        if dtype not in allowed and name not in optional:
            problems.append(f"{name} is of type {dtype}, expected {' or '.join(allowed)}")
    floats = {dtype for name, (dtype, _) in header.items() if name not in (*MAPS, EMBEDDING)}
    if len(floats) > 1:
        problems.append(f"weights of mixed types: {', '.join(sorted(floats))}")
    if problems:
        raise CheckpointError(
            f"{where} does not hold the drafter that config.json describes: {'; '.join(sorted(problems))}. {cure}"
        )


def load_drafter(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Drafter:
    """A drafter with these parameters, under their names in memory; they keep their type and are not copied."""
    with torch.device("meta"):
        drafter = build_drafter(config)
    drafter.load_state_dict({n: t for n, t in tensors.items() if n not in (*MAPS, EMBEDDING)}, assign=True)
    return drafter


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, under its name there; CheckpointError where it is not whole."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}): fetch it again") from None


def read_header(path: Path) -> Header:
    """Name -> (type, shape) of a safetensors file, read before any tensor is allocated."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{path}: a safetensors header of {size} bytes is refused (limit {MAX_JSON_BYTES}): not a drafter"
                )
            header = parse_object(file.read(size), where=f"{path} (header)")
    except OSError as error:
        raise unreadable(path, error) from None
    header.pop("__metadata__", None)
    try:
        return {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    except (TypeError, KeyError):
        raise CheckpointError(f"{path}: its header is not that of a safetensors file") from None


def parse_object(data: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object; CheckpointError for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: not a JSON object; the file is damaged or not of a checkpoint")
    return value


def read_limited(path: Path) -> bytes:
    """A small file of a checkpoint; CheckpointError where it cannot be read or is larger than MAX_JSON_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes is refused")
    return data


def unreadable(path: Path, error: OSError) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        f"{path} cannot be read ({error.strerror}). A checkpoint holds model.safetensors and config.json, and one of "
        "ours contract.json"
    )


def _leaf(name: str, tensor: Tensor) -> str:
    content = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
    return sha256_bytes(
        canonical_json([name, _DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), content])
    )
