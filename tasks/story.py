"""The story replayed: one drafter on the real server, served as it was trained and then in each wrong way.

Every variant answers the same prompts. What counts of each: acceptance in pairs with the right one, the text, what the
contract check says, and what the delivered tensors themselves say.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.acceptance.definitions import AcceptanceFigure, SpecSettings, summarise
from eagle3.acceptance.paired import PairedDifference, paired_difference
from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds, ids_of
from eagle3.prompts import TokenizedPrompt
from infra.settings import Settings
from infra.sglang.launch import DraftServing, ServerConfig
from tasks.deployed import Seen, examine_server
from tasks.variants import exchanged, with_ids, with_tensors

if TYPE_CHECKING:
    from eagle3.drafter.checkpoint import Checkpoint
    from eagle3.evidence.attribution import Reference
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient

RIGHT, FIX, UP, SWAPPED, OLD = "right ids", "embed lo mid", "every id +1", "slots exchanged", "old rule"
SPEC = SpecSettings.chain(3)
OLD_RULE = "0.5.12"  # the last SGLang in which the DeepSeek family's ids meant the outputs of layers
_SEEN_PROMPTS = 3  # whose delivered states are attributed


@dataclass(frozen=True)
class Variant:
    """A way to serve the drafter."""

    name: str
    folder: Path
    change: str


@dataclass(frozen=True)
class Replayed:
    """A variant and what became of it."""

    variant: Variant
    figure: AcceptanceFigure
    difference: PairedDifference | None  # to the right one, prompt by prompt; None for the right one itself
    same_text: int  # answers that equal plain greedy decoding's, token by token
    seen: Seen


@dataclass(frozen=True)
class Replay:
    """What all variants share: the target, the prompts, and how they are served."""

    target: "Target"
    reference: "Reference"
    prompts: Sequence[TokenizedPrompt]
    max_new_tokens: int
    settings: Settings
    work: Path
    threads: int = 1
    ignore_eos: bool = False

    def plain(self) -> dict[str, tuple[int, ...]]:
        """Plain greedy decoding's answers, by the prompts' ids."""
        with self._server("plain", None) as client:
            answers = self._answers(client)
        return {prompt.id: answer.output_ids for prompt, answer in zip(self.prompts, answers, strict=True)}

    def run(
        self, checkpoint: "Checkpoint", variants: Sequence[Variant], expected: Mapping[str, Sequence[int]]
    ) -> list[Replayed]:
        """One server after the other; the first variant is the one that the others are compared with.

        `expected`: plain greedy decoding's answers, by the prompts' ids.
        """
        replayed: list[Replayed] = []
        for variant in variants:
            answers, seen = self._serve(checkpoint, variant)
            figure = summarise([answer.counts for answer in answers], SPEC)
            baseline = replayed[0].figure.request_lengths if replayed else None
            same = sum(
                tuple(expected[prompt.id]) == answer.output_ids
                for prompt, answer in zip(self.prompts, answers, strict=True)
            )
            difference = paired_difference(figure.request_lengths, baseline) if baseline else None
            replayed.append(Replayed(variant, figure, difference, same, seen))
        return replayed

    def _serve(self, checkpoint: "Checkpoint", variant: Variant) -> "tuple[list[Generated], Seen]":
        from eagle3.drafter.checkpoint import checkpoint_tensors

        name = _slug(variant.name)
        draft = DraftServing(
            path=variant.folder,
            num_steps=SPEC.num_steps,
            top_k=SPEC.top_k,
            num_draft_tokens=SPEC.num_draft_tokens,
            staging=self.work / f"tap-{name}",
        )
        with self._server(name, draft) as client:
            answers = self._answers(client)
            seen = examine_server(
                client,
                checkpoint.contract,
                self.target,
                staging=self.work / f"tap-{name}",
                prompts=self.prompts[:_SEEN_PROMPTS],
                reference=self.reference,
                original=checkpoint_tensors(checkpoint.drafter, checkpoint.vocab),
            )
        return answers, seen

    @contextmanager
    def _server(self, name: str, draft: DraftServing | None) -> "Iterator[SglangClient]":
        from infra.sglang.server import start_server

        config = ServerConfig(
            target=self.target.path,
            dtype="float32",  # only there is the text of drafting the very text of plain decoding
            threads=self.threads,
            draft=draft,
            max_running_requests=len(self.prompts),
        )
        with start_server(config, settings=self.settings, log_path=self.work / f"{name}.log") as server:
            yield server.client

    def _answers(self, client: "SglangClient") -> "list[Generated]":
        from infra.sglang.client import GenerateRequest

        requests = [
            GenerateRequest(
                rid=f"story-{number:06d}",
                input_ids=prompt.input_ids,
                max_new_tokens=self.max_new_tokens,
                ignore_eos=self.ignore_eos,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        return client.generate_many(requests, streams=len(requests))


def story(drafter: Path, checkpoint: "Checkpoint", target: "Target", work: Path, version: str) -> list[Variant]:
    """The drafter as it was trained, the wrong "fix", every id one too high, and two slots exchanged.

    For a target whose ids meant something else in SGLang 0.5.12, that list too. `version` is of the SGLang that serves.
    """
    from eagle3.drafter.checkpoint import checkpoint_tensors

    points = checkpoint.contract.capture.aux

    def ids(wanted: Sequence[CapturePoint], release: str = version) -> EngineIds:
        return ids_of(
            wanted, engine="sglang", version=release, model_class=target.model_class, num_layers=target.num_layers
        )

    def served(name: str, wrong: EngineIds, why: str = "") -> Variant:
        return Variant(name, with_ids(drafter, work / _slug(name), wrong.ids), f"ids {list(wrong.ids)}{why}")

    right, old = ids(points), ids(points, OLD_RULE)
    tensors = exchanged(checkpoint_tensors(checkpoint.drafter, checkpoint.vocab), len(points), -2, -1)
    variants = [
        Variant(RIGHT, drafter, f"ids {list(right.ids)}"),
        served(FIX, ids((CapturePoint("embed"), *points[:-1]))),
        served(UP, right.model_copy(update={"ids": tuple(i + 1 for i in right.ids)})),
        Variant(
            SWAPPED,
            with_tensors(drafter, work / _slug(SWAPPED), tensors),
            f"ids {list(right.ids)}, the last two column blocks of fc.weight exchanged",
        ),
    ]
    if old.ids != right.ids:
        variants.append(served(OLD, old, f", right for SGLang {OLD_RULE} and older"))
    return variants


def markdown(replayed: Sequence[Replayed]) -> str:
    """The figures as a table, then what was said of each variant."""
    heads = ("served", "acceptance length", "rate", "paired difference [95%]", "lower on", "same text", "delivered")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in replayed:
        figure, difference = row.figure, row.difference
        cells = (
            f"**{row.variant.name}**: {row.variant.change}",
            f"{figure.length:.2f} ± {figure.length_standard_error or 0:.2f}",
            f"{figure.rate:.1%}",
            str(difference) if difference else "-",
            f"{difference.lower_on} of {difference.num_pairs}" if difference else "-",
            f"{row.same_text} of {len(figure.request_lengths)}",
            ", ".join(row.seen.delivered()),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(line for row in replayed for line in _said(row)), ""])


def _said(row: Replayed) -> list[str]:
    attribution = row.seen.attribution
    causes = " ".join(attribution.causes) if attribution else ""
    proven = attribution and attribution.verdict == "proven"
    tensors = "every slot is what the contract says." if proven else " ".join((*row.seen.refutations(), causes))
    return [
        f"- **{row.variant.name}**",
        f"  - contract check: {' '.join(map(str, row.seen.findings)) or 'nothing to find.'}",
        f"  - tensors: {tensors}",
    ]


def _slug(name: str) -> str:
    return name.replace(" ", "-").replace("+", "plus-")
