"""The contract check: what a drafter was trained for against what a server really runs. A pure function.

Each finding is one line: what is wrong, and which value mends it. The contract speaks canonical names; the server's
integers are read by the convention of **its** engine, version and model class, or off its live model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.contract import DrafterContract
from eagle3.conventions import ConventionError, EngineIds, default_points_of, ids_of, points_of
from eagle3.conventions.sglang import live_points
from eagle3.conventions.slips import explain
from eagle3.drafter.served import ServedDrafter
from eagle3.drafter.vocab import VocabMap, VocabMapError
from eagle3.dump.manifest import TargetIdentity

IDS_KEY = "eagle_config.eagle_aux_hidden_state_layer_ids"
ALGORITHM = "EAGLE3"
_MOST_SLOTS = 6  # of a drafter whose exchanged column blocks are looked for: 720 orders

Subject = Literal["target", "algorithm", "layers", "width", "weights", "vocabulary", "norm"]


@dataclass(frozen=True)
class Deployment:
    """What a server runs, asked of the server, its drafter's files and its live model."""

    version: str
    target: TargetIdentity
    drafter: ServedDrafter
    algorithm: str | None
    """Of speculative decoding, as the server says; None where it drafts nothing."""
    layers_to_capture: tuple[int, ...] | None = None
    """Boundaries, as the live model holds them (the tap's record); None where nobody looked."""
    engine: str = "sglang"


class Finding(BaseModel):
    """One thing that is not as the contract has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Subject
    wrong: str = Field(description="What the server runs, and what the contract wants")
    cure: str = Field(description="The value that mends it")
    causes: tuple[str, ...] = Field(default=(), description="What explains it, the likeliest first")

    def __str__(self) -> str:
        return " ".join((self.wrong, *self.causes[:1], self.cure))


def audit(
    contract: DrafterContract, deployment: Deployment, *, original: Mapping[str, Tensor] | None = None
) -> tuple[Finding, ...]:
    """Every difference between the contract and the deployment, the gravest first; empty where there is none.

    `original`: the named tensors that the contract speaks for, where they are at hand. With them a finding on the
    weights says which tensors were changed, and whether the slots of `fc` were exchanged.
    """
    checks = (
        _target(contract, deployment),
        _algorithm(contract, deployment),
        _layers(contract, deployment),
        _width(contract, deployment),
        _vocabulary(contract, deployment),
        _weights(contract, deployment, original),
        _norm(contract, deployment),
    )
    return tuple(finding for finding in checks if finding)


def delivered(deployment: Deployment) -> tuple[CapturePoint, ...]:
    """The points that this server hands to its drafter, in order. The live model's list counts more than the ids.

    ConventionError where they are not known, or where the engine would deliver fewer states than it was asked for.
    """
    target, ids = deployment.target, deployment.drafter.ids
    if deployment.layers_to_capture is not None:
        return live_points(
            deployment.layers_to_capture,
            target.num_layers,
            model_class=target.model_class,
            version=deployment.version,
        )
    engine, version, model_class = deployment.engine, deployment.version, target.model_class
    if ids is None:
        return default_points_of(engine=engine, version=version, model_class=model_class, num_layers=target.num_layers)
    return points_of(EngineIds(engine=engine, version=version, model_class=model_class, ids=ids), target.num_layers)


def _target(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    expected, found = (
        identity.model_dump(exclude={"name", "revision"}) for identity in (contract.target, deployment.target)
    )
    differ = [field for field, value in expected.items() if found[field] != value]
    if not differ:
        return None
    told = ", ".join(f"{field} {str(found[field])[:16]} instead of {str(expected[field])[:16]}" for field in differ)
    return Finding(
        subject="target",
        wrong=f"The server runs another target than {contract.target.name}, for which the drafter was trained: {told}.",
        cure=f"Serve {contract.target.name} with these digests, or train a drafter for the target that is served.",
    )


def _algorithm(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    if deployment.algorithm == ALGORITHM:
        return None
    cure = f"Start the server with --speculative-algorithm {ALGORITHM}."
    if deployment.algorithm is None:
        return Finding(subject="algorithm", wrong="The server drafts nothing: speculative decoding is off.", cure=cure)
    width, slots = contract.target.hidden_size, len(contract.capture.aux)
    wrong = f"The server runs the algorithm {deployment.algorithm}, the drafter is an {ALGORITHM} drafter"
    if deployment.algorithm == "EAGLE":
        wrong += (
            f": it gets the final state of {width} values instead of {slots} captured states ({slots * width}), fc is "
            "skipped without a word, and the acceptance length is about 1.00"
        )
    return Finding(subject="algorithm", wrong=f"{wrong}.", cure=cure)


def _layers(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    wanted, ids = contract.capture.aux, deployment.drafter.ids
    names = ", ".join(wanted)
    asked = f"ids {list(ids)} in config.json" if ids is not None else f"no {IDS_KEY} in config.json"
    cure = _cure(contract, deployment)
    try:
        found = delivered(deployment)
    except ConventionError as error:
        return Finding(
            subject="layers", wrong=f"The drafter wants {names}; what the server delivers: {error}.", cure=cure
        )
    if ids is None:
        right = "" if found != wanted else " These happen to be the right ones here, and need not be elsewhere."
        return Finding(
            subject="layers",
            wrong=f"The drafter's config.json names no {IDS_KEY}, so {deployment.engine} falls back to its default "
            f"list and delivers {', '.join(found)}; the drafter was trained on {names}.{right}",
            cure=cure,
        )
    if found == wanted:
        return None
    return Finding(
        subject="layers",
        wrong=f"The server delivers {', '.join(found)} ({asked}); the drafter was trained on {names}.",
        cure=cure,
        causes=explain(
            contract.capture.aux,
            found,
            num_layers=deployment.target.num_layers,
            model_class=deployment.target.model_class,
            ids=ids,
        ),
    )


def _cure(contract: DrafterContract, deployment: Deployment) -> str:
    try:
        right = ids_of(
            contract.capture.aux,
            engine=deployment.engine,
            version=deployment.version,
            model_class=deployment.target.model_class,
            num_layers=deployment.target.num_layers,
        )
    except ConventionError as error:
        return f"Its ids there are not known ({error})"
    return (
        f"Right for {deployment.engine} {deployment.version} on {deployment.target.model_class}: {IDS_KEY} "
        f"{list(right.ids)}."
    )


def _width(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    fc = deployment.drafter.tensors.get("fc.weight")
    wanted = len(contract.capture.aux) * contract.target.hidden_size
    if fc is not None and fc.dim() == 2 and fc.shape[1] == wanted:
        return None
    shown = f"takes {fc.shape[-1]} values" if fc is not None else "is missing"
    return Finding(
        subject="width",
        wrong=f"fc.weight of the served drafter {shown}; {len(contract.capture.aux)} slots of "
        f"{contract.target.hidden_size} are {wanted}.",
        cure="Deploy the files of the registered checkpoint.",
    )


def _vocabulary(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    tensors = deployment.drafter.tensors
    cure = "Deploy the d2t and t2d of the registered checkpoint."
    missing = [name for name in ("d2t", "t2d") if name not in tensors]
    if missing:
        if contract.draft_vocab_size == contract.target.vocab_size and missing == ["d2t", "t2d"]:
            return None  # without a map draft ids are target ids, and here they are
        return Finding(
            subject="vocabulary",
            wrong=f"The served drafter has no {' and no '.join(missing)}: draft ids would be taken for target ids, but "
            f"its {contract.draft_vocab_size} draft tokens are a choice of {contract.target.vocab_size}.",
            cure=cure,
        )
    try:
        served = VocabMap.from_tensors(tensors["d2t"], tensors["t2d"])
    except VocabMapError as error:
        return Finding(subject="vocabulary", wrong=f"The draft vocabulary's map is wrong: {error}.", cure=cure)
    if served.digest() == contract.vocab_map_sha256:
        return None
    return Finding(
        subject="vocabulary",
        wrong=f"The served drafter proposes {len(served)} other tokens than the {contract.draft_vocab_size} that it "
        "was trained to propose (the map's digest differs).",
        cure=cure,
    )


def _weights(
    contract: DrafterContract, deployment: Deployment, original: Mapping[str, Tensor] | None
) -> Finding | None:
    served = deployment.drafter.weights_sha256()
    if served == contract.weights_sha256:
        return None
    wrong = (
        f"The served weights are not those of the contract (digest {served[:16]}, not {contract.weights_sha256[:16]})"
    )
    causes: tuple[str, ...] = ()
    if original is not None:
        wrong += f": {_changed(deployment.drafter.tensors, original)}"
        causes = _exchanged(deployment.drafter.tensors, original, contract)
    cure = "Deploy model.safetensors of the registered checkpoint."
    return Finding(subject="weights", wrong=f"{wrong}.", cure=cure, causes=causes)


def _changed(served: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> str:
    groups = {
        "changed": [n for n in original if n in served and not _same(original[n], served[n])],
        "missing": [n for n in original if n not in served],
        "added": [n for n in served if n not in original],
    }
    return "; ".join(f"{what} {', '.join(sorted(names)[:4])}" for what, names in groups.items() if names)


def _exchanged(
    served: Mapping[str, Tensor], original: Mapping[str, Tensor], contract: DrafterContract
) -> tuple[str, ...]:
    """Whether fc's column blocks, one a slot, are the original's in another order."""
    ours, theirs, slots = original.get("fc.weight"), served.get("fc.weight"), len(contract.capture.aux)
    if ours is None or theirs is None or ours.shape != theirs.shape or slots > _MOST_SLOTS:
        return ()
    blocks, found = ours.chunk(slots, dim=1), theirs.chunk(slots, dim=1)
    for order in permutations(range(slots)):
        if order != tuple(range(slots)) and all(
            _same(blocks[source], found[place]) for place, source in enumerate(order)
        ):
            read = ", ".join(contract.capture.aux[source] for source in order)
            return (
                f"The column blocks of fc.weight are exchanged: it reads its slots as {read}, and gets "
                f"{', '.join(contract.capture.aux)}.",
            )
    return ()


def _norm(contract: DrafterContract, deployment: Deployment) -> Finding | None:
    expected, found = contract.norm.model_dump(), deployment.drafter.norm.model_dump()
    differ = [f"{flag} {found[flag]} instead of {value}" for flag, value in expected.items() if found[flag] != value]
    if not differ:
        return None
    return Finding(
        subject="norm",
        wrong=f"The drafter is served with other norm flags than it was trained with: {', '.join(differ)}.",
        cure="Set them in its config.json to "
        + ", ".join(f"{flag} {value}" for flag, value in expected.items() if found[flag] != value)
        + ".",
    )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())
