"""The drafter on disk: model.safetensors with SGLang's tensor names, config.json, contract.json.

SGLang skips tensor names that it does not know and leaves missing ones unset, both silently. So this module names every
missing, renamed, unexpected or wrongly shaped tensor, and nothing is loaded whose digest is not the contract's.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.capture import CaptureSpec
from eagle3.contract import CONTRACT_NAME, ContractError, DrafterContract
from eagle3.conventions import EngineIds, points_of
from eagle3.digests import canonical_json, merkle, sha256_bytes
from eagle3.drafter.config import ARCHITECTURE, DrafterConfig
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.errors import Eagle3Error
from eagle3.refs import DumpRef

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
MAX_JSON_BYTES = 2**20  # config.json, contract.json and the header of model.safetensors: a few kB in truth

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class CheckpointError(Eagle3Error, ValueError):
    """A checkpoint that is incomplete, damaged or inconsistent; the message names each tensor that is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded drafter and everything that speaks for it."""

    drafter: Drafter
    vocab: VocabMap
    contract: DrafterContract
    engine_ids: EngineIds


def checkpoint_tensors(drafter: Drafter, vocab: VocabMap) -> dict[str, Tensor]:
    """The named tensors of model.safetensors: the parameters, `d2t` and `t2d`, on the CPU."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    return {**tensors, "d2t": vocab.d2t, "t2d": vocab.t2d}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Identity of a drafter: Merkle root over (name, dtype, shape, sha256 of the bytes), in order of name.

    It depends on neither the file's layout nor its metadata. Tensors must be on the CPU.
    """
    return merkle(_leaf(name, tensors[name]) for name in sorted(tensors))


def contract_for(
    drafter: Drafter,
    vocab: VocabMap,
    *,
    capture: CaptureSpec,
    target: TargetIdentity,
    tokenizer: TokenizerIdentity,
    dump: DumpRef,
    report_sha256: str,
    report_check_set: int | None = None,
    report_thresholds_sha256: str | None = None,
) -> DrafterContract:
    """The contract of a trained drafter: what it was trained on, and the digests of what it is.

    A contract without the check set and thresholds of its report counts as one that rests on a stale report.
    """
    return DrafterContract(
        architecture=ARCHITECTURE,
        capture=capture,
        target=target,
        tokenizer=tokenizer,
        dump_uri=dump.uri,
        dump_sha256=dump.sha256,
        report_sha256=report_sha256,
        report_check_set=report_check_set,
        report_thresholds_sha256=report_thresholds_sha256,
        draft_vocab_size=len(vocab),
        vocab_map_sha256=vocab.digest(),
        norm=drafter.config.norm,
        weights_sha256=weights_digest(checkpoint_tensors(drafter, vocab)),
    )


def save_checkpoint(
    folder: Path, drafter: Drafter, vocab: VocabMap, contract: DrafterContract, engine_ids: EngineIds
) -> None:
    """Write a new checkpoint folder, whole or not at all (written beside it, then renamed).

    Raises ContractError where the contract does not describe this drafter, this vocabulary or what these ids capture.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: a checkpoint is never overwritten; choose another folder")
    tensors = checkpoint_tensors(drafter, vocab)
    _check_contract(contract, drafter.config, vocab, engine_ids, weights_digest(tensors), where=str(folder))
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    config = drafter.config.to_engine_config(engine_ids, contract_sha256=contract.digest(), dtype=dtype)

    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / WEIGHTS_NAME, metadata={"format": "pt"})
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / CONTRACT_NAME).write_bytes(contract.canonical())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint: config, contract, every tensor's name, shape and type, vocabulary, digests.

    Raises CheckpointError, DrafterConfigError, VocabMapError or ContractError. Weights keep their saved dtype.
    """
    config_path, contract_path, weights_path = (folder / n for n in (CONFIG_NAME, CONTRACT_NAME, WEIGHTS_NAME))
    raw = parse_object(read_limited(config_path), where=str(config_path))
    config, engine_ids, contract_digest = DrafterConfig.from_engine_config(raw, where=str(config_path))
    contract = DrafterContract.parse(read_limited(contract_path), where=str(contract_path))
    if contract.digest() != contract_digest:
        raise ContractError(
            f"{contract_path}: its digest is {contract.digest()}, config.json was exported with {contract_digest}. "
            "One of the two files is not the one that was saved: fetch the checkpoint again"
        )

    _check_header(read_header(weights_path), config, where=str(weights_path))
    try:
        tensors = load_file(weights_path)
    except SafetensorError as error:
        raise CheckpointError(f"{weights_path}: not a whole safetensors file ({error}): fetch it again") from None
    vocab = VocabMap.from_tensors(tensors["d2t"], tensors["t2d"])
    _check_contract(contract, config, vocab, engine_ids, weights_digest(tensors), where=str(folder))

    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, assign=True)
    return Checkpoint(drafter, vocab, contract, engine_ids)


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this shape holds."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    return {**shapes, "d2t": (config.draft_vocab_size,), "t2d": (config.target_vocab_size,)}


def _leaf(name: str, tensor: Tensor) -> str:
    content = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
    return sha256_bytes(
        canonical_json([name, _DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), content])
    )


def _check_contract(
    contract: DrafterContract,
    config: DrafterConfig,
    vocab: VocabMap,
    engine_ids: EngineIds,
    weights_sha256: str,
    *,
    where: str,
) -> None:
    captured = points_of(engine_ids, contract.target.num_layers)
    claims: list[tuple[str, Any, Any]] = [
        ("architecture", contract.architecture, ARCHITECTURE),
        ("number of captured points", len(contract.capture.aux), config.num_slots),
        ("captured points", list(contract.capture.aux), list(captured)),
        ("target hidden size", contract.target.hidden_size, config.target_hidden_size),
        ("target vocabulary", contract.target.vocab_size, config.target_vocab_size),
        ("draft vocabulary", contract.draft_vocab_size, len(vocab)),
        ("draft vocabulary's digest", contract.vocab_map_sha256, vocab.digest()),
        ("norm flags", contract.norm, config.norm),
        ("weights digest", contract.weights_sha256, weights_sha256),
    ]
    for what, claimed, found in claims:
        if claimed != found:
            hint = f" (that is what {engine_ids} captures)" if what == "captured points" else ""
            raise ContractError(f"{where}: the contract says {what} {claimed}, the checkpoint has {found}{hint}")


def _check_header(header: dict[str, tuple[str, tuple[int, ...]]], config: DrafterConfig, *, where: str) -> None:
    expected = expected_shapes(config)
    missing = {name: shape for name, shape in expected.items() if name not in header}
    unexpected = {name: shape for name, (_, shape) in header.items() if name not in expected}
    problems = []
    for name, shape in missing.items():
        twins = [other for other, other_shape in unexpected.items() if other_shape == shape]
        guess = f" (renamed? {', '.join(twins)} has its shape)" if twins else ""
        problems.append(f"missing {name} {list(shape)}{guess}")
    problems += [f"unexpected {name} {list(shape)}" for name, shape in unexpected.items()]
    floats = {dtype for name, (dtype, _) in header.items() if name not in ("d2t", "t2d")}
    for name in expected.keys() & header.keys():
        dtype, shape = header[name]
        if shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, config.json asks for {list(expected[name])}")
        allowed = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, ("F32", "BF16", "F16"))
        if dtype not in allowed:
            problems.append(f"{name} is of type {dtype}, expected {' or '.join(allowed)}")
    if len(floats) > 1:
        problems.append(f"weights of mixed types: {', '.join(sorted(floats))}")
    if problems:
        raise CheckpointError(
            f"{where} does not hold the drafter that config.json describes: {'; '.join(sorted(problems))}. SGLang "
            "would load it without a word; export the checkpoint again"
        )


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
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
        raise _unreadable(path, error) from None
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
        raise _unreadable(path, error) from None
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes is refused")
    return data


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}). "
        f"A checkpoint holds {WEIGHTS_NAME}, {CONFIG_NAME} and {CONTRACT_NAME}"
    )
