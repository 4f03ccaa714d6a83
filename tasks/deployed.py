"""A running server against the contract of its drafter: what it says, what its files say, what its tensors say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.capture import CapturePoint
from eagle3.contract import DrafterContract
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from eagle3.audit import Deployment, Finding
    from eagle3.dump.slots import SlotSample
    from eagle3.evidence.attribution import Attribution, Reference
    from eagle3.target import Target
    from infra.sglang.client import SglangClient
    from infra.sglang.staging import LiveModel

FINAL = "final"
_MOST_TOKENS = 128  # of a prompt that is read for its states: the reference computes every boundary of each


class NoDeployment(Eagle3Error):
    """A server whose drafter or whose states cannot be had."""


@dataclass(frozen=True)
class Seen:
    """What a server really runs, and how it differs from the contract."""

    deployment: "Deployment"
    findings: "tuple[Finding, ...]"
    attribution: "Attribution | None"  # None where there was nothing to attribute, or nothing to compare with

    def delivered(self) -> tuple[str, ...]:
        """What the slots of the drafter hold by the tensors' own word, in order."""
        slots = self.attribution.slots if self.attribution else ()
        return tuple(str(slot.found) for slot in slots if slot.label != FINAL)

    def refuted(self) -> bool:
        """Whether the tensors themselves contradict the contract."""
        return self.attribution is not None and self.attribution.verdict == "refuted"

    def refutations(self) -> tuple[str, ...]:
        """A sentence for each slot whose tensors contradict the contract."""
        slots = self.attribution.slots if self.attribution else ()
        return tuple(slot.sentence for slot in slots if slot.verdict == "refuted")


def examine_server(
    client: "SglangClient",
    contract: DrafterContract,
    target: "Target",
    *,
    staging: Path,
    prompts: Sequence[TokenizedPrompt],
    reference: "Reference | None",
    original: "Mapping[str, torch.Tensor] | None" = None,
) -> Seen:
    """Audit a drafting server of this machine, and attribute the states of a few prompts that it delivers meanwhile.

    A prompt is read, and one token generated. Without the tap (`DraftServing.staging`), prompts or a reference nothing
    is attributed. `original` are the tensors that the contract speaks for, where they are at hand.
    Raises NoDeployment where the server drafts nothing, or its states cannot be captured.
    """
    from eagle3.audit import Deployment, audit
    from eagle3.drafter.served import read_served
    from eagle3.evidence.attribution import attribute

    info = client.server_info()
    if not info.speculative_draft_model_path:
        raise NoDeployment(f"the server at {client.url} has no drafter: there is nothing to compare with the contract")
    live = _live(staging)
    deployment = Deployment(
        version=info.version,
        target=target.identity(),
        drafter=read_served(Path(info.speculative_draft_model_path)),
        algorithm=info.speculative_algorithm,
        layers_to_capture=live.layers_to_capture if live else None,
    )
    attribution = None
    if live and prompts and reference:
        samples = _delivered_rows(client, live, staging, prompts)
        claims = _claims(contract, live)
        attribution = attribute(samples, claims, reference, dtype=live.dtype, model_class=target.model_class)
    return Seen(deployment, audit(contract, deployment, original=original), attribution)


def reference_here(target: "Target") -> "Reference | None":
    """The target itself as the reference of attributions; None where this machine cannot compute it."""
    from eagle3.target.files import TargetError
    from tasks.references import NoReference, load_target

    try:
        return load_target(target)
    except (NoReference, TargetError):
        return None


def _live(staging: Path) -> "LiveModel | None":
    """The tap's record; None where this SGLang has no tap, or one that does not fit: its ids are read by the book."""
    from infra.sglang.staging import StagingError, read_live

    try:
        return read_live(staging)
    except StagingError:
        return None


def _claims(contract: DrafterContract, live: "LiveModel") -> dict[str, CapturePoint | None]:
    """What each delivered slot should hold; a slot more than the contract has claims nothing."""
    wanted = contract.capture.aux
    slots = range(len(live.layers_to_capture))
    return {_slot(i): wanted[i] if i < len(wanted) else None for i in slots} | {FINAL: contract.capture.final}


def _delivered_rows(
    client: "SglangClient", live: "LiveModel", staging: Path, prompts: Sequence[TokenizedPrompt]
) -> "list[SlotSample]":
    """The states that the target hands to its drafter while it reads these prompts."""
    from eagle3.dump.slots import SlotSample
    from infra.sglang.client import GenerateRequest
    from infra.sglang.staging import clear, read_staged, staged_path, why_missing

    requests = [
        GenerateRequest(rid=f"seen-{number:06d}", input_ids=prompt.input_ids[:_MOST_TOKENS], max_new_tokens=1, tap=True)
        for number, prompt in enumerate(prompts)
    ]
    client.generate_many(requests, streams=1)
    samples = []
    for request, prompt in zip(requests, prompts, strict=True):
        path = staged_path(staging, request.rid)
        if not path.exists():
            raise NoDeployment(f"the server's states were not captured: {why_missing(staging, request.rid)}")
        rows = read_staged(path, num_slots=len(live.layers_to_capture), hidden_size=live.hidden_size)
        states = {_slot(i): slot for i, slot in enumerate(rows.aux)} | {FINAL: rows.final}
        samples.append(SlotSample(id=prompt.id, input_ids=rows.input_ids, states=states))
        clear(staging, request.rid)
    return samples


def _slot(index: int) -> str:
    return f"slot {index + 1}"
