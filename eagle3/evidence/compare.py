"""Two captures of one target side by side: their statistics, and the rows of the sequences that both hold.

For a training dump against an inference capture, and for a new dump against what passed before. Statistics alone fail
only what no change of domain explains; the same tokens in both decide more.
"""

from collections.abc import Callable, Iterable, Mapping

from pydantic import Field

from eagle3.dump.content import DTYPES
from eagle3.dump.slots import SlotSample
from eagle3.evidence.measured import EvidenceModel, Measured
from eagle3.evidence.page import plain, table
from eagle3.evidence.paired import PairedSlot, Pairing
from eagle3.evidence.report import Verdict, worst
from eagle3.evidence.row_measure import RowMeasure
from eagle3.evidence.statistics import RowStatistics

DRIFT, GROSS = 1.25, 1.8
"""Ratio of median norms from which it is a drift; ratio of 5th percentile, median and 95th percentile, all three, from
which no change of domain explains it. Measured on SmolLM2-135M (16 domains: code, prose, maths, six languages, numbers,
bare templates, sampled answers, random ids; 32 boundaries, all pairs): the median moves by up to 1.83, all three
together by up to 1.68 (last layer, chat template against random ids). A scale of 2 is 2 on text of the same kind, the
embedding in a layer's place 15 to 300."""
LARGEST_SHARE = "share of the squared length in the largest dimension"
_ICONS: dict[Verdict, str] = {"pass": "✅", "warn": "⚠️", "fail": "❌"}


class ComparedMeasure(EvidenceModel):
    """One number of one slot in both captures."""

    slot: str
    measure: str
    first: Measured | None
    second: Measured | None
    verdict: Verdict
    sentence: str = Field(description="Empty where the verdict is pass")


class Comparison(EvidenceModel):
    """Two captures side by side. `warn` is a drift to look at, `fail` a difference that one target cannot explain."""

    first: str = Field(description="What the first capture is called")
    second: str
    measures: tuple[ComparedMeasure, ...]
    paired: tuple[PairedSlot, ...] = Field(default=(), description="Slots over the rows of sequences that both hold")
    paired_samples: int = 0

    @property
    def verdict(self) -> Verdict:
        return worst(row.verdict for row in self._judged())

    @property
    def compares_anything(self) -> bool:
        """False where no slot has the same name in both, and no sequence stands in both."""
        return bool(self.paired) or any(None not in (row.first, row.second) for row in self.measures)

    def sentences(self) -> tuple[str, ...]:
        """What is wrong or worth a look, failures first."""
        rows = sorted(self._judged(), key=lambda row: row.verdict != "fail")
        return tuple(row.sentence for row in rows if row.verdict != "pass")

    def summary(self) -> str:
        """One sentence: are these two captures of the same thing?"""
        how = (
            f"{self.paired_samples} sequences stand in both and were compared row by row"
            if self.paired_samples
            else "no sequence stands in both, so only their statistics were compared, which prove no layer"
        )
        words = {
            "pass": f"{self.first} and {self.second} look alike: {how}.",
            "warn": f"{self.first} and {self.second} differ somewhat: {how}.",
            "fail": f"{self.first} and {self.second} do not hold the same states: {how}.",
        }
        return words[self.verdict]

    def _judged(self) -> list[PairedSlot | ComparedMeasure]:
        return [*self.paired, *self.measures]

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Slot, measure, first, second, verdict: for a table."""
        paired = [
            (slot.slot, f"same tokens, {slot.rows} rows", "0", _number(slot.error, "{:.2%} apart"), slot.verdict)
            for slot in self.paired
        ]
        measures = [
            (row.slot, row.measure, _number(row.first), _number(row.second), row.verdict) for row in self.measures
        ]
        return [*paired, *measures]

    def markdown(self) -> str:
        """The page for a person: what differs, then every number side by side."""
        lines = [f"## {_ICONS[self.verdict]} {plain(self.summary())}", ""]
        lines += [f"- {plain(sentence)}" for sentence in self.sentences()]
        head = ("slot", "measure", plain(self.first), plain(self.second), "verdict")
        cells = [[f"`{plain(r[0])}`", *r[1:4], f"{_ICONS[r[4]]} {r[4]}"] for r in self.rows()]  # type: ignore[index]
        return "\n".join([*lines, "", *table(head, cells)]) + "\n"


def compare_statistics(
    first: Mapping[str, RowStatistics], second: Mapping[str, RowStatistics]
) -> tuple[ComparedMeasure, ...]:
    """Every slot that both have, measure by measure; a slot that only one has is a row that warns."""
    rows: list[ComparedMeasure] = []
    for slot in dict.fromkeys((*first, *second)):
        a, b = first.get(slot), second.get(slot)
        if a is None or b is None:
            sentence = f"`{slot}` is in one of the two only: there is nothing to compare it with."
            held = [None if s is None else float(s.rows) for s in (a, b)]
            rows.append(_measure(slot, "rows", held[0], held[1], "warn", sentence))
        else:
            rows += _slot(slot, a, b)
    return tuple(rows)


def compare_captures(
    first: Iterable[SlotSample], second: Iterable[SlotSample], *, dtypes: tuple[str, str], names: tuple[str, str]
) -> Comparison:
    """Read both captures once. `dtypes` are the stored dtypes, `names` what the captures are called.

    Sequences pair by their tokens, or by their ids where one's tokens begin like the other's; a few rows of up to
    `paired.SAMPLES` sequences of the first capture are kept in memory for that.
    """
    pairing = Pairing()
    a = _measured(first, dtypes[0], pairing.keep)
    b = _measured(second, dtypes[1], pairing.match)
    return Comparison(
        first=names[0],
        second=names[1],
        measures=compare_statistics(a, b),
        paired=pairing.slots(),
        paired_samples=pairing.samples,
    )


def _measured(
    samples: Iterable[SlotSample], dtype: str, look: Callable[[SlotSample], None]
) -> dict[str, RowStatistics]:
    measures: dict[str, RowMeasure] = {}
    for sample in samples:
        for label, state in sample.states.items():
            if label not in measures:
                measures[label] = RowMeasure(state.shape[-1], DTYPES[dtype])
            measures[label].see(state)
        look(sample)
    return {str(label): RowStatistics(**measure.measures()) for label, measure in measures.items()}


def _slot(slot: str, a: RowStatistics, b: RowStatistics) -> list[ComparedMeasure]:
    rows = [_measure(slot, "rows", a.rows, b.rows), _norms(slot, a, b)]
    rows += [
        _measure(slot, "5th percentile", a.p05_norm, b.p05_norm),
        _measure(slot, "95th percentile", a.p95_norm, b.p95_norm),
        _measure(slot, "largest norm", a.max_norm, b.max_norm),
    ]
    if a.spread and b.spread:
        rows += [
            _measure(slot, "std of a dimension", a.spread.mean_std, b.spread.mean_std),
            _measure(slot, "number of the largest dimension", a.spread.top_dimension, b.spread.top_dimension),
            _measure(slot, LARGEST_SHARE, a.spread.top_share, b.spread.top_share),
            _measure(slot, "dimensions 16 times above average", a.spread.massive, b.spread.massive),
            _measure(slot, "share of the squared length common to all rows", a.spread.mean_share, b.spread.mean_share),
        ]
    worse = b.nonfinite_rows and not a.nonfinite_rows
    sentence = f"`{slot}` has {b.nonfinite_rows} rows that are not finite in the second, none in the first."
    verdict: tuple[Verdict, str] = ("fail", sentence) if worse else ("pass", "")
    rows.append(_measure(slot, "rows not finite", a.nonfinite_rows, b.nonfinite_rows, *verdict))
    rows.append(_measure(slot, "rows near the maximum", a.near_max_rows, b.near_max_rows))
    return rows


def _norms(slot: str, a: RowStatistics, b: RowStatistics) -> ComparedMeasure:
    """The verdict on the size of the rows, in the row of the median."""
    first, second = (_quantiles(s) for s in (a, b))
    if first is None or second is None:
        verdict: Verdict = "pass" if first is second else "fail"
        sentence = "" if first is second else f"`{slot}` has no finite row, or only zeros, in one of the two."
        return _measure(slot, "median norm", a.median_norm, b.median_norm, verdict, sentence)
    ratios = [now / before for before, now in zip(first, second, strict=True)]
    ratio = ratios[1]
    told = f"The rows of `{slot}` are {ratio:.2f} times as large in the second"
    if min(ratios) >= GROSS or max(ratios) <= 1 / GROSS:
        sentence = (
            f"{told}: no change of domain does that. A scale, a final norm too many or too few, the embedding in a "
            "layer's place, or another layer far away: attribution tells which (`eagle3 dump attribute`)."
        )
        return _measure(slot, "median norm", a.median_norm, b.median_norm, "fail", sentence)
    if not 1 / DRIFT <= ratio <= DRIFT:
        sentence = f"{told}. Texts of another domain do this, and so does a neighbouring layer: norms cannot tell."
        return _measure(slot, "median norm", a.median_norm, b.median_norm, "warn", sentence)
    return _measure(slot, "median norm", a.median_norm, b.median_norm)


def _quantiles(s: RowStatistics) -> tuple[float, float, float] | None:
    if not s.p05_norm or not s.median_norm or not s.p95_norm:
        return None
    return s.p05_norm, s.median_norm, s.p95_norm


def _measure(
    slot: str, measure: str, first: float | None, second: float | None, verdict: Verdict = "pass", sentence: str = ""
) -> ComparedMeasure:
    return ComparedMeasure(slot=slot, measure=measure, first=first, second=second, verdict=verdict, sentence=sentence)


def _number(value: float | None, form: str = "{:.4g}") -> str:
    return "–" if value is None else form.format(value)
