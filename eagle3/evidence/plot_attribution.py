"""Two panels over one axis, the boundaries of the target: norm profile, and attribution heat map."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import Transform

from eagle3.capture import CapturePoint, all_points
from eagle3.evidence.attributed import Attribution, SlotAttribution
from eagle3.evidence.plot_style import (
    AMBER,
    BLUE,
    GREY,
    RED,
    SLOT_VERDICTS,
    TITLE,
    VERDICT_COLOURS,
    VERDICT_SIGNS,
    literal,
    plain_log_ticks,
)
from eagle3.evidence.statistics import PointStatistics

NEAR, FAR = 1e-3, 1.0
"""Ends of the colour scale: nearer is one tensor (`attribution.RESOLUTION`), rows of other tokens are 1 away."""
_TICK_INCHES, _NAME_INCHES = 0.2, 0.5
_WORDS_WIDTH = 46
_SCALE_SHARE = 0.06
_SOME = 0.05
"""Share of the rows from which a slot is said to be right in a part of them."""
_ZERO = 1e-9
"""A median norm below it is one of rows of zeros: their percentiles end where the measure does."""


def columns(num_layers: int) -> dict[CapturePoint, int]:
    """The place of every point on the axis: boundaries in order, `norm` last."""
    return {point: place for place, point in enumerate(all_points(num_layers))}


def words_of(slot: SlotAttribution) -> str:
    """What a slot is, in a few words; `SlotAttribution.sentence` says all of it."""
    if slot.verdict == "undecided":
        nearest = f"{slot.found} ({_percent(slot.error)} off)"
        return f"undecided: {nearest} or {slot.runner_up} ({_percent(slot.runner_up_error)})"
    if slot.verdict == "proven":
        return f"is {slot.found} ({_percent(slot.error)} off, next {_percent(slot.runner_up_error)})"
    if fits_in_part(slot) or (slot.fits and slot.claimed in (None, str(slot.found))):
        return f"is {slot.found}, but only {slot.rows_fitting:.0%} of its rows fit"
    if not slot.fits:
        return f"is no tensor of the target: nearest {slot.found}, {_percent(slot.error)} off"
    if slot.claimed == slot.found.point:
        return f"REALLY {slot.found}"
    claim = "" if slot.claimed_error is None else f" ({_percent(slot.claimed_error)} off)"
    return f"REALLY {slot.found}, not {slot.claimed}{claim}"


def fits_in_part(slot: SlotAttribution) -> bool:
    """Whether most rows are as far as those of other tokens, and some are what the slot should hold."""
    return slot.verdict == "refuted" and slot.error > FAR and slot.rows_fitting >= _SOME


def moved(slot: SlotAttribution) -> bool:
    """Whether the slot is known to be at another boundary than it claims."""
    return slot.verdict == "refuted" and slot.claimed not in (None, slot.found.point) and slot.fits


def _percent(error: float) -> str:
    if error > 1000:
        return "over 1000x"
    if error >= 10:
        return f"{error:.2g}x"
    return f"{error:.0%}" if error >= 0.995 or error < 5e-5 else f"{100 * error:.2g}%"


def label_boundaries(axes: Axes, num_layers: int, width: float) -> None:
    """Ticks under an axis of `width` inches: every layer's number, or every 5th or 10th where there is no room."""
    room = width / (num_layers + 2)
    step = next((s for s in (1, 2, 5, 10, 20, 50) if s * room >= _TICK_INCHES), 100)
    layers = range(0, num_layers, step)
    places = [0, *(layer + 1 for layer in layers), num_layers + 1]
    axes.set_xticks(places, ["embed", *(str(layer) for layer in layers), "norm"])
    if room < _NAME_INCHES:  # the names would run into the numbers
        first, *_, last = axes.get_xticklabels()
        first.set_horizontalalignment("right")
        last.set_horizontalalignment("left")
    axes.set_xlim(-0.7, num_layers + 1.7)
    axes.axvline(num_layers + 0.5, color=GREY, linewidth=0.8, linestyle=":")  # `norm` is not on the stream


def draw_profile(axes: Axes, attribution: Attribution, statistics: Sequence[PointStatistics]) -> None:
    """Median norm at every boundary; each slot, by its number, where it claims to be, and an arrow to where it is."""
    axes.set_label("norm profile")
    axes.set_title("Norm of a row: the target (line), and each slot where it claims to be", loc="left", fontsize=TITLE)
    axes.set_ylabel("median L2 norm")
    axes.set_yscale("log")
    places = columns(attribution.num_layers)
    profile = {point: norm for point, norm in attribution.profile.items() if norm > 0 and point in places}
    stream = [point for point in profile if point != "norm"]
    axes.plot([places[p] for p in stream], [profile[p] for p in stream], "-o", color=GREY, markersize=3, label="target")
    if "norm" in profile:
        axes.plot(places[CapturePoint("norm")], profile[CapturePoint("norm")], "D", color=GREY, markersize=5)
    measured = {s.point: s for s in statistics}
    for number, slot in enumerate(attribution.slots, start=1):
        _draw_slot(axes, number, slot, measured.get(slot.claimed) if slot.claimed else None, places, profile)
    axes.margins(y=0.2)
    plain_log_ticks(axes)


def _draw_slot(
    axes: Axes,
    number: int,
    slot: SlotAttribution,
    measured: PointStatistics | None,
    places: Mapping[CapturePoint, int],
    profile: Mapping[CapturePoint, float],
) -> None:
    there = profile.get(slot.found.point)
    colour = VERDICT_COLOURS[SLOT_VERDICTS[slot.verdict]]
    place = places[slot.claimed or slot.found.point]
    if measured is not None and (measured.median_norm is None or measured.median_norm < _ZERO):
        some = "most rows zero" if measured.max_norm else "all zero"
        what = "no finite row" if measured.median_norm is None else some
        _mark_number(axes, number, slot.label, (place, 0.1), colour, transform=axes.get_xaxis_transform())
        axes.annotate(
            what,
            (place, 0.1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(11, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
        return
    norm = measured.median_norm if measured is not None else there
    if not norm:
        return  # neither the slot nor the target was measured
    if measured is not None and measured.p05_norm and measured.p95_norm:
        low = max(measured.p05_norm, min(profile.values(), default=norm) / 2)  # zeros would stretch the axis
        axes.plot([place, place], [low, measured.p95_norm], color=colour, linewidth=2, alpha=0.45)
    if moved(slot) and there:
        axes.annotate(
            "",
            (places[slot.found.point], there),
            xytext=(place, norm),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 1.8,
                "shrinkA": 6,
                "shrinkB": 1,
                "connectionstyle": "arc3,rad=0.15",
            },
            zorder=4,
        ).set_gid(f"arrow {slot.label}")
        axes.plot(places[slot.found.point], there, "o", color="white", markeredgecolor=colour, markersize=6, zorder=7)
    _mark_number(axes, number, slot.label, (place, norm), colour, transform=axes.transData)


def _mark_number(
    axes: Axes, number: int, label: str, at: tuple[float, float], colour: str, *, transform: Transform
) -> None:
    x, y = at
    axes.plot(x, y, "o", color=colour, markersize=13, zorder=5, gid=f"slot {label}", transform=transform)
    axes.text(
        x,
        y,
        str(number),
        transform=transform,
        color="white",
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold",
        zorder=6,
    )


def draw_heat_map(axes: Axes, attribution: Attribution) -> None:
    """A row for each slot, a column for each boundary: dark where they are one tensor. Claim and finding are marked."""
    axes.set_label("heat map")
    # An explicit y: the colour bar beside it would push the title up.
    axes.set_title("Which boundary each slot really is: dark = the same tensor", loc="left", fontsize=TITLE, y=1.02)
    places = columns(attribution.num_layers)
    slots = attribution.slots
    cells = [[min(max(slot.errors.get(p, FAR), NEAR), FAR) for p in places] for slot in slots]
    image = axes.imshow(cells, cmap="Blues_r", norm=LogNorm(NEAR, FAR), aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(slots)), [f"{n}  {literal(s.label, 22)}" for n, s in enumerate(slots, start=1)])
    axes.set_yticks([row + 0.5 for row in range(len(slots) - 1)], minor=True)
    axes.grid(axis="y", which="minor", color="white", linewidth=3)
    axes.tick_params(which="minor", length=0)
    for row, slot in enumerate(slots):
        _mark_row(axes, row, slot, places)
    _draw_scale(axes, image)


def _mark_row(axes: Axes, row: int, slot: SlotAttribution, places: Mapping[CapturePoint, int]) -> None:
    verdict = SLOT_VERDICTS[slot.verdict]
    colour = VERDICT_COLOURS[verdict]
    found = places[slot.found.point]
    around = slot.verdict == "refuted" and slot.claimed == slot.found.point  # the ring goes around the cross
    if slot.claimed is not None:
        claimed = places[slot.claimed]
        axes.add_patch(
            Rectangle(
                (claimed - 0.5, row - 0.44),
                1,
                0.88,
                fill=False,
                edgecolor=colour,
                linewidth=2.5,
                linestyle="--" if slot.verdict == "undecided" else "-",
                zorder=4,
                clip_on=False,
                gid=f"claimed {slot.label}",
            )
        )
        if slot.verdict == "refuted":
            axes.plot(claimed, row, "x", color=colour, markersize=7, markeredgewidth=2, zorder=5)
    plain = slot.found.is_plain and slot.fits
    axes.plot(
        found,
        row,
        "o",
        color="white" if plain else "none",
        markeredgecolor=colour,
        markersize=13 if around else 7,
        markeredgewidth=1.8,
        zorder=5,
        gid=f"found {slot.label}",
    )
    axes.annotate(
        fill(f"{VERDICT_SIGNS[verdict]} {literal(words_of(slot))}", _WORDS_WIDTH),
        (1.012, row),
        xycoords=axes.get_yaxis_transform(),
        va="center",
        color=colour,
        fontsize=9.5,
        annotation_clip=False,
        gid=f"words {slot.label}",
    )


def _draw_scale(axes: Axes, image: AxesImage) -> None:
    """A narrow colour bar beside the title, 20 points wide of the panel's height."""
    bar = image.figure.colorbar(image, cax=axes.inset_axes((0.74, 1.0, 0.26, _SCALE_SHARE)), orientation="horizontal")
    bar.ax.set_label("scale")
    bar.ax.xaxis.set_ticks_position("top")
    bar.set_ticks([NEAR, 0.01, 0.1, FAR], labels=["0.1%", "1%", "10%", "100% off"], fontsize=8)
    bar.minorticks_off()


def draw_legend(axes: Axes) -> None:
    """How to read both panels, right of the norm profile."""
    entries = [
        Line2D([], [], color=GREY, marker="o", markersize=3, label="the target, boundary by boundary"),
        Line2D([], [], color=BLUE, marker="o", markersize=10, linestyle="", label="✓ slot is what it is called"),
        Line2D([], [], color=RED, marker="o", markersize=10, linestyle="", label="✗ slot is something else"),
        Line2D([], [], color=AMBER, marker="o", markersize=10, linestyle="", label="? could not be decided"),
        Line2D([], [], color=RED, marker=r"$\rightarrow$", markersize=14, linestyle="", label="where it really is"),
        Patch(fill=False, edgecolor="black", linewidth=2, label="claimed boundary"),
        Line2D([], [], color="white", marker="o", markeredgecolor="black", linestyle="", label="found boundary"),
    ]
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9.5)
