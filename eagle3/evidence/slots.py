"""Is a slot what its name says? Exact questions: two slots that are one, the embedding, the final norm."""

from collections.abc import Iterable
from itertools import combinations

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.evidence.examination import Findings, spread
from eagle3.evidence.report import Check, Verdict

ROWS_PER_SAMPLE = 16
EMBED_ERROR = 0.01
"""Relative L2 distance up to which a row is the embedding: above rounding to 16 bits, far below any layer's work."""
NORMED_BAND = 0.02
"""A row x = w * u of an RMS norm has RMS(x / w) = 1; rounding to 16 bits moves the RMS by far less than this."""
ALMOST_ALL, MOST, ALMOST_NONE = 0.99, 0.5, 0.01


class DistinctSlots:
    """`distinct_slots`: no two capture points hold the same tensor."""

    def __init__(self, manifest: Manifest) -> None:
        self._pairs = list(combinations(manifest.spec.points, 2))
        self._same = Findings()
        self._blamed: dict[CapturePoint, None] = {}  # a set that keeps its order
        self._samples = 0

    def see(self, sample: Sample) -> None:
        self._samples += 1
        for a, b in self._pairs:
            one, other = sample.states[a], sample.states[b]
            if torch.equal(one[0], other[0]) and torch.equal(one, other):
                self._same.add(f"{a} and {b} in sample {sample.id!r}")
                self._blamed |= dict.fromkeys((a, b))

    def conclude(self) -> list[Check]:
        sentence = "The slots differ from each other."
        if self._same.count:
            sentence = (
                f"Two slots hold the same values: {self._same}. One state was written under two names: look at how "
                "the capture is split into slots, and extract again."
            )
        return [
            Check(
                name="distinct_slots",
                verdict="fail" if self._same.count else "pass",
                value=f"{self._same.count} equal pairs in {self._samples} samples",
                threshold="0",
                sentence=sentence,
                points=tuple(self._blamed),
            )
        ]


class Embed:
    """`embed`: a slot is the target's embedding where its name says so, and nowhere else. Compared row by row."""

    def __init__(self, manifest: Manifest, embedding: torch.Tensor | None) -> None:
        """`embedding` [V, H]: what the embedding module puts out for each id (a scale, if any, applied)."""
        self._hidden_size, self._embedding = manifest.target.hidden_size, embedding
        self._equal = {point: 0 for point in manifest.spec.points if point != "norm"}
        self._rows = 0

    def see(self, sample: Sample) -> None:
        if not self._usable():
            return
        assert self._embedding is not None
        ids = sample.input_ids
        rows = spread(0, len(ids), ROWS_PER_SAMPLE)
        rows = rows[(ids[rows] >= 0) & (ids[rows] < len(self._embedding))]
        expected = self._embedding[ids[rows]].float()  # [picked, H]
        self._rows += len(rows)
        for point in self._equal:
            distance = (sample.states[point][rows].float() - expected).norm(dim=-1)
            self._equal[point] += int((distance <= EMBED_ERROR * expected.norm(dim=-1)).sum())

    def conclude(self) -> list[Check]:
        declared = "embed" in self._equal
        if not self._usable() or not self._rows:
            why = "the target's embedding was not given"
            if self._embedding is not None:
                why = f"the embedding is {list(self._embedding.shape)}, the dump's states are {self._hidden_size} wide"
            return [
                self._check(
                    "fail" if declared or self._embedding is not None else "warn",
                    "not measured",
                    f"No slot was compared with the embedding: {why}. Validate again with the target's own folder.",
                )
            ]
        shares = {point: equal / self._rows for point, equal in self._equal.items()}
        value = ", ".join(f"{point} {share:.1%}" for point, share in shares.items()) + f" of {self._rows} rows"
        wrong: dict[CapturePoint, str] = {}
        for point, share in shares.items():
            if point == "embed" and share < ALMOST_ALL:
                wrong[point] = (
                    f"the slot is labelled `embed`, but only {share:.1%} of its rows are the embedding of their "
                    "tokens: it is a layer's output under a wrong label"
                )
            if point != "embed" and share > ALMOST_NONE:
                wrong[point] = (
                    f"the slot is labelled `{point}`, but {share:.1%} of its rows are the target's embedding, bare of "
                    "any layer"
                )
        if not wrong:
            return [self._check("pass", value, "The embedding is where a name says `embed`, and nowhere else.")]
        return [
            self._check(
                "fail",
                value,
                f"A label and the data disagree: {'; '.join(wrong.values())}. A drafter trained on this and served "
                "with the layers that the label names loses half its acceptance or more. Do not move the serving "
                "config to the label: find which ids the engine was sent (`eagle3 layers` says what they mean there), "
                "and extract again.",
                wrong,
            )
        ]

    def _usable(self) -> bool:
        table = self._embedding
        return table is not None and table.ndim == 2 and table.shape[1] == self._hidden_size

    def _check(self, verdict: Verdict, value: str, sentence: str, points: Iterable[CapturePoint] = ()) -> Check:
        threshold = f"`embed` at least {ALMOST_ALL:.0%}, every other slot at most {ALMOST_NONE:.0%}"
        return Check(
            name="embed",
            verdict=verdict,
            value=value,
            threshold=threshold,
            sentence=sentence,
            points=tuple(points),
        )


class FinalNorm:
    """`final_norm`: `norm` has been through the target's final norm, and no other slot has.

    A row x = w * u of an RMS norm satisfies RMS(x / w) = 1 exactly, whatever the row. This tells a state that was never
    normed. It cannot tell one that was normed twice, w * norm(w * u), which satisfies it too: that is left to
    `final_state` (as far as w is uneven enough to change tokens) and to recomputation with the target.
    """

    def __init__(self, manifest: Manifest, final_norm: torch.Tensor) -> None:
        """`final_norm` [H]: the factor that multiplies the normalised row (Gemma's 1 + weight, not its weight)."""
        self._hidden_size = manifest.target.hidden_size
        self._weight = final_norm.float()
        self._normed = dict.fromkeys(manifest.spec.points, 0)
        self._rms = dict.fromkeys(manifest.spec.points, 0.0)
        self._rows = 0

    def see(self, sample: Sample) -> None:
        if self._obstacle():
            return
        rows = spread(0, len(sample.input_ids), ROWS_PER_SAMPLE)
        self._rows += len(rows)
        for point in self._normed:
            rms = (sample.states[point][rows].float() / self._weight).square().mean(dim=-1).sqrt()  # [picked]
            self._normed[point] += int(((rms - 1).abs() <= NORMED_BAND).sum())
            self._rms[point] += float(rms.nan_to_num(0.0, 0.0).sum())

    def conclude(self) -> list[Check]:
        obstacle = self._obstacle() or ("" if self._rows else "no rows were read")
        if obstacle:
            return [
                self._check("fail", "not measured", f"Whether the final norm was applied is not known: {obstacle}.")
            ]
        wrong: dict[CapturePoint, str] = {}
        for point, normed in self._normed.items():
            share = normed / self._rows
            if point == "norm" and share < ALMOST_ALL:
                wrong[point] = (
                    f"`norm` has not been through the target's final norm in {1 - share:.0%} of its rows. The engine "
                    "hands out the state before the norm (vLLM does), or the norm is another checkpoint's. Record the "
                    "final state as the last layer's output, or apply the norm once"
                )
            if point != "norm" and share > MOST:
                wrong[point] = (
                    f"`{point}` has already been through the final norm in {share:.0%} of its rows. The last of "
                    "transformers' hidden_states is the normed one: take the layer's own output"
                )
        value = ", ".join(f"{point} {self._rms[point] / self._rows:.3g}" for point in self._normed)
        if wrong:
            return [self._check("fail", value, f"{'; '.join(wrong.values())}; then extract again.", wrong)]
        sentence = "`norm` has been through the final norm at least once (see final_state for twice), and no slot has."
        if CapturePoint("norm") not in self._normed:
            sentence = "No slot has been through the final norm, as their names say."
        return [self._check("pass", value, sentence)]

    def _obstacle(self) -> str:
        if tuple(self._weight.shape) != (self._hidden_size,):
            return f"the norm's weight is {list(self._weight.shape)}, the dump's states are {self._hidden_size} wide"
        if not bool(self._weight.isfinite().all() and (self._weight != 0).all()):
            return "the norm's weight holds zeros or values that are not finite"
        return ""

    def _check(self, verdict: Verdict, value: str, sentence: str, points: Iterable[CapturePoint] = ()) -> Check:
        threshold = f"RMS(state / norm weight) = 1 ± {NORMED_BAND:g} for `norm`, and for no other slot"
        return Check(
            name="final_norm",
            verdict=verdict,
            value=value,
            threshold=threshold,
            sentence=sentence,
            points=tuple(points),
        )
