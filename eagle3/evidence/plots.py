"""The report as one picture, in which a person sees at a glance whether the slots are what they are called."""

from collections.abc import Iterator
from io import BytesIO
from textwrap import fill

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle3.evidence.attributed import Attribution, SlotAttribution
from eagle3.evidence.plot_attribution import draw_heat_map, draw_legend, draw_profile, fits_in_part, label_boundaries
from eagle3.evidence.plot_panels import draw_offsets, draw_slot_norms, draw_words
from eagle3.evidence.plot_style import SLOT_VERDICTS, VERDICT_COLOURS, VERDICT_SIGNS, literal
from eagle3.evidence.report import EvidenceReport, Verdict

_WIDTH, _LEFT, _RIGHT = 13.0, 0.09, 0.715  # inches, and shares of them: words stand right of the heat map
_HEAD, _PROFILE, _SLOT, _BOTTOM, _GAP, _FOOT = 0.95, 2.4, 0.42, 2.1, 0.75, 0.5  # inches
_TITLE, _NAMED, _LINE = 12, 4, 135


def evidence_png(report: EvidenceReport, *, dpi: int = 100) -> bytes:
    """A PNG, 1300 pixels wide and about 950 high; 450 where nothing was attributed."""
    buffer = BytesIO()
    evidence_figure(report).savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def evidence_figure(report: EvidenceReport) -> Figure:
    """The panels `norm profile`, `heat map`, `offsets` and `words` (the labels of their axes).

    Without an attribution there is no reference to draw: `slot norms`, `offsets` and `words`, which say why.
    """
    figure = _attributed(report, report.attribution) if report.attribution else _unattributed(report)
    FigureCanvasAgg(figure)
    return figure


def _attributed(report: EvidenceReport, attribution: Attribution) -> Figure:
    heights = (_PROFILE, _SLOT * max(len(attribution.slots), 2), _BOTTOM)
    total = _HEAD + sum(heights) + 2 * _GAP + _FOOT
    figure = Figure(figsize=(_WIDTH, total))
    tops = [total - _HEAD]
    for height in heights[:-1]:
        tops.append(tops[-1] - height - _GAP)
    boxes = [((top - height) / total, height / total) for top, height in zip(tops, heights, strict=True)]
    span = _RIGHT - _LEFT
    profile, heat_map = (figure.add_axes((_LEFT, bottom, span, height)) for bottom, height in boxes[:2])
    bottom, height = boxes[2]
    draw_profile(profile, attribution, report.statistics)
    draw_legend(profile)
    draw_heat_map(heat_map, attribution)
    for axes in (profile, heat_map):
        label_boundaries(axes, attribution.num_layers, span * _WIDTH)
    draw_offsets(figure.add_axes((_LEFT, bottom, 0.36, height)), report)
    words = figure.add_axes((0.5, bottom, 0.48, height))
    draw_words(words, "In words", list(_paragraphs(report)), width=90, lines=12, most=4)
    _headline(figure, report, total)
    return figure


def _unattributed(report: EvidenceReport) -> Figure:
    figure = Figure(figsize=(_WIDTH, 5.0))
    draw_slot_norms(figure.add_axes((0.07, 0.13, 0.24, 0.68)), report)
    draw_offsets(figure.add_axes((0.365, 0.13, 0.30, 0.68)), report)
    words = figure.add_axes((0.695, 0.13, 0.3, 0.68))
    draw_words(words, "No layer was compared", list(_paragraphs(report)), width=54, lines=18, most=9)
    _headline(figure, report, 5.0)
    return figure


def _headline(figure: Figure, report: EvidenceReport, total: float) -> None:
    """The verdict, and under it what the slots really are."""
    colour = VERDICT_COLOURS[report.verdict]
    text = f"{VERDICT_SIGNS[report.verdict]} {report.summary()}"
    figure.suptitle(
        fill(text, 120),
        x=0.012,
        y=1 - 0.1 / total,
        ha="left",
        va="top",
        color=colour,
        fontweight="bold",
        fontsize=_TITLE,
    )
    slots = report.attribution.slots if report.attribution else ()
    wrong = [s for s in slots if s.verdict == "refuted" and not (s.fits and s.claimed == str(s.found))]
    if wrong:
        names = _named([f"{slot.label} is {_held(slot)}" for slot in wrong])
        figure.text(0.012, 1 - 0.42 / total, literal(names, _LINE), va="top", color=colour, fontsize=_TITLE)


def _held(slot: SlotAttribution) -> str:
    if fits_in_part(slot):
        return f"{slot.found} in only {slot.rows_fitting:.0%} of its rows"
    return f"really {slot.found}" if slot.fits else "no tensor of the target"


def _named(items: list[str]) -> str:
    """As many as fit into the line whole, and how many more there are."""
    for most in range(min(len(items), _NAMED), 0, -1):
        rest = len(items) - most
        line = "  ·  ".join([*items[:most], *([f"and {rest} more"] if rest else [])])
        if len(line) <= _LINE:
            return line
    return items[0]


def _paragraphs(report: EvidenceReport) -> Iterator[tuple[Verdict, str]]:
    """Causes first, then what else did not pass; where all is well, what was compared."""
    attribution = report.attribution
    if attribution is not None:
        yield from (("fail", cause) for cause in attribution.causes)
        yield from (("fail", misfit.sentence) for misfit in attribution.misfits)
        if attribution.verdict == "proven":
            compared = f"{attribution.rows} rows of {attribution.samples} samples"
            where = f"every boundary of the {attribution.reference}"
            yield "pass", f"Every slot is what it is called: {compared} were compared with {where}."
        elif not attribution.causes and not attribution.misfits:
            unproven = [slot for slot in attribution.slots if slot.verdict != "proven"]
            yield from ((SLOT_VERDICTS[slot.verdict], slot.sentence) for slot in unproven)
    elif all(check.name != "attribution" for check in report.checks):
        yield "warn", "The slots were not compared with the target's layers: this report holds fewer checks."
    told = {"attribution"} if attribution is not None else set()
    rest = [check for check in report.checks if check.verdict != "pass" and check.name not in told]
    for check in sorted(rest, key=lambda check: check.verdict):  # fail before warn
        yield check.verdict, f"{check.name}: {check.sentence}"
