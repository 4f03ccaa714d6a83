"""What a drafter's folder holds, and what sets two apart: pure functions over opened drafters."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eagle3.contract import DrafterContract, NormFlags
from eagle3.drafter.opening import OpenedDrafter
from eagle3.drafter.tensors import checkpoint_tensors, weights_digest

_NOT_WEIGHTS = ("d2t", "t2d")


class DrafterDescription(BaseModel):
    """A drafter in figures. What somebody else's file does not say is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    dtype: str
    points: tuple[str, ...] = Field(description="The slots of fc, in order; empty where nobody named their convention")
    num_slots: int
    parameters: int
    bytes: int = Field(description="Of the parameters, without an embedding")
    shape: dict[str, int | float | str | dict[str, float | int | str] | None]
    norm: NormFlags
    draft_vocab_size: int
    target_vocab_size: int
    coverage: float | None = Field(description="Share of the training tokens that the draft vocabulary holds")
    embedding: bool = Field(description="Whether the file brings an embedding of its own")
    weights_sha256: str = Field(description="Merkle digest of the named tensors, the same in every form")
    contract_sha256: str | None
    target: str | None
    dump: str | None
    report_sha256: str | None
    tensors: dict[str, tuple[int, ...]]
    notes: tuple[str, ...]


def describe(opened: OpenedDrafter) -> DrafterDescription:
    """Everything that a person or a script may want to know of a drafter."""
    config, contract = opened.drafter.config, opened.contract
    tensors = checkpoint_tensors(opened.drafter, opened.vocab)
    weights = [tensor for name, tensor in tensors.items() if name not in _NOT_WEIGHTS]
    return DrafterDescription(
        architecture=config.architecture,
        dtype=str(opened.drafter.fc.weight.dtype).removeprefix("torch."),
        points=tuple(opened.points),
        num_slots=config.num_slots,
        parameters=sum(tensor.numel() for tensor in weights),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights),
        shape=config.model_dump(mode="json", exclude={"norm", "draft_vocab_size", "target_vocab_size", "num_slots"}),
        norm=config.norm,
        draft_vocab_size=len(opened.vocab),
        target_vocab_size=opened.vocab.target_vocab_size,
        coverage=opened.coverage,
        embedding=opened.embedding is not None,
        weights_sha256=weights_digest(tensors),
        contract_sha256=contract.digest() if contract else None,
        target=contract.target.name if contract else None,
        dump=contract.dump_uri if contract else None,
        report_sha256=contract.report_sha256 if contract else None,
        tensors={name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())},
        notes=(*opened.notes, *_stale(contract)),
    )


class Difference(BaseModel):
    """One thing in which two drafters differ."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Literal["shape", "norm", "points", "vocabulary", "tensor", "contract"]
    name: str
    sentence: str
    relative: float | None = Field(None, description="Of a tensor: ||a - b|| / ||a||")


@dataclass(frozen=True)
class Diff:
    """Every difference, what decides how a drafter runs first. The same drafter in two forms has none."""

    differences: tuple[Difference, ...]
    equal_tensors: int

    @property
    def same(self) -> bool:
        return not self.differences


def _stale(contract: DrafterContract | None) -> tuple[str, ...]:
    """What to say of a contract that rests on a report of other checks or thresholds than today's."""
    if contract is None:
        return ()
    from eagle3.evidence.standing import contract_standing

    found = contract_standing(contract)
    return () if found.current else (f"its evidence is stale: {found.reason}",)


def diff(a: OpenedDrafter, b: OpenedDrafter) -> Diff:
    """What sets two drafters apart; the form on disk, an embedding and recorded coverage do not."""
    found = [*_shape(a, b), *_points(a, b), *_vocabulary(a, b)]
    ours, theirs = (checkpoint_tensors(one.drafter, one.vocab) for one in (a, b))
    tensors = [_tensor(name, ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())]
    found += [difference for difference in tensors if difference]
    found += _contract(a, b)
    return Diff(tuple(found), equal_tensors=sum(difference is None for difference in tensors))


def _shape(a: OpenedDrafter, b: OpenedDrafter) -> list[Difference]:
    found = []
    if a.drafter.config.architecture != b.drafter.config.architecture:
        sentence = f"{a.drafter.config.architecture} against {b.drafter.config.architecture}"
        found.append(Difference(subject="shape", name="architecture", sentence=sentence))
    ours, theirs = a.drafter.config.model_dump(), b.drafter.config.model_dump()
    norms = ours.pop("norm"), theirs.pop("norm")
    for subject, one, other in (("norm", *norms), ("shape", ours, theirs)):
        for key in one.keys() | other.keys():
            if one.get(key) != other.get(key):
                sentence = f"{one.get(key)} against {other.get(key)}"
                found.append(Difference.model_validate({"subject": subject, "name": key, "sentence": sentence}))
    return sorted(found, key=lambda difference: (difference.subject, difference.name))


def _points(a: OpenedDrafter, b: OpenedDrafter) -> list[Difference]:
    if a.points == b.points:
        return []
    said = [", ".join(one.points) or "not known" for one in (a, b)]
    return [Difference(subject="points", name="capture points", sentence=f"{said[0]} against {said[1]}")]


def _vocabulary(a: OpenedDrafter, b: OpenedDrafter) -> list[Difference]:
    if a.vocab.digest() == b.vocab.digest():
        return []
    shared = int(torch.isin(a.vocab.target_ids, b.vocab.target_ids).sum())
    sentence = f"{len(a.vocab)} tokens against {len(b.vocab)}, {shared} in both"
    return [Difference(subject="vocabulary", name="draft vocabulary", sentence=sentence)]


def _tensor(name: str, ours: Tensor | None, theirs: Tensor | None) -> Difference | None:
    if ours is None or theirs is None:
        sentence = "only in the first" if theirs is None else "only in the second"
        return Difference(subject="tensor", name=name, sentence=sentence)
    if ours.shape != theirs.shape:
        sentence = f"{list(ours.shape)} against {list(theirs.shape)}"
        return Difference(subject="tensor", name=name, sentence=sentence)
    if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
        return None
    kinds = [str(t.dtype).removeprefix("torch.") for t in (ours, theirs)]
    away = (ours.double() - theirs.double()).norm() / ours.double().norm().clamp_min(1e-300)
    changed = float((ours.double() != theirs.double()).double().mean())
    sentence = f"{changed:.1%} of the values differ, by {float(away):.2g} of the tensor's norm"
    if kinds[0] != kinds[1]:
        sentence = f"{kinds[0]} against {kinds[1]}; {sentence}"
    return Difference(subject="tensor", name=name, sentence=sentence, relative=float(away))


def _contract(a: OpenedDrafter, b: OpenedDrafter) -> list[Difference]:
    if a.contract == b.contract:
        return []
    if a.contract is None or b.contract is None:
        has = "second" if a.contract is None else "first"
        return [Difference(subject="contract", name="contract", sentence=f"only the {has} has one")]
    ours, theirs = a.contract.model_dump(mode="json"), b.contract.model_dump(mode="json")
    keys = [key for key in ours if ours[key] != theirs[key]]
    return [Difference(subject="contract", name="contract", sentence=f"other {', '.join(keys)}")]
