"""The report as one picture: norms by slot, and the final state against the tokens around it."""

from collections.abc import Iterable
from io import BytesIO
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from eagle3.evidence.alignment import AGREEMENT
from eagle3.evidence.report import EvidenceReport, Verdict

_COLOURS: dict[Verdict, str] = {"pass": "#1a7f37", "warn": "#9a6700", "fail": "#cf222e"}
_GREY = "#8c959f"


def evidence_png(report: EvidenceReport) -> bytes:
    """A PNG, about 1000 x 450 pixels: norm by slot with its spread, and agreement by offset."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    norms, offsets = figure.subplots(1, 2)
    _draw_norms(norms, report)
    _draw_offsets(offsets, report)
    figure.suptitle(fill(report.summary(), 100), color=_COLOURS[report.verdict], fontweight="bold", fontsize=11)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _draw_norms(axes: Axes, report: EvidenceReport) -> None:
    axes.set_title("Norm of a row, by slot")
    axes.set_xticks(range(len(report.statistics)), [s.point for s in report.statistics])
    axes.set_xlim(-0.6, len(report.statistics) - 0.4)
    axes.set_ylabel("L2 norm: ● median, bar 5% to 95%, × mean")
    axes.set_yscale("log")
    for axis_set in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_set(LogFormatter(minor_thresholds=(2, 0.5)))  # plain numbers, few enough to read
    for place, s in enumerate(report.statistics):
        colour = _COLOURS[_worst(check.verdict for check in report.checks if s.point in check.points)]
        if s.mean_norm is None or s.median_norm is None or not s.max_norm:
            axes.annotate(
                "no finite row" if s.mean_norm is None else "all zero",
                (place, 0.5),
                ha="center",
                xycoords=("data", "axes fraction"),
                color=_COLOURS["fail"],
            )
            continue
        axes.plot([place, place], [s.p05_norm or s.max_norm, s.p95_norm or s.max_norm], color=colour, linewidth=3)
        axes.plot(place, s.median_norm, "o", color=colour, markersize=8)
        axes.plot(place, s.mean_norm, "x", color=_GREY, markersize=6)  # far off where a few rows are huge
        axes.annotate(
            f"{s.median_norm:.3g}",
            (place, s.median_norm),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
        )
        if s.nonfinite_rows:
            axes.annotate(
                f"{s.nonfinite_rows} NaN/inf",
                (place, 0.97),
                ha="center",
                va="top",
                xycoords=("data", "axes fraction"),
                color=_COLOURS["fail"],
            )
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)


def _draw_offsets(axes: Axes, report: EvidenceReport) -> None:
    verdict = _worst(check.verdict for check in report.checks if check.name == "final_state")
    axes.set_title("Final state predicts the token at t + 1 + offset")
    axes.set_ylabel("share of answer rows")
    axes.set_ylim(0, 1.1)
    axes.axhline(AGREEMENT, color=_GREY, linestyle="--", linewidth=1)
    if not report.offsets:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_COLOURS["fail"])
        axes.set_xticks([])
        return
    places = [o.offset for o in report.offsets]
    best = max(report.offsets, key=lambda o: o.share).offset  # the bar that carries the verdict
    colours = [_COLOURS[verdict] if o == best else _GREY for o in places]
    bars = axes.bar(places, [o.share for o in report.offsets], color=colours)
    axes.bar_label(bars, [f"{o.share:.0%}" for o in report.offsets])
    names = {-2: "-2\nlate by 2", -1: "-1\nlate by 1", 0: "0\nright", 1: "+1\nearly by 1", 2: "+2\nearly by 2"}
    axes.set_xticks(places, [names.get(o, f"{o:+d}") for o in places])


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    found = set(verdicts)
    return "fail" if "fail" in found else "warn" if "warn" in found else "pass"
