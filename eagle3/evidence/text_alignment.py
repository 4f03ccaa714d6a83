"""Tokens against rows where there is no greedy answer: sampled answers, prompts, and other people's dumps."""

from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch

from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.dump.slots import SlotSample
from eagle3.evidence.alignment import MAX_ROWS, FinalState, final_obstacle, share_of_rows
from eagle3.evidence.examination import spread
from eagle3.evidence.head import FinalStateParts, obstacle
from eagle3.evidence.report import Check, OffsetAgreement, Verdict
from eagle3.evidence.text import DRAWN_EXCESS, OFFSETS, RATIO, Judgement, TextRows

PROMPT_ROWS = 512
"""Rows of prompts to judge of the whole dump; a dump of many samples gets more, `ROWS_PER_SAMPLE` of each."""
ROWS_PER_SAMPLE = 8
"""At least so many rows of every sample are looked at: enough for a shift of the dump. Which sample's prompt belongs to
which rows shows from about 16 rows on (chat prompts begin alike), so in dumps of up to 32 samples; answers tell it in
dumps of any size (`final_state`)."""
FOREIGN_ROWS, FOREIGN_SAMPLES = 64, 64
"""Rows of each sample, and samples, of a dump that is not ours."""


class AnswersExamination(Protocol):
    """Whether answers belong to their rows, for greedy and for sampled ones."""

    def see(self, sample: Sample) -> None: ...

    def conclude(self) -> list[Check]: ...

    def offsets(self) -> tuple[OffsetAgreement, ...]: ...


def examine_answers(manifest: Manifest, parts: FinalStateParts, *, answer_tokens: int) -> AnswersExamination:
    """`final_state`, as the answers came about: token for token where they are greedy, by likelihood where they were
    sampled or given."""
    if manifest.generation.source == "given":
        return GivenText(manifest, parts, answer_tokens=answer_tokens)
    if manifest.generation.temperature > 0:
        return SampledAnswers(manifest, parts, answer_tokens=answer_tokens)
    return FinalState(manifest, parts, answer_tokens=answer_tokens)


class SampledAnswers:
    """`final_state` of answers that were sampled: the tokens must be as likely as the rows themselves expect.

    A token that is drawn from a row's distribution costs -log p, on average exactly the row's entropy. Rows that are
    shifted, foreign or of another state cost more, by nats.
    """

    def __init__(self, manifest: Manifest, parts: FinalStateParts, *, answer_tokens: int) -> None:
        self._temperature = manifest.generation.temperature
        self._judged = _Judged(manifest, parts, answer_tokens, MAX_ROWS, drawn_at=self._temperature)

    def see(self, sample: Sample) -> None:
        record = sample.record
        self._judged.see(sample, torch.arange(record.prompt_tokens - 1, record.rows), first=record.prompt_tokens)

    def offsets(self) -> tuple[OffsetAgreement, ...]:
        return _offsets(self._judged.judgement)

    def conclude(self) -> list[Check]:
        found = self._judged.judgement
        verdict, sentence = self._sentence(found)
        threshold = f"-log p at most {DRAWN_EXCESS:g} nats above the rows' entropy at offset 0, and less than at others"
        return [
            Check(
                name="final_state",
                verdict=verdict,
                value=_measured(found, self._judged.obstacle),
                threshold=threshold,
                sentence=sentence,
            )
        ]

    def _sentence(self, found: Judgement) -> tuple[Verdict, str]:
        how = f"The answers were sampled at temperature {self._temperature:g}"
        if self._judged.obstacle:
            return "fail", f"The final state could not be judged: {self._judged.obstacle}."
        if found.outcome == "shifted":
            return "fail", shifted(found)
        if 0 < 2 * found.foreign.count < self._judged.samples:
            return "fail", (
                f"The final state does not expect the answer in {found.foreign}. These samples hold the rows of "
                "another request, or shifted ones: do not extract with speculative decoding on, look at the engine's "
                "batching, and extract them again."
            )
        if found.outcome == "unlike":
            return "fail", (
                f"{how}, but not from what these rows predict: a token costs {_cost(found):.2f} nats where the rows "
                f"expect {found.entropy:.2f}, and no other offset fits. The final state is another layer's output than "
                "the last, or its norm was left out or applied twice, or head and norm are not of the checkpoint that "
                "served, or the temperature was another one. Check the target's revision, the capture and the "
                "sampling, and extract again."
            )
        if found.outcome == "undecided":
            return "warn", (
                f"{how} and cannot be decided: no offset stands out in {found.rows} rows that could tell. Extract at a "
                "lower temperature, with longer answers or with other prompts."
            )
        return "pass", f"{how}, and they are as likely as their rows expect, at offset 0 and at no other."


class GivenText:
    """`final_state` of answers that somebody else gave: they must be cheaper at offset 0 than at any other.

    The target need not agree with them, so nothing is said where it does not predict them at all.
    """

    def __init__(self, manifest: Manifest, parts: FinalStateParts, *, answer_tokens: int) -> None:
        self._judged = _Judged(manifest, parts, answer_tokens, MAX_ROWS)

    def see(self, sample: Sample) -> None:
        rows = [torch.arange(start - 1, end - 1) for start, end in sample.record.answer_spans]
        self._judged.see(sample, torch.cat(rows))

    def offsets(self) -> tuple[OffsetAgreement, ...]:
        return _offsets(self._judged.judgement)

    def conclude(self) -> list[Check]:
        found = self._judged.judgement
        if self._judged.obstacle:
            verdict, sentence = "fail", f"The final state could not be judged: {self._judged.obstacle}."
        else:
            verdict, sentence = text_sentence(
                found, "given answers", undecided="warn", rest="Attribution and the probe decide."
            )
        return [
            Check(
                name="final_state",
                verdict=verdict,
                value=_measured(found, self._judged.obstacle),
                threshold=f"where answers are predictable: -log p at offset 0 at most {RATIO:.0%} of any other's",
                sentence=sentence,
            )
        ]


class PromptRows:
    """`prompt_rows`: the rows of the prompts against the prompts' own tokens, which the target only reads.

    Text that the target predicts shows a shift, and rows that two prompts exchanged. Text that it does not predict
    (random ids, numbers) shows nothing: then the answers' rows alone decide, and this passes and says so.
    """

    def __init__(self, manifest: Manifest, parts: FinalStateParts, *, prompt_tokens: int) -> None:
        self._judged = _Judged(manifest, parts, prompt_tokens, PROMPT_ROWS)

    def see(self, sample: Sample) -> None:
        self._judged.see(sample, torch.arange(sample.record.prompt_tokens - 1))

    def conclude(self) -> list[Check]:
        found = self._judged.judgement
        verdict, sentence = self._sentence(found)
        return [
            Check(
                name="prompt_rows",
                verdict=verdict,
                value=_measured(found, self._judged.obstacle),
                threshold=f"where prompts are predictable: -log p at offset 0 at most {RATIO:.0%} of any other's",
                sentence=sentence,
            )
        ]

    def _sentence(self, found: Judgement) -> tuple[Verdict, str]:
        if self._judged.obstacle:
            return "fail", f"The prompts' rows could not be judged: {self._judged.obstacle}."
        return text_sentence(found, "prompts", undecided="pass", rest="The rows of the answers decide (final_state).")


def judge_alignment(samples: Iterable[SlotSample], label: str, parts: FinalStateParts, *, normed: bool) -> Check:
    """`alignment` of anybody's dump: its final state against its own token ids, whoever wrote the text.

    `label` names the slot with the final state, `normed` says whether it is after the final norm (attribution tells).
    Reads up to `FOREIGN_SAMPLES` samples. Fails where rows are shifted or exchanged, warns where nothing is decided.
    """
    vocab_size = parts.head.shape[0]
    rows, why = TextRows(parts, vocab_size, normed=normed), ""
    for sample in islice(samples, FOREIGN_SAMPLES):
        state = sample.states[label]
        if why := obstacle(parts, vocab_size=vocab_size, hidden_size=state.shape[-1]):
            break
        rows.add(sample.id, state, sample.input_ids, spread(0, len(state), FOREIGN_ROWS))
    found = rows.judge()
    verdict, sentence = text_sentence(found, "samples", undecided="warn", rest="Attribution decides.")
    if why:
        verdict, sentence = "warn", f"Whether rows and tokens belong together was not judged: {why}."
    threshold = f"-log p at offset 0 at most {RATIO:.0%} of any other's"
    return Check(name="alignment", verdict=verdict, value=_measured(found, why), threshold=threshold, sentence=sentence)


def text_sentence(found: Judgement, what: str, *, undecided: Verdict, rest: str) -> tuple[Verdict, str]:
    """Verdict and sentence on text that somebody wrote; `rest` says what decides where this does not."""
    if found.outcome == "shifted":
        return "fail", shifted(found)
    if found.foreign.count:
        return "fail", (
            f"Rows were exchanged in {found.foreign}: two requests got each other's. Do not extract with speculative "
            "decoding on, look at the engine's batching, and extract them again."
        )
    if found.outcome == "undecided":
        return undecided, (
            f"Cannot be decided: the target does not predict the text of these {what} well enough for an offset to "
            f"stand out ({found.rows} rows that could tell). {rest}"
        )
    if found.unpredicted.count:
        return undecided, f"The {what} fit their rows at offset 0, except {found.unpredicted}: not predictable. {rest}"
    return "pass", f"The {what} fit their rows at offset 0 and at no other."


def shifted(found: Judgement) -> str:
    """The sentence on rows that fit the tokens at another offset."""
    late = "late" if found.offset < 0 else "early"
    return (
        f"The final states fit the tokens at offset {found.offset:+d} ({_cost(found, found.offset):.2f} nats a token) "
        f"and not at 0 ({_cost(found):.2f}): rows are {late} by {abs(found.offset)} against the token ids. Look at "
        "where the capture cuts prompt, answer and first row, and extract again: a drafter would learn the wrong token."
    )


class _Judged:
    """Evenly spread rows of a part of every sample."""

    def __init__(
        self, manifest: Manifest, parts: FinalStateParts, tokens: int, most: int, drawn_at: float | None = None
    ) -> None:
        self._point, self.obstacle = manifest.spec.final, final_obstacle(manifest, parts)
        self._tokens, self._most, self.samples = tokens, most, 0
        self._rows = TextRows(parts, manifest.target.vocab_size, normed=self._point == "norm", drawn_at=drawn_at)

    def see(self, sample: Sample, rows: torch.Tensor, *, first: int = 0) -> None:
        """rows: [n], in order."""
        count = len(rows)
        if self.obstacle or not count or rows[-1] >= len(sample.input_ids):  # missing rows: `completeness` says so
            return
        rows = rows[share_of_rows(0, count, of=self._tokens, most=self._most, least=ROWS_PER_SAMPLE)]
        self._rows.add(sample.id, sample.states[self._point], sample.full_ids(), rows, first=first)
        self.samples += 1

    @cached_property
    def judgement(self) -> Judgement:
        """Once every sample was seen."""
        return self._rows.judge()


def _cost(found: Judgement, offset: int = 0) -> float:
    return found.nll[OFFSETS.index(offset)]


def _offsets(found: Judgement) -> tuple[OffsetAgreement, ...]:
    pairs = zip(OFFSETS, found.shares, found.nll, strict=False)
    return tuple(OffsetAgreement(offset=offset, share=share, nll=nll) for offset, share, nll in pairs)


def _measured(found: Judgement, why: str) -> str:
    if why:
        return "not measured"
    if not found.rows:
        return "no rows that could tell"
    costs = ", ".join(f"{offset:+d}: {nll:.2f}" for offset, nll in zip(OFFSETS, found.nll, strict=True))
    return f"-log p by offset {costs}; entropy {found.entropy:.2f}; {found.rows} rows"
