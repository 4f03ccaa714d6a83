"""What the panels of the evidence picture share: colours that a colour-blind person tells apart, signs, safe text."""

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from eagle3.evidence.attributed import SlotVerdict
from eagle3.evidence.report import Verdict

BLUE, RED, AMBER, GREY, LIGHT = "#0072b2", "#c8311a", "#a86500", "#6e7781", "#d0d7de"
"""Blue against red-orange is told apart with every common colour blindness; a sign or a line style says it again."""

TITLE = 11
"""Points of a panel's title."""
_DENSE = 200
"""An axis that spans less than this factor gets ticks between its powers of ten."""

VERDICT_COLOURS: dict[Verdict, str] = {"pass": BLUE, "warn": AMBER, "fail": RED}
VERDICT_SIGNS: dict[Verdict, str] = {"pass": "✓", "warn": "?", "fail": "✗"}
SLOT_VERDICTS: dict[SlotVerdict, Verdict] = {"proven": "pass", "undecided": "warn", "refuted": "fail"}


def literal(text: str, most: int = 200) -> str:
    """Text that a dump may have brought (labels, sample ids), for Matplotlib: no mathematics, no control characters."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return shown.replace("$", r"\$")


def plain_log_ticks(axes: Axes) -> None:
    """Numbers as people write them on a logarithmic y axis, few enough to read; once everything is drawn."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _DENSE * low else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)
