"""Panels that need no reference: the slots' norms side by side, the final state against the tokens around it, words."""

from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes

from eagle3.evidence.alignment import AGREEMENT
from eagle3.evidence.plot_style import (
    GREY,
    LIGHT,
    RED,
    TITLE,
    VERDICT_COLOURS,
    VERDICT_SIGNS,
    literal,
    plain_log_ticks,
)
from eagle3.evidence.report import EvidenceReport, Verdict, worst

_OFFSET_NAMES = {-2: "-2\nlate by 2", -1: "-1\nlate by 1", 0: "0\nright", 1: "+1\nearly by 1", 2: "+2\nearly by 2"}


def draw_slot_norms(axes: Axes, report: EvidenceReport) -> None:
    """Norm by slot with its spread, in the order of the dump."""
    axes.set_label("slot norms")
    axes.set_title("Norm of a row, by slot", loc="left", fontsize=TITLE)
    axes.set_xticks(range(len(report.statistics)), [s.point for s in report.statistics])
    axes.set_xlim(-0.6, len(report.statistics) - 0.25)
    if not report.statistics:
        _say_not_measured(axes)
        return
    axes.set_ylabel("L2 norm: ● median, bar 5% to 95%, × mean")
    axes.set_yscale("log")
    for place, s in enumerate(report.statistics):
        colour = VERDICT_COLOURS[worst(check.verdict for check in report.checks if s.point in check.points)]
        if s.mean_norm is None or s.median_norm is None or not s.max_norm:
            what = "no finite row" if s.mean_norm is None else "all zero"
            axes.annotate(what, (place, 0.5), ha="center", xycoords=("data", "axes fraction"), color=RED)
            continue
        axes.plot([place, place], [s.p05_norm or s.max_norm, s.p95_norm or s.max_norm], color=colour, linewidth=3)
        axes.plot(place, s.median_norm, "o", color=colour, markersize=8)
        axes.plot(place, s.mean_norm, "x", color=GREY, markersize=6)  # far off where a few rows are huge
        axes.annotate(
            f"{s.median_norm:.3g}", (place, s.median_norm), xytext=(9, 0), textcoords="offset points", va="center"
        )
        if s.nonfinite_rows:
            what = f"{s.nonfinite_rows} NaN/inf"
            axes.annotate(what, (place, 0.97), ha="center", va="top", xycoords=("data", "axes fraction"), color=RED)
    axes.margins(y=0.15)
    plain_log_ticks(axes)


def draw_offsets(axes: Axes, report: EvidenceReport) -> None:
    """Which token a row's final state predicts: agreement by offset, or its cost in nats where answers were sampled."""
    axes.set_label("offsets")
    axes.set_title("Alignment: row t predicts token t + 1 + offset", loc="left", fontsize=TITLE)
    if not report.offsets:
        _say_not_measured(axes)
        return
    verdict = worst(check.verdict for check in report.checks if check.name == "final_state")
    places = [o.offset for o in report.offsets]
    costs = [o.nll for o in report.offsets if o.nll is not None]
    if len(costs) == len(places):
        axes.set_ylabel("nats a token: lowest fits")
        heights, labels, best = costs, [f"{cost:.1f}" for cost in costs], places[costs.index(min(costs))]
        axes.set_ylim(0, max(costs) * 1.15 or 1)
    else:
        axes.set_ylabel("share of answer rows")
        heights = [o.share for o in report.offsets]
        labels, best = [f"{share:.0%}" for share in heights], places[heights.index(max(heights))]
        axes.set_ylim(0, 1.15)
        axes.axhline(AGREEMENT, color=GREY, linestyle="--", linewidth=1)
    colours = [VERDICT_COLOURS[verdict] if offset == best else LIGHT for offset in places]  # the bar that decides
    axes.bar_label(axes.bar(places, heights, color=colours), labels, padding=2)
    axes.set_xticks(places, [_OFFSET_NAMES.get(offset, f"{offset:+d}") for offset in places], fontsize=9)
    if 0 in places:
        axes.get_xticklabels()[places.index(0)].set_fontweight("bold")


def draw_words(
    axes: Axes, title: str, paragraphs: Sequence[tuple[Verdict, str]], *, width: int, lines: int, most: int
) -> None:
    """Paragraphs under a title, each behind the sign of its verdict.

    `lines` of `width` characters fit, `most` for each; what does not fit stands in the report.
    """
    axes.set_label("words")
    axes.set_title(title, loc="left", fontsize=TITLE)
    axes.axis("off")
    line = 0.0
    for verdict, text in paragraphs:
        wrapped = wrap(literal(text, width * lines), width)
        room = min(int(lines - line), most)
        if room < 1:
            break
        if len(wrapped) > room:
            wrapped = [*wrapped[: room - 1], wrapped[room - 1][: width - 1] + "…"]
        colour = VERDICT_COLOURS[verdict]
        height = 1 - line / lines
        axes.text(0, height, VERDICT_SIGNS[verdict], transform=axes.transAxes, va="top", color=colour, fontsize=9.5)
        axes.text(0.03, height, "\n".join(wrapped), transform=axes.transAxes, va="top", fontsize=9.5)
        line += len(wrapped) + 0.4


def _say_not_measured(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=RED)
    axes.set_xticks([])
    axes.set_yticks([])
