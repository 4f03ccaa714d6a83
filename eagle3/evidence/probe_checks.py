"""What a probe proves: it counts the target's boundaries from both ends, and says which of them each slot really is.

The anchors need no model, only two tensors of the checkpoint: what the hooks call `embed` must be the embedding of the
tokens, what they call `norm` must be the final norm of what they call the last layer. Between these ends the hooks sit
on the decoder layers one by one, so the count in between cannot slip. Then every slot of the dump's own path is
compared with all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.probe import Probe
from eagle3.dump.reader import Sample
from eagle3.evidence.attribution import MARGIN, told_apart
from eagle3.evidence.nearest import UNDEFINED, Nearest, nearest
from eagle3.evidence.report import Check, Verdict

NAME = "probe"
ANCHOR_ERROR = 0.02
"""Largest relative L2 error, median over rows, of `embed` and `norm` against the checkpoint. Measured on servers with
SmolLM2 and tiny targets: `embed` 0 in float32 and bfloat16, `norm` 0 in float32 and 0.0022 to 0.0023 in bfloat16. One
boundary off is 0.37 to 0.78 at the norm (a norm applied twice 0.73), 11 to 16 at the embedding."""
PROJECTED_ERROR = 1e-3
"""Projections are made from the rows in float32: this is far above rounding, far below any other tensor."""
Remedy = Literal["layers", "target", "capture", "files"]
_REMEDIES: Mapping[Remedy, str] = {
    "layers": "Where ids are wrong, `eagle3 layers` says what they mean in the server's version; then extract again.",
    "target": "Give the folder of the target that was served, or extract again.",
    "capture": "Look at what handles the rows on their way from the server into the dump, and extract again.",
    "files": "Fetch the dump and its probe again, or extract again.",
}


def delivered(probe: Probe) -> tuple[Nearest, ...]:
    """What the dump's path delivered in the probe's own passes, slot by slot, and the final state."""
    lengths = [sequence.tokens for sequence, _ in probe.spans()]
    return tuple(
        nearest(probe.project(rows), p, probe.projections, probe, lengths) for p, rows in probe.captured.items()
    )


@dataclass(frozen=True)
class ComparedProbes:
    """Two probes on the sequences that both hold: each boundary of the one against every boundary of the other."""

    rows: int
    boundaries: tuple[Nearest, ...]


def compare_probes(probe: Probe, other: Probe) -> ComparedProbes:
    """Hold `probe` against `other`. DumpError where they have no rows, or no space, in common."""
    space = (probe.info.num_layers, probe.info.hidden_size, probe.info.dims, probe.info.seed)
    theirs = (other.info.num_layers, other.info.hidden_size, other.info.dims, other.info.seed)
    if space != theirs:
        raise DumpError(
            f"the probes cannot be compared: {space[0]} layers of width {space[1]} (seed {space[3]}) here, {theirs[0]} "
            f"of width {theirs[1]} (seed {theirs[3]}) there. They are of different targets"
        )
    known = {(s.kind, s.id): span for s, span in other.spans()}
    pairs = [(span, known[s.kind, s.id]) for s, span in probe.spans() if (s.kind, s.id) in known]
    pairs = [(a, b) for a, b in pairs if torch.equal(probe.input_ids[a], other.input_ids[b])]
    if not pairs:
        raise DumpError("the probes have no sequence in common: their tokenizers differ, so the targets do")
    mine = torch.cat([probe.projections[:, a] for a, _ in pairs], dim=1)
    boundaries = torch.cat([other.projections[:, b] for _, b in pairs], dim=1)
    lengths = [span.stop - span.start for span, _ in pairs]
    points = probe.info.points
    found = tuple(nearest(mine[place], point, boundaries, other, lengths) for place, point in enumerate(points))
    return ComparedProbes(rows=mine.shape[1], boundaries=found)


@dataclass
class _Faults:
    """What is wrong, what cannot be told, the points that are concerned, and what to do."""

    sentences: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    points: dict[CapturePoint, None] = field(default_factory=dict)  # sets that keep their order
    remedies: dict[Remedy, None] = field(default_factory=dict)

    def add(self, remedy: Remedy, sentence: str, *points: CapturePoint) -> None:
        self.sentences.append(sentence)
        self.remedies[remedy] = None
        self.points |= dict.fromkeys(points)

    def doubt(self, sentence: str, point: CapturePoint) -> None:
        self.doubts.append(sentence)
        self.points[point] = None


def check_probe(
    probe: Probe, *, embedding: torch.Tensor | None, final_norm: torch.Tensor, rms_norm_eps: float
) -> Check:
    """`probe`, as far as the probe alone tells: both anchors, and what the dump's path delivered beside it.

    embedding [V, H] and final_norm [H] are the checkpoint's own; without the embedding the check warns.
    """
    faults, value = _examine(probe, embedding, final_norm, rms_norm_eps)
    right = "Every slot is the boundary that it is called, counted from both ends."
    return _check(faults, value, right, embed=embedding is not None)


def _examine(probe: Probe, embedding: torch.Tensor | None, final_norm: torch.Tensor, eps: float) -> tuple[_Faults, str]:
    """What the probe alone tells; and what was measured, in words."""
    faults = _Faults()
    value = _anchors(probe, faults, embedding, final_norm, eps)
    slots = delivered(probe)
    _judge_slots(slots, faults, "Asked for", "the server delivered")
    return faults, f"{value}; {_errors_of(slots)}"


class ProbeRows:
    """`probe`: the probe's own anchors, and the dump's rows of the samples that are in the probe, point by point."""

    def __init__(
        self,
        manifest: Manifest,
        probe: Probe | None,
        *,
        embedding: torch.Tensor | None,
        final_norm: torch.Tensor,
        rms_norm_eps: float,
        unreadable: str = "",
    ) -> None:
        """`probe` None: the dump has none, or, with a reason in `unreadable`, it is broken."""
        self._points, self._probe, self._unreadable = manifest.spec.points, probe, unreadable
        self._embed = embedding is not None
        self._faults, self._value = _examine(probe, embedding, final_norm, rms_norm_eps) if probe else (_Faults(), "")
        self._spans = {s.id: span for s, span in probe.spans() if s.kind == "sample"} if probe else {}
        self._rows: list[tuple[slice, Mapping[CapturePoint, torch.Tensor]]] = []
        self._foreign: list[str] = []

    def see(self, sample: Sample) -> None:
        span = self._spans.pop(sample.id, None)
        if span is None or self._probe is None:
            return
        ids = self._probe.input_ids[span]
        if not torch.equal(sample.input_ids[: len(ids)], ids):
            self._foreign.append(sample.id)
            return
        rows = {point: self._probe.project(sample.states[point][: len(ids)]) for point in self._points}
        self._rows.append((span, rows))

    def conclude(self) -> list[Check]:
        if self._probe is None:
            if self._unreadable:
                return [_result("fail", "not measured", f"The probe cannot be used: {self._unreadable}", ())]
            sentence = (
                "This dump has no probe: which boundary each slot is stands on the checks beside this one, and it "
                "cannot be attributed later without the target. Extract with a server that has the tap 1.1.0 or later."
            )
            return [_result("warn", "not measured", sentence, ())]
        faults, value = self._faults, self._value
        self._judge_samples(faults)
        if self._rows:
            boundaries = torch.cat([self._probe.projections[:, span] for span, _ in self._rows], dim=1)
            lengths = [span.stop - span.start for span, _ in self._rows]
            slots = [
                nearest(torch.cat([rows[p] for _, rows in self._rows]), p, boundaries, self._probe, lengths)
                for p in self._points
            ]
            _judge_slots(slots, faults, "The dump calls a slot", "but on the probe's samples its rows are")
            value += f"; {len(self._rows)} samples of the dump: {_errors_of(slots)}"
        right = "Each slot is the boundary that it is called, in the probe and in the dump."
        return [_check(faults, value, right, embed=self._embed)]

    def _judge_samples(self, faults: _Faults) -> None:
        if self._foreign:
            faults.add(
                "files",
                f"Other tokens stand under sample {', '.join(self._foreign)} than when it was probed: samples were "
                "exchanged or renamed after the capture",
            )
        if self._spans:
            faults.add("files", f"The probe was made with samples that the dump lacks: {', '.join(self._spans)}")


def _anchors(
    probe: Probe, faults: _Faults, embedding: torch.Tensor | None, final_norm: torch.Tensor, eps: float
) -> str:
    """Both ends of the target against the checkpoint; what was measured, in words."""
    first, last, norm = probe.info.points[0], probe.info.points[-2], probe.info.points[-1]
    embed_error: float | None = None
    if embedding is not None:
        embed_error = _error(probe.rows[first], _embedded(probe, embedding))
        if embed_error > ANCHOR_ERROR:
            faults.add(
                "target",
                f"What goes into the first decoder layer is not the embedding of the tokens (relative error "
                f"{embed_error:.2g}): the server has other weights than this target, or its layers are not counted "
                "from the embedding on",
                first,
            )
    norm_error = _error(probe.rows[norm], _normed(probe.rows[last], final_norm, eps))
    if norm_error > ANCHOR_ERROR:
        faults.add(
            "target",
            f"The final state is not the final norm of the last layer's output (relative error {norm_error:.2g}): the "
            "server has another final norm than this target, or more layers follow the one that was taken for the last",
            norm,
        )
    kept = torch.stack([probe.project(rows) for rows in probe.rows.values()])
    places = [probe.info.points.index(point) for point in probe.rows]
    if not torch.allclose(
        kept, probe.projections[places], rtol=PROJECTED_ERROR, atol=PROJECTED_ERROR * float(kept.abs().max())
    ):
        faults.add("files", "The probe's projections are not those of its rows: the file was put together from two")
    shown = "not compared" if embed_error is None else f"{embed_error:.1e}"
    return f"embed {shown}, norm {norm_error:.1e}"


def _embedded(probe: Probe, embedding: torch.Tensor) -> torch.Tensor:
    """The table's rows of the probe's tokens [T, H]; rows of NaN where the table does not fit."""
    ids = probe.input_ids
    if embedding.ndim != 2 or embedding.shape[1] != probe.info.hidden_size or int(ids.max()) >= len(embedding):
        return torch.full((len(ids), probe.info.hidden_size), torch.nan)
    return embedding[ids].to(probe.rows[CapturePoint("embed")].dtype)


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if tuple(weight.shape) != tuple(rows.shape[1:]):
        return torch.full(rows.shape, torch.nan)
    x = rows.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _error(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """Median over rows of |row - expected| / |expected|."""
    distance = (rows.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(distance.nan_to_num(UNDEFINED, UNDEFINED).median())


def _judge_slots(slots: Sequence[Nearest], faults: _Faults, asked: str, came: str) -> None:
    for slot in slots:
        if slot.fits:
            continue
        begin = f"{asked} {slot.claimed}, {came}"
        if slot.scattered:
            faults.add(
                "capture",
                f"{begin} {slot.point} in only {slot.fitting:.0%} of the rows; the others were overwritten, left empty "
                "or mixed with other rows",
                slot.claimed,
            )
        elif slot.untold:
            other, error = next(
                (point, error)
                for point, error in ((slot.point, slot.error), (slot.runner_up, slot.runner_up_error))
                if point != slot.claimed
            )
            faults.doubt(
                f"{begin} {slot.claimed} or {other}, which are nearly equal in this target (relative errors "
                f"{slot.claimed_error:.2g} and {error:.2g}): no probe tells them apart",
                slot.claimed,
            )
        elif slot.altered:
            what = "a capture that cuts rows elsewhere" if slot.altered.shift else "a scale that was not undone"
            faults.add("capture", f"{begin} {slot.altered}: {what}", slot.claimed)
        elif slot.point == slot.claimed or not slot.is_one:
            far = "rows of zeros, NaN or infinity" if slot.error >= UNDEFINED else f"{slot.error:.2g} away at the least"
            faults.add(
                "capture",
                f"{begin} none of the target's boundaries ({far}): damaged rows, or those of other tokens or other "
                "weights",
                slot.claimed,
            )
        else:
            told = told_apart(slot.error, slot.runner_up_error)
            what = str(slot.point) if told else f"{slot.point} or {slot.runner_up}"
            faults.add(
                "layers",
                f"{begin} {what} (relative error {slot.error:.2g}, to {slot.claimed} {slot.claimed_error:.2g})",
                slot.claimed,
            )


def _errors_of(slots: Sequence[Nearest]) -> str:
    return ", ".join(f"{slot.claimed} {slot.claimed_error:.1e}" for slot in slots)


def _check(faults: _Faults, value: str, right: str, *, embed: bool) -> Check:
    """`embed`: the embedding was compared too."""
    points = tuple(faults.points)
    if faults.sentences:
        remedies = " ".join(_REMEDIES[remedy] for remedy in faults.remedies)
        return _result("fail", value, f"{'; '.join((*faults.sentences, *faults.doubts))}. {remedies}", points)
    if faults.doubts:
        return _result("warn", value, f"{'; '.join(faults.doubts)}.", points)
    if not embed:
        right = "Each slot is the boundary that it is called, but `embed` was not compared."
    return _result("pass" if embed else "warn", value, right, points)


def _result(verdict: Verdict, value: str, sentence: str, points: tuple[CapturePoint, ...]) -> Check:
    threshold = f"embed and norm within {ANCHOR_ERROR:g}; each slot at most {MARGIN:g} of the way to any other boundary"
    return Check(name=NAME, verdict=verdict, value=value, threshold=threshold, sentence=sentence, points=points)
