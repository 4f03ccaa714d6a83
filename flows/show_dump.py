"""What the commands about dumps print for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

from eagle3.dump.manifest import Manifest
from eagle3.evidence.attributed import Attribution, SlotAttribution, shift_in_words
from eagle3.evidence.compare import LARGEST_SHARE, Comparison
from eagle3.evidence.statistics import RowStatistics
from flows.console import plain
from tasks.dump_attribution import AttributedDump
from tasks.dump_description import Description

_VERDICTS = {
    "proven": "proven: every slot is what is claimed of it, or is identified where nothing is claimed",
    "refuted": "refuted: a slot is not what is claimed of it, or no plain tensor of the target",
    "undecided": "could not be checked: not every slot could be decided",
}

_STATISTICS = (
    "rows",
    "median norm",
    "5% to 95%",
    "RMS",
    "not finite",
    "largest dimension (its share of the squared length)",
)
_ALWAYS_SHOWN = ("rows", "median norm", LARGEST_SHARE)
"""Measures of a comparison that a person sees even where they agree; --json has all of them."""


def print_description(description: Description, console: Console) -> None:
    manifest = description.manifest
    rows = {
        "dump": description.where,
        "layout": f"{description.layout}, made by {description.made_by}",
        "samples": f"{description.num_samples} with {description.num_tokens} rows, {_ids(description)}",
        "states": f"{description.dtype}, {description.hidden_size} wide",
    }
    if manifest:
        target = manifest.target
        rows |= {
            "target": f"{target.name}: {target.model_class}, {target.num_layers} layers, hidden {target.hidden_size}, "
            f"vocabulary {target.vocab_size}",
            "engine": f"{manifest.engine.name} {manifest.engine.version}",
            "live list": description.checks[0].value,
            "engine ids": description.checks[1].value,
            "answers": _answers(manifest),
            "probe": "yes" if manifest.probe else "none",
            "files": f"{len(manifest.shards)} shards, {sum(file.bytes for file in manifest.files) / 1e6:.1f} MB in all",
            "digest": manifest.digest(),
        }
    for name, text in rows.items():
        console.print(plain(f"{name:<11}{text}"), markup=False, soft_wrap=True)
    table = Table("slot", "claimed to be")
    measured = any(slot.statistics for slot in description.slots)
    for heading in _STATISTICS if measured else ():
        table.add_column(heading, justify="right")
    for slot in description.slots:
        table.add_row(slot.label, slot.claim or "-", *(_numbers(slot.statistics) if slot.statistics else ()))
    console.print(table)
    console.print(f"claims: {description.claimed_by}", markup=False, soft_wrap=True)
    for check in description.checks:
        if check.verdict != "pass":
            console.print(plain(f"{check.verdict}: {check.sentence}"), markup=False, soft_wrap=True)


def _answers(manifest: Manifest) -> str:
    """Where they came from, and how many a length cap cut."""
    generation, cut = manifest.generation, f"{manifest.num_cut} cut by the length cap"
    if generation.given is None:
        kept = "kept beside the shards" if manifest.shards[0].answers else "not kept as text"
        return f"{generation.source}, at most {generation.max_new_tokens} tokens; {cut}; {kept}"
    given = generation.given
    return f"given (turns: {given.turns}, thinking parts: {given.thinking}); {cut}"


def _ids(description: Description) -> str:
    if description.num_with_ids == description.num_samples:
        return "token ids with all of them"
    return f"token ids with {description.num_with_ids} of them (attribution needs them: --ids FILE)"


def _numbers(statistics: RowStatistics) -> tuple[str, ...]:
    if statistics.median_norm is None:
        return (f"{statistics.rows}", "-", "-", "-", f"{statistics.nonfinite_rows}", "-")
    top = statistics.spread
    return (
        f"{statistics.rows}",
        f"{statistics.median_norm:.4g}",
        f"{statistics.p05_norm:.4g} to {statistics.p95_norm:.4g}",
        f"{statistics.mean_rms:.3g}",
        f"{statistics.nonfinite_rows}",
        f"{top.top_dimension} ({top.top_share:.1%})" if top else "-",
    )


def slot_in_words(slot: SlotAttribution) -> str:
    """`layers.2`, and `layers.2, not embed` where something else is claimed."""
    if slot.verdict == "undecided":
        return f"undecided, nearest {slot.found}"
    if not slot.fits:
        return "none of the target's tensors"
    if slot.verdict == "proven":
        return str(slot.found)
    unlike = slot.claimed is not None and slot.claimed != str(slot.found)
    return f"{slot.found}, not {slot.claimed}" if unlike else f"{slot.found} in a part of the rows"


def print_attribution(found: AttributedDump, console: Console) -> None:
    attribution = found.attribution
    console.print(
        f"{found.where} ({found.layout}): {attribution.rows} rows of {attribution.samples} samples against the "
        f"{attribution.reference}'s {attribution.num_layers} layers, embedding and final norm",
        markup=False,
        soft_wrap=True,
    )
    table = Table("slot", "claimed", "is", "error", "next", "its error", "noise", "verdict")
    for slot in attribution.slots:
        table.add_row(
            slot.label,
            slot.claimed or "-",
            slot_in_words(slot),
            f"{slot.error:.2g}",
            str(slot.runner_up),
            f"{slot.runner_up_error:.2g}",
            f"{slot.bound:.2g}",
            slot.verdict,
        )
    console.print(table)
    for line in _lines(found):
        console.print(plain(line), markup=False, soft_wrap=True)


def _lines(found: AttributedDump) -> list[str]:
    attribution = found.attribution
    lines = [slot.sentence for slot in attribution.slots if slot.verdict != "proven"]
    lines += [
        f"{slot.label} is {slot.found}: no drafter is served with that, whatever its layers are called."
        for slot in found.altered
    ]
    lines += [f"cause: {cause}" for cause in attribution.causes]
    lines += [misfit.sentence for misfit in attribution.misfits]
    if found.alignment is not None:
        lines.append(f"tokens: {found.alignment.sentence}")
    return [*lines, f"claims: {found.claimed_by}", _VERDICTS[found.verdict]]


def attribution_as_json(found: AttributedDump) -> dict[str, Any]:
    attribution: Attribution = found.attribution
    return {
        "dump": found.where,
        "layout": found.layout,
        "claimed_by": found.claimed_by,
        "verdict": found.verdict,
        "answers": {slot.label: slot_in_words(slot) for slot in attribution.slots},
        "alignment": found.alignment.model_dump(mode="json") if found.alignment else None,
        **attribution.model_dump(mode="json"),
    }


def print_comparison(comparison: Comparison, console: Console) -> None:
    console.print(f"A  {comparison.first}\nB  {comparison.second}", markup=False, soft_wrap=True)
    table = Table("slot", "measure", "A", "B", "verdict")
    for row in comparison.measures:
        if row.verdict == "pass" and row.measure not in _ALWAYS_SHOWN:
            continue
        table.add_row(row.slot, row.measure, _number(row.first), _number(row.second), row.verdict)
    console.print(table)
    if comparison.paired:
        table = Table("slot of B", "rows", "distance to A's", "nearest in A", "its distance", "verdict")
        for pair in comparison.paired:
            shift = f", {shift_in_words(pair.shift)}" if pair.shift else ""
            table.add_row(
                pair.slot,
                str(pair.rows),
                _number(pair.error),
                f"{pair.nearest}{shift}",
                _number(pair.nearest_error),
                pair.verdict,
            )
        console.print(table)
    for sentence in comparison.sentences():
        console.print(plain(sentence), markup=False, soft_wrap=True)
    console.print(comparison.summary(), markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
