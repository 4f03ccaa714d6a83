"""`attribution`: a bounded choice of a dump's rows, each slot against every boundary of the target."""

from collections.abc import Collection, Mapping, Sequence

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import DumpError, SampleRecord
from eagle3.dump.reader import DumpReader
from eagle3.evidence.attributed import Attribution, SlotAttribution
from eagle3.evidence.attribution import MARGIN, NothingToCompare, attribute
from eagle3.evidence.references import Reference
from eagle3.evidence.report import Check, Verdict

MAX_SAMPLES = 12
TOKEN_BUDGET = 3072
"""Tokens that the reference computes, of all samples; the answer behind a longer prompt is out of reach."""
ANSWER_ROWS = 32
"""Rows of its answer that are looked at in every sample, or all of a shorter answer. The loss covers answers, and a
server computes their rows on another path than a prompt's."""
MIN_ANSWER_ROWS = 8
"""Where fewer rows of answers were compared, and the dump has more, the check warns."""
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
            (reader.read(index).slots().first(tokens) for index, tokens in chosen),
            {str(point): point for point in manifest.spec.points},
            reference,
            dtype=manifest.dtype,
            model_class=manifest.target.model_class,
            sent=manifest.engine.ids,
        )
    except (NothingToCompare, DumpError) as error:
        return _check("fail", "not measured", f"The slots could not be attributed: {error}."), None
    value = (
        f"{found.rows} rows of {found.samples} of {len(reader)} samples, {found.rows - found.answer_rows} of prompts "
        f"and {found.answer_rows} of answers; "
        + ", ".join(f"{slot.label} {slot.error:.2g} (next {slot.runner_up_error:.2g})" for slot in found.slots)
    )
    verdict, sentence = _judge(found)
    remarks = [*_unreached(reader.records, found), *found.remarks]
    if remarks and verdict != "fail":
        verdict, sentence = "warn", " ".join([*remarks, sentence])
    blamed = tuple(slot.claimed for slot in found.slots if slot.verdict != "proven" and slot.claimed is not None)
    return _check(verdict, value, sentence, blamed), found


def choose_samples(records: Sequence[SampleRecord], known: Collection[str] | None) -> list[tuple[int, int]]:
    """(index, tokens): the samples to look at and how many of their first tokens, at most `TOKEN_BUDGET` in all.

    The same for the same dump: evenly spread over its shards, each far enough into its answer. As many as the budget
    allows, `MAX_SAMPLES` at most; of each stretch the middle sample, or the one that ends its prompt first where that
    one is too long. What is left goes half to the longest one, so that rows far behind are looked at, half to all.
    `known`: samples that the reference has; it costs nothing to look at them whole.
    """
    if known is not None:
        found = [(index, record.rows) for index, record in enumerate(records) if record.id in known]
        return found[:: -(-len(found) // MAX_SAMPLES) or 1]
    needs = {i: min(r.rows, r.prompt_tokens + ANSWER_ROWS) for i, r in enumerate(records)}
    within = [i for i, need in needs.items() if need <= TOKEN_BUDGET and records[i].rows > records[i].prompt_tokens]
    if not within:  # no answer in reach: the beginnings of prompts are something
        within, needs = list(needs), {i: min(r.rows, TOKEN_BUDGET // MAX_SAMPLES) for i, r in enumerate(records)}
    for count in range(min(len(within), MAX_SAMPLES), 0, -1):
        chosen = _spread(within, needs, count)
        if sum(needs[i] for i in chosen) <= TOKEN_BUDGET:
            break
    tokens = {i: needs[i] for i in chosen}
    left = TOKEN_BUDGET - sum(tokens.values())
    by_rows = sorted(chosen, key=lambda i: records[i].rows)
    deeper = min(records[by_rows[-1]].rows - tokens[by_rows[-1]], left // 2)
    tokens[by_rows[-1]] += deeper
    left -= deeper
    for place, index in enumerate(by_rows):
        more = min(records[index].rows - tokens[index], left // (len(by_rows) - place))
        tokens[index] += more
        left -= more
    return sorted(tokens.items())


def _spread(within: Sequence[int], needs: Mapping[int, int], count: int) -> list[int]:
    """One sample of each of `count` stretches, the middle one where it needs no more than its share."""
    chosen = []
    for stretch in range(count):
        start, end = stretch * len(within) // count, (stretch + 1) * len(within) // count
        middle = within[(start + end) // 2]
        if needs[middle] > TOKEN_BUDGET // count:
            middle = min(within[start:end], key=needs.__getitem__)
        chosen.append(middle)
    return chosen


def _unreached(records: Sequence[SampleRecord], found: Attribution) -> list[str]:
    there = sum(max(0, record.rows - record.prompt_tokens) for record in records)
    if found.answer_rows >= min(MIN_ANSWER_ROWS, there):
        return []
    why = (
        f"the prompts are longer than the {TOKEN_BUDGET} tokens that are computed"
        if found.reference == "target"
        else "the probe holds the beginnings of prompts"
    )
    return [
        f"Only {found.answer_rows} of {there} rows of answers were compared: {why}. The loss covers the answers, and "
        "the server computes them on another path than prompts: hold a dump of short prompts from the same server "
        "against the target."
    ]


def _judge(found: Attribution) -> tuple[Verdict, str]:
    refuted = [slot for slot in found.slots if slot.verdict == "refuted"]
    undecided = [slot for slot in found.slots if slot.verdict == "undecided"]
    unlike = [slot for slot in undecided if not _may_be_right(slot)]
    if refuted or found.misfits:
        parts = [slot.sentence.rstrip(".") for slot in refuted]
        parts += [finding.sentence for finding in found.misfits[:MAX_FINDINGS]]
        if len(found.misfits) > MAX_FINDINGS:
            parts.append(f"and {len(found.misfits) - MAX_FINDINGS} more")
        more = "".join(f" {sentence}" for sentence in (*(slot.sentence for slot in undecided), *found.causes))
        return "fail", (
            f"Labels and tensors disagree: {'; '.join(parts)}.{more} A drafter trained on this and served with "
            "the layers that the labels name loses acceptance. Do not move the serving configuration to the labels; "
            "mend the capture and extract again."
        )
    if unlike:
        return "fail", (
            f"What the labels say was not found: {' '.join(slot.sentence for slot in undecided)} Look at more and "
            "longer samples, with the target that was served; a dump whose labels are right passes then."
        )
    if undecided:
        return "warn", " ".join(slot.sentence for slot in undecided)
    return "pass", (
        f"Every slot is what its label says, against the {found.reference}'s {found.num_layers} layers, embedding and "
        f"final norm; {found.samples} samples were looked at."
    )


def _may_be_right(slot: SlotAttribution) -> bool:
    """Whether what an undecided slot claims is within noise, though another tensor may be as near."""
    if slot.claimed is None or slot.claimed_error is None or slot.claimed_bound is None:
        return True
    return slot.claimed == str(slot.found) or slot.claimed_error <= slot.claimed_bound


def _check(verdict: Verdict, value: str, sentence: str, points: tuple[CapturePoint, ...] = ()) -> Check:
    return Check(
        name="attribution",
        verdict=verdict,
        value=value,
        threshold=f"the claimed point is nearest, at most {MARGIN:g} as far as the next, within the calibrated bound",
        sentence=sentence,
        points=points,
    )
