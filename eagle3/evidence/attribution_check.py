"""`attribution`: a bounded choice of a dump's rows, each slot against every boundary of the target."""

from collections.abc import Collection, Iterator, Sequence

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import DumpError, SampleRecord
from eagle3.dump.reader import DumpReader
from eagle3.dump.slots import SlotSample
from eagle3.evidence.attributed import Attribution
from eagle3.evidence.attribution import MARGIN, NothingToCompare, attribute
from eagle3.evidence.references import Reference
from eagle3.evidence.report import Check, Verdict

MAX_SAMPLES = 12
TOKEN_BUDGET = 1024
"""Tokens that the reference computes, of all samples: 5 CPU-seconds of SmolLM2-135M in float32."""
ANSWER_ROWS = 32
LONGEST_REACH = 2048
"""How far into one sample the reference goes where no other way leads to the row of an answer."""
MAX_FINDINGS = 3
_UNPROVEN = (
    "The labels are claims then, not proven. Validate where the target fits, or with a dump that has a probe "
    "(`eagle3 probe`)."
)


def check_attribution(
    reader: DumpReader, reference: Reference | None, *, why_none: str = ""
) -> tuple[Check, Attribution | None]:
    """Attribute a dump's slots and judge. Without a reference the check warns: nothing proves the labels then.

    Raises what `attribute` raises but NothingToCompare and DumpError, which become a failed check.
    """
    manifest = reader.manifest
    if reference is None:
        why = why_none or "neither the target's model nor a probe was given"
        return _check(
            "warn", "not measured", f"No slot was compared with the target's layers: {why}. {_UNPROVEN}"
        ), None
    if reference.num_layers != manifest.target.num_layers:
        return _check(
            "fail",
            "not measured",
            f"The {reference.name} has {reference.num_layers} layers, the dump's target {manifest.target.num_layers}: "
            "it is another target. Validate with the folder that was served.",
        ), None
    chosen = choose_samples(reader.records, reference.sample_ids)
    try:
        found = attribute(
            _read(reader, chosen),
            {str(point): point for point in manifest.spec.points},
            reference,
            dtype=manifest.dtype,
            model_class=manifest.target.model_class,
        )
    except (NothingToCompare, DumpError) as error:
        return _check("fail", "not measured", f"The slots could not be attributed: {error}."), None
    answer = sum(max(0, tokens - reader.records[index].prompt_tokens) for index, tokens in chosen)
    value = (
        f"{found.rows} rows of {found.samples} of {len(reader)} samples, {_share(chosen, answer)} in answers; "
        + ", ".join(f"{slot.label} {slot.error:.2g} (next {slot.runner_up_error:.2g})" for slot in found.slots)
    )
    verdict, sentence = _judge(found)
    blamed = tuple(slot.claimed for slot in found.slots if slot.verdict != "proven" and slot.claimed is not None)
    return _check(verdict, value, sentence, blamed), found


def choose_samples(records: Sequence[SampleRecord], known: Collection[str] | None) -> list[tuple[int, int]]:
    """(index, tokens): the samples to look at and how many of their first tokens, at most `TOKEN_BUDGET` in all.

    The same for the same dump: evenly spread over its shards, the middle sample of each stretch, or the one with the
    shortest prompt where that one's answer would lie out of reach. `known`: samples that the reference has; it costs
    nothing to look at them whole.
    """
    if known is not None:
        found = [(index, record.rows) for index, record in enumerate(records) if record.id in known]
        return found[:: -(-len(found) // MAX_SAMPLES) or 1]
    count = min(len(records), MAX_SAMPLES)
    limit = TOKEN_BUDGET // count
    chosen = []
    for stretch in range(count):
        start, end = stretch * len(records) // count, (stretch + 1) * len(records) // count
        middle = (start + end) // 2
        if records[middle].prompt_tokens + ANSWER_ROWS > limit:
            middle = min(range(start, end), key=lambda index: records[index].prompt_tokens)
        chosen.append(middle)
    tokens, left = {}, TOKEN_BUDGET
    for place, index in enumerate(sorted(chosen, key=lambda index: records[index].rows)):
        tokens[index] = min(records[index].rows, left // (count - place))  # what short ones leave, longer ones get
        left -= tokens[index]
    if all(tokens[index] <= records[index].prompt_tokens for index in chosen):
        index = min(chosen, key=lambda index: records[index].prompt_tokens)
        tokens[index] = min(records[index].rows, records[index].prompt_tokens + ANSWER_ROWS, LONGEST_REACH)
    return [(index, tokens[index]) for index in chosen]


def _read(reader: DumpReader, chosen: Sequence[tuple[int, int]]) -> Iterator[SlotSample]:
    for index, tokens in chosen:
        sample = reader.read(index)
        states = {str(point): state[:tokens] for point, state in sample.states.items()}
        yield SlotSample(id=sample.id, input_ids=sample.input_ids[:tokens], states=states)


def _judge(found: Attribution) -> tuple[Verdict, str]:
    refuted = [slot for slot in found.slots if slot.verdict == "refuted"]
    undecided = [slot for slot in found.slots if slot.verdict == "undecided"]
    unlike = [slot for slot in undecided if slot.claimed != str(slot.found)]
    if refuted or found.misfits or unlike:
        parts = [slot.sentence.rstrip(".") for slot in (*refuted, *undecided)]
        parts += [finding.sentence for finding in found.misfits[:MAX_FINDINGS]]
        if len(found.misfits) > MAX_FINDINGS:
            parts.append(f"and {len(found.misfits) - MAX_FINDINGS} more")
        why = f" {' '.join(found.causes)}" if found.causes else ""
        return "fail", (
            f"Labels and tensors disagree: {'; '.join(parts)}.{why} A drafter trained on this and served with the "
            "layers that the labels name loses acceptance. Do not move the serving configuration to the labels; "
            "mend the capture and extract again."
        )
    if undecided:
        return "warn", " ".join(slot.sentence for slot in undecided)
    return "pass", (
        f"Every slot is what its label says, against the {found.reference}'s {found.num_layers} layers, embedding and "
        f"final norm; {found.samples} samples were looked at."
    )


def _share(chosen: Sequence[tuple[int, int]], answer: int) -> str:
    return f"{answer / sum(tokens for _, tokens in chosen):.0%}"


def _check(verdict: Verdict, value: str, sentence: str, points: tuple[CapturePoint, ...] = ()) -> Check:
    return Check(
        name="attribution",
        verdict=verdict,
        value=value,
        threshold=f"the claimed point is nearest, at most {MARGIN:g} as far as the next, within the calibrated bound",
        sentence=sentence,
        points=points,
    )
