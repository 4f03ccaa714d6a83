"""The picture of a report: what it says is read from the figure's parts, and a PNG comes out for every report."""

from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from eagle3.capture import CapturePoint, all_points
from eagle3.dump.reader import DumpReader
from eagle3.evidence.attributed import Attribution, Candidate, SlotAttribution
from eagle3.evidence.files import verify_integrity
from eagle3.evidence.plot_style import AMBER, BLUE, RED
from eagle3.evidence.plots import evidence_figure, evidence_png
from eagle3.evidence.report import EvidenceReport, OffsetAgreement
from eagle3.evidence.validate import validate_dump
from tests.dumps import SPEC, Capture, capture, reference_of, write_dump
from tests.planting import Scene, answers_empty, embed_called_layer, roll, shift_points

pytestmark = pytest.mark.unit

Planted = Callable[[Callable[[Scene], None]], EvidenceReport]


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture(scope="module")
def planted(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    def examine(plant: Callable[[Scene], None]) -> EvidenceReport:
        folder = tmp_path_factory.mktemp("dump") / "dump"
        plant(Scene(captured, SPEC, folder))
        return validate_dump(DumpReader.open(folder), captured.parts, reference=reference_of(captured.target))

    return examine


@pytest.fixture(scope="module")
def clean(planted: Planted) -> EvidenceReport:
    return planted(lambda scene: scene.write())


@pytest.fixture(scope="module")
def story(planted: Planted) -> EvidenceReport:
    """Labels layers.1, layers.3 and layers.5 on embed, layers.1 and layers.3."""
    return planted(embed_called_layer)


def panel(figure: Figure, name: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_label() == name)


def artist(axes: Axes, gid: str) -> Artist:
    (found,) = axes.findobj(lambda a: a.get_gid() == gid)
    return found


def column_of_claim(axes: Axes, label: str) -> float:
    box = artist(axes, f"claimed {label}")
    assert isinstance(box, Rectangle)
    return box.get_x() + box.get_width() / 2


def column_of_finding(axes: Axes, label: str) -> float:
    dot = artist(axes, f"found {label}")
    assert isinstance(dot, Line2D)
    return float(dot.get_xdata()[0])  # type: ignore[arg-type,index]


def outline(axes: Axes, label: str) -> str:
    box = artist(axes, f"claimed {label}")
    assert isinstance(box, Rectangle)
    return to_hex(box.get_edgecolor())


def words(axes: Axes, label: str) -> str:
    text = artist(axes, f"words {label}")
    assert isinstance(text, Text)
    return " ".join(text.get_text().split())


def arrows(axes: Axes) -> set[str]:
    return {str(a.get_gid()) for a in axes.texts if str(a.get_gid()).startswith("arrow")}


def text_of(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in figure.findobj(Text) if isinstance(t, Text))


def width_of(png: bytes) -> int:
    return Image.open(BytesIO(png)).width


def test_in_a_clean_dump_every_claim_is_where_the_slot_is(clean: EvidenceReport) -> None:
    figure = evidence_figure(clean)
    heat_map, profile = panel(figure, "heat map"), panel(figure, "norm profile")
    for point in SPEC.points:
        assert column_of_claim(heat_map, point) == column_of_finding(heat_map, point)
        assert outline(heat_map, point) == BLUE
        assert words(heat_map, point).startswith(f"✓ is {point} (")
    assert arrows(profile) == set()
    assert "Every slot is what it is called" in text_of(figure)
    assert "really" not in text_of(figure).replace("it really is", "").replace("slot really is", "")


def test_a_wrong_slot_is_red_with_an_arrow_to_where_it_really_is(story: EvidenceReport) -> None:
    figure = evidence_figure(story)
    heat_map, profile = panel(figure, "heat map"), panel(figure, "norm profile")
    places = {point: place for place, point in enumerate(all_points(8))}
    for label, really in {"layers.1": "embed", "layers.3": "layers.1", "layers.5": "layers.3"}.items():
        assert column_of_claim(heat_map, label) == places[CapturePoint(label)]
        assert column_of_finding(heat_map, label) == places[CapturePoint(really)]
        assert outline(heat_map, label) == RED
        assert words(heat_map, label).startswith(f"✗ REALLY {really}, not {label} (")
    assert outline(heat_map, "norm") == BLUE
    assert arrows(profile) == {"arrow layers.1", "arrow layers.3", "arrow layers.5"}
    assert "layers.1 is really embed · layers.3 is really layers.1 · layers.5 is really layers.3" in text_of(figure)


def test_the_target_is_a_line_over_all_layers(clean: EvidenceReport) -> None:
    profile = panel(evidence_figure(clean), "norm profile")
    (line,) = [line for line in profile.lines if line.get_label() == "target"]
    assert clean.attribution is not None
    assert list(line.get_ydata()) == [norm for p, norm in clean.attribution.profile.items() if p != "norm"]
    assert profile.get_yscale() == "log"


def test_late_rows_show_in_the_bars_and_in_the_slots(planted: Planted) -> None:
    figure = evidence_figure(planted(roll(1)))
    bars = [p for p in panel(figure, "offsets").patches if isinstance(p, Rectangle)]
    tallest = max(bars, key=lambda bar: bar.get_height())
    assert round(tallest.get_x() + tallest.get_width() / 2) == -1
    assert to_hex(tallest.get_facecolor()) == RED
    assert words(panel(figure, "heat map"), "layers.3") == "✗ REALLY layers.3, 1 row late"
    assert arrows(panel(figure, "norm profile")) == set()
    headline = "layers.1 is really layers.1, 1 row late · layers.3 is really layers.3, 1 row late"
    assert f"{headline} · and 2 more" in text_of(figure)  # whole names, and how many there is no room for


def test_slots_of_which_most_rows_are_zero_are_right_in_the_others(planted: Planted) -> None:
    figure = evidence_figure(planted(answers_empty))
    assert "most rows zero" in text_of(figure)
    assert "layers.1 is layers.1 in only " in text_of(figure)
    assert "no tensor of the target" not in text_of(figure)
    heat_map = words(panel(figure, "heat map"), "layers.3")
    assert heat_map.startswith("✗ is layers.3, but only ")
    assert heat_map.endswith("of its rows fit")
    low, high = panel(figure, "norm profile").get_ylim()
    assert low > 1e-3  # zeros do not stretch the axis of the target's norms
    assert high < 1e4


def test_sampled_answers_are_drawn_by_their_cost(clean: EvidenceReport) -> None:
    costs = {-2: 9.0, -1: 8.0, 0: 1.5, 1: 7.0, 2: 9.5}
    offsets = tuple(OffsetAgreement(offset=o, share=0.3, nll=cost) for o, cost in costs.items())
    axes = panel(evidence_figure(clean.model_copy(update={"offsets": offsets})), "offsets")
    bars = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert [bar.get_height() for bar in bars] == list(costs.values())
    assert [to_hex(bar.get_facecolor()) == BLUE for bar in bars] == [False, False, True, False, False]
    assert "nats" in axes.get_ylabel()


def test_an_undecided_slot_is_neither_right_nor_wrong(clean: EvidenceReport) -> None:
    assert clean.attribution is not None
    first, *rest = clean.attribution.slots
    undecided = first.model_copy(update={"verdict": "undecided", "sentence": "It could not be decided."})
    attribution = clean.attribution.model_copy(update={"slots": (undecided, *rest)})
    report = clean.model_copy(update={"attribution": attribution})
    figure = evidence_figure(report)
    heat_map = panel(figure, "heat map")
    assert outline(heat_map, "layers.1") == AMBER
    assert words(heat_map, "layers.1").startswith("? undecided: layers.1 (")
    assert "It could not be decided." in text_of(figure)
    assert evidence_png(report).startswith(b"\x89PNG")


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "no finite row"), (0.0, "all zero")])
def test_a_slot_without_norms_is_said_to_be_so(planted: Planted, value: float, says: str) -> None:
    report = planted(lambda s: s.write(lambda x: {s.mid: torch.full_like(x.states[s.mid], value)}))
    figure = evidence_figure(report)
    assert says in text_of(figure)
    assert "layers.3 is no tensor of the target" in text_of(figure)
    assert evidence_png(report).startswith(b"\x89PNG")
    without = report.model_copy(update={"attribution": None})
    assert says in text_of(evidence_figure(without))


def test_without_a_reference_the_slots_are_drawn_and_a_note_says_why(
    captured: Capture, clean: EvidenceReport, tmp_path: Path
) -> None:
    write_dump(captured, tmp_path)
    report = validate_dump(DumpReader.open(tmp_path), captured.parts)
    figure = evidence_figure(report)
    assert {axes.get_label() for axes in figure.axes} == {"slot norms", "offsets", "words"}
    assert "No slot was compared with the target's layers" in text_of(figure)
    assert evidence_png(report).startswith(b"\x89PNG")


def test_the_integrity_report_alone_has_a_picture(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path)
    report = verify_integrity(tmp_path)
    assert "The slots were not compared with the target's layers" in text_of(evidence_figure(report))
    assert evidence_png(report).startswith(b"\x89PNG")


def of_many_layers(report: EvidenceReport, num_layers: int, held: dict[str, str]) -> EvidenceReport:
    """A report on a target of so many layers whose slots hold what `held` says under each label."""
    points = all_points(num_layers)
    slots = []
    for label, really in held.items():
        errors = {p: 0.001 if p == really else 0.9 for p in points}
        slots.append(
            SlotAttribution(
                label=label,
                claimed=CapturePoint(label),
                found=Candidate(point=CapturePoint(really)),
                error=0.001,
                claimed_error=errors[CapturePoint(label)],
                runner_up=Candidate(point=points[1]),
                runner_up_error=0.9,
                bound=0.01,
                rows_fitting=1,
                verdict="proven" if label == really else "refuted",
                errors=errors,
                sentence="",
            )
        )
    profile = {p: 1.0 + place for place, p in enumerate(points)}
    attribution = Attribution(
        reference="target", num_layers=num_layers, samples=1, rows=100, slots=tuple(slots), profile=profile
    )
    return report.model_copy(update={"attribution": attribution, "statistics": ()})


@pytest.mark.parametrize("num_layers", [2, 8, 30, 61])
def test_no_two_labels_overlap_whatever_the_depth(clean: EvidenceReport, num_layers: int) -> None:
    last = f"layers.{num_layers - 1}"
    report = of_many_layers(clean, num_layers, {"layers.0": "embed", last: "layers.0", "norm": "norm"})
    figure = evidence_figure(report)
    figure.draw_without_rendering()
    for name in ("norm profile", "heat map"):
        boxes = [label.get_window_extent() for label in panel(figure, name).get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    heat_map = panel(figure, "heat map")
    assert column_of_claim(heat_map, last) == num_layers
    edge = figure.bbox.x1
    assert all(text.get_window_extent().x1 < edge for text in heat_map.texts)
    assert width_of(evidence_png(report)) == 1300


def test_neighbours_are_told_apart_at_61_layers(clean: EvidenceReport, planted: Planted) -> None:
    assert words(panel(evidence_figure(planted(shift_points(1))), "heat map"), "layers.3").startswith(
        "✗ REALLY layers.4"
    )
    report = of_many_layers(clean, 61, {"layers.30": "layers.31"})
    heat_map = panel(evidence_figure(report), "heat map")
    shift = column_of_finding(heat_map, "layers.30") - column_of_claim(heat_map, "layers.30")
    assert shift == 1
    room = heat_map.transData.transform((1, 0))[0] - heat_map.transData.transform((0, 0))[0]
    assert room > 10  # pixels


def test_names_from_a_dump_are_no_mathematics(clean: EvidenceReport) -> None:
    evil = "$\\frac{1$ \x07\n$x^{"
    assert clean.attribution is not None
    first, *rest = clean.attribution.slots
    evil_slot = first.model_copy(update={"label": evil, "verdict": "refuted", "sentence": evil, "error": 9.0})
    attribution = clean.attribution.model_copy(update={"slots": (evil_slot, *rest), "causes": (evil,)})
    assert evidence_png(clean.model_copy(update={"attribution": attribution})).startswith(b"\x89PNG")
