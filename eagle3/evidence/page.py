"""Parts of a report's page: tables for a person, safe against what a dump's own names may hold."""

from collections.abc import Sequence

from eagle3.evidence.attributed import Attribution, SlotAttribution
from eagle3.evidence.statistics import PointStatistics

_SLOT_ICONS = {"proven": "✅", "undecided": "⚠️", "refuted": "❌"}


def statistics_lines(statistics: Sequence[PointStatistics]) -> list[str]:
    """Two tables: how large the rows are, and how their squared length is spread over the dimensions."""
    sizes = ("slot", "rows", "median norm", "5% to 95%", "mean", "std", "largest", "RMS", "not finite", "near maximum")
    shape = (
        *("slot", "std of a dimension", "share of the squared length in the largest dimension"),
        *("dimensions 16 times above average", "share of the squared length common to all rows", "first values"),
    )
    return [
        *table(sizes, [_sizes(s) for s in statistics]),
        "",
        *table(shape, [_shape(s) for s in statistics]),
    ]


def _sizes(s: PointStatistics) -> list[str]:
    norms = ["–"] * 6
    if s.mean_norm is not None:
        norms = [f"{s.median_norm:.4g}", f"{s.p05_norm:.4g} to {s.p95_norm:.4g}", f"{s.mean_norm:.4g}"]
        norms += [f"{s.std_norm:.3g}", f"{s.max_norm:.4g}", f"{s.mean_rms:.3g}"]
    return [f"`{s.point}`", f"{s.rows}", *norms, f"{s.nonfinite_rows}", f"{s.near_max_rows}"]


def _shape(s: PointStatistics) -> list[str]:
    cells = ["–"] * 4
    if s.spread is not None:
        cells = [f"{s.spread.mean_std:.3g}", f"{s.spread.top_share:.1%} (dimension {s.spread.top_dimension})"]
        cells += [f"{s.spread.massive}", f"{s.spread.mean_share:.1%}"]
    first = ", ".join("NaN or inf" if value is None else f"{value:.3g}" for value in s.first_values)
    return [f"`{s.point}`", *cells, first or "–"]


def attribution_lines(attribution: Attribution) -> list[str]:
    """The table of an attribution, what explains it, and the samples that do not fit."""
    head = ("slot", "claimed", "found", "error", "runner-up", "its error", "bound", "verdict", "in words")
    return [
        f"Every slot against every boundary of the {plain(attribution.reference)}: {attribution.rows} rows of "
        f"{attribution.samples} samples.",
        "",
        *table(head, [_slot(slot) for slot in attribution.slots]),
        "",
        *(f"- {plain(cause)}" for cause in attribution.causes),
        *(f"- {plain(misfit.sentence)}" for misfit in attribution.misfits),
    ]


def _slot(slot: SlotAttribution) -> list[str]:
    return [
        plain(slot.label),
        f"{slot.claimed or 'nothing'}",
        plain(str(slot.found)),
        f"{slot.error:.2%}",
        plain(str(slot.runner_up)),
        f"{slot.runner_up_error:.2%}",
        f"{slot.bound:.2%}",
        f"{_SLOT_ICONS[slot.verdict]} {slot.verdict}",
        plain(slot.sentence),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table: the first and the last column are words, the others numbers."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 2)} --- |"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def plain(text: str) -> str:
    """Text from a dump (sample ids, file names) as table text: it cannot break the table or bring markup."""
    for char, escaped in {"\\": "\\\\", "|": "\\|", "<": "&lt;", "`": "\\`", "[": "\\[", "\n": " ", "\r": " "}.items():
        text = text.replace(char, escaped)
    return text
