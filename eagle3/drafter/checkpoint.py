"""The drafter on disk, in the form of the engine that its layer ids are for: model.safetensors, config.json and
contract.json.

Nothing is written that the contract does not describe, and nothing is loaded whose digest is not the contract's. The
embedding is the target's: it is saved only where somebody asks for it.
"""

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from eagle3.capture import CaptureSpec
from eagle3.contract import CONTRACT_NAME, ContractError, DrafterContract
from eagle3.conventions import EngineIds, points_of
from eagle3.drafter.config import DrafterConfig, DrafterConfigError
from eagle3.drafter.forms import CONTRACT_KEY, Exported, engine_config, read_exported
from eagle3.drafter.model import Drafter
from eagle3.drafter.tensors import (
    EMBEDDING,
    MAPS,
    CheckpointError,
    CheckpointUnreadable,
    check_header,
    checkpoint_tensors,
    disk_names,
    load_drafter,
    parse_object,
    read_header,
    read_limited,
    read_tensors,
    weights_digest,
)
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.refs import DumpRef

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "Checkpoint",
    "CheckpointError",
    "CheckpointUnreadable",
    "checkpoint_tensors",
    "contract_for",
    "load_checkpoint",
    "save_checkpoint",
    "weights_digest",
    "write_checkpoint",
]

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
_CURE = "SGLang would load it without a word; export the checkpoint again"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded drafter and everything that speaks for it."""

    drafter: Drafter
    vocab: VocabMap
    contract: DrafterContract
    engine_ids: EngineIds
    coverage: float | None = None  # share of the training tokens that the draft vocabulary holds; None: not recorded
    embedding: Tensor | None = None  # [V_target, H]; None where it was not saved, as usual


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
        architecture=drafter.config.architecture,
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
    folder: Path,
    drafter: Drafter,
    vocab: VocabMap,
    contract: DrafterContract,
    engine_ids: EngineIds,
    *,
    coverage: float | None = None,
    embedding: Tensor | None = None,
    verifier: str | None = None,
) -> None:
    """Write a new checkpoint folder, whole or not at all, in the form of the engine that `engine_ids` names.

    `coverage`: share of the tokens under the loss mask that the draft vocabulary holds. `embedding` [V_target, H]: the
    target's, only for an engine that does not share it. `verifier`: the target's name or path in speculators' form;
    unset, the contract's. Raises ContractError where the contract does not describe this drafter, this vocabulary or
    what these ids capture; DrafterConfigError where the engine would not run it as it was trained.
    """
    tensors = checkpoint_tensors(drafter, vocab)
    _check_contract(contract, drafter.config, vocab, engine_ids, weights_digest(tensors), where=str(folder))
    write_checkpoint(
        folder,
        drafter,
        vocab,
        engine_ids,
        contract=contract,
        coverage=coverage,
        embedding=embedding,
        verifier=verifier or contract.target.name,
    )


def write_checkpoint(
    folder: Path,
    drafter: Drafter,
    vocab: VocabMap,
    engine_ids: EngineIds,
    *,
    contract: DrafterContract | None = None,
    coverage: float | None = None,
    embedding: Tensor | None = None,
    verifier: str | None = None,
) -> None:
    """`save_checkpoint` for a drafter of somebody else's: without a contract it only serves, nothing proves it."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: a checkpoint is never overwritten; choose another folder")
    config = drafter.config
    if (len(vocab), vocab.target_vocab_size) != (config.draft_vocab_size, config.target_vocab_size):
        raise CheckpointError(
            f"{folder}: a vocabulary map of {len(vocab)} of {vocab.target_vocab_size} tokens for a drafter of "
            f"{config.draft_vocab_size} of {config.target_vocab_size}"
        )
    document = engine_config(
        config,
        engine_ids,
        dtype=str(drafter.fc.weight.dtype).removeprefix("torch."),
        verifier=verifier,
        contract_sha256=contract.digest() if contract else None,
        coverage=coverage,
    )
    tensors = checkpoint_tensors(drafter, vocab)
    on_disk = {name: tensors[key] for key, name in disk_names(config, engine_ids.engine).items()}
    if embedding is not None:
        on_disk[EMBEDDING] = _embedding(embedding, drafter)

    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        save_file(on_disk, partial / WEIGHTS_NAME, metadata={"format": "pt"})
        (partial / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if contract:
            (partial / CONTRACT_NAME).write_bytes(contract.canonical())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint of ours in any form: config, contract, every tensor's name, shape and type,
    vocabulary, digests.

    Raises CheckpointError, DrafterConfigError, VocabMapError or ContractError. Weights keep their saved dtype.
    """
    config_path, contract_path, weights_path = (folder / n for n in (CONFIG_NAME, CONTRACT_NAME, WEIGHTS_NAME))
    raw = parse_object(read_limited(config_path), where=str(config_path))
    exported = read_exported(raw, where=str(config_path))
    contract = DrafterContract.parse(read_limited(contract_path), where=str(contract_path))
    _check_pair(exported, contract, config_path, contract_path)

    config, engine_ids = exported.config, exported.engine_ids
    names = disk_names(config, engine_ids.engine)
    check_header(read_header(weights_path), config, where=str(weights_path), names=names, cure=_CURE)
    found = read_tensors(weights_path)
    tensors = {key: found[name] for key, name in names.items()}
    vocab = (
        VocabMap.from_tensors(tensors["d2t"], tensors["t2d"])
        if MAPS[0] in names
        else VocabMap.whole(config.target_vocab_size)
    )
    tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    _check_contract(contract, config, vocab, engine_ids, weights_digest(tensors), where=str(folder))
    return Checkpoint(
        load_drafter(config, tensors), vocab, contract, engine_ids, exported.coverage, found.get(EMBEDDING)
    )


def _embedding(embedding: Tensor, drafter: Drafter) -> Tensor:
    wanted = (drafter.config.target_vocab_size, drafter.config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise CheckpointError(f"an embedding of {list(embedding.shape)}, the drafter's target has {list(wanted)}")
    return embedding.detach().cpu().to(drafter.fc.weight.dtype).contiguous()


def _check_pair(exported: Exported, contract: DrafterContract, config_path: Path, contract_path: Path) -> None:
    if exported.contract_sha256 is None:
        raise DrafterConfigError(f"{config_path}: the key '{CONTRACT_KEY}' is missing; it is not a checkpoint of ours")
    if contract.digest() != exported.contract_sha256:
        raise ContractError(
            f"{contract_path}: its digest is {contract.digest()}, config.json was exported with "
            f"{exported.contract_sha256}. One of the two files is not the one that was saved: fetch the checkpoint "
            "again"
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
        ("architecture", contract.architecture, config.architecture),
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
