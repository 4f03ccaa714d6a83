"""Which tensor of the target does a slot hold? Sampled rows against every boundary, by relative L2 distance.

The rule: a claim is proven where the claimed point is the nearest of all candidates, at most half as far as the next
one, and not farther than noise explains (`calibration`). Distances are medians over rows: a few rows of attention
sinks are a thousand times longer than the others and would decide a pooled distance, and in 16 bits single rows of a
mixture of experts jump by 60% where the routing flips.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.slots import SlotSample
from eagle3.errors import Eagle3Error
from eagle3.evidence import attribution_words as words
from eagle3.evidence.attributed import Attribution, Candidate, SampleFinding, SlotAttribution, SlotVerdict
from eagle3.evidence.calibration import Calibration
from eagle3.evidence.matching import (
    Matched,
    candidates,
    foreign_distance,
    match,
    reference_rows,
    scaled_fit,
    without_doubles,
)
from eagle3.evidence.references import CalibratedReference, Reference, TargetReference, WrongTarget

__all__ = [
    "Attribution",
    "Candidate",
    "NothingToCompare",
    "Reference",
    "SampleFinding",
    "SlotAttribution",
    "SlotSample",
    "TargetReference",
    "WrongTarget",
    "attribute",
]

MARGIN = 0.5
"""The nearest candidate may be at most this share as far as the next one. Measured, largest over all points: 2e-4 in
float32 (two engines); in bfloat16 0.09 (SmolLM2-135M, 30 layers; random ids the worst), 0.18 (tiny dense targets) and
0.30 (tiny mixtures of experts); with weights in int8 0.23, 0.29 and 0.49. In the tiny ones the closest pair is the
final norm once and twice."""
RESOLUTION = 1e-3
"""Tensors that differ by less are one: storage in bfloat16 alone moves a row by 0.0017."""
MIN_ROWS = 8
"""Fewer rows decide nothing; a sample with fewer is not judged by itself."""
NOWHERE = 3.0
"""A slot whose nearest candidate is farther than three times its bound holds none of the target's tensors; up to there
it could not be decided. Rows of other tokens are 0.4 to 1.4 away, rows of weights rounded naively to 4 bits 0.12."""
MIN_SCALING = 0.02
"""A factor nearer to 1 than this is no scaling; another one is where it at least halves the distance."""
MAX_NAMED = 8
"""Samples that are looked into one by one where their rows do not fit."""


class NothingToCompare(Eagle3Error, ValueError):
    """No sample of the dump is one that the reference knows."""


def attribute(
    samples: Iterable[SlotSample],
    claims: Mapping[str, CapturePoint | None],
    reference: Reference,
    *,
    dtype: str,
    model_class: str | None,
) -> Attribution:
    """Match every slot of the samples against every boundary of the reference.

    `claims` maps the label of each slot, in order, to the point that it claims to be (None: it claims nothing).
    `dtype` is that of the stored states; `model_class` that of the target, for the causes. Reads every sample to its
    end: hand in a bounded choice (`attribution_check.choose_samples`). Raises NothingToCompare, SlotsIncomplete,
    WrongTarget, and TargetError where the target cannot be loaded.
    """
    labels = tuple(claims)
    matched, calibration, wanted = _match_all(samples, labels, reference, dtype)
    slots = tuple(
        _judge_slot(slot, label, claims[label], matched, wanted, calibration) for slot, label in enumerate(labels)
    )
    profile = torch.cat([m.lengths for m in matched]).median(dim=0).values.tolist()
    return Attribution(
        reference=reference.name,
        num_layers=reference.num_layers,
        samples=len(matched),
        rows=sum(len(m.picks) for m in matched),
        slots=slots,
        misfits=tuple(_misfits(matched, slots, wanted, calibration, reference)),
        causes=words.causes(slots, num_layers=reference.num_layers, model_class=model_class),
        profile={c.point: length for c, length in zip(wanted, profile, strict=False) if not c.norms},
    )


def _match_all(
    samples: Iterable[SlotSample], labels: Sequence[str], reference: Reference, dtype: str
) -> tuple[list[Matched], Calibration, Sequence[Candidate]]:
    calibration = Calibration(dtype)
    matched: list[Matched] = []
    wanted: Sequence[Candidate] = ()
    asked = 0
    for sample in samples:
        asked += 1
        states = reference.states(sample.id, sample.input_ids)
        if states is None:
            continue
        if not wanted:
            with_norm = reference.norm(states[CapturePoint("norm")]) is not None
            wanted = candidates(reference.num_layers, with_norm=with_norm)
            wanted = without_doubles(wanted, reference_rows(states, reference, wanted))
        if calibration.missing_rows and isinstance(reference, CalibratedReference):
            calibration.add(states, reference.coarse_states(sample.input_ids[: calibration.missing_rows], dtype))
        matched.append(match(sample, labels, reference, reference_rows(states, reference, wanted), wanted))
    if not matched:
        raise NothingToCompare(
            f"none of the {asked} samples is one that the {reference.name} knows: nothing can be compared. Give the "
            "target's folder, or a probe that was made for this dump"
        )
    return matched, calibration, wanted


@dataclass(frozen=True)
class _Fit:
    """A candidate, and how far each row [rows] is from it; NaN where a row tells nothing."""

    candidate: Candidate
    rows: torch.Tensor

    @property
    def error(self) -> float:
        return float(self.rows.nanmedian())


def _fits(slot: int, matched: Sequence[Matched], wanted: Sequence[Candidate]) -> list[_Fit]:
    """Every unscaled candidate that enough rows can tell."""
    distances = torch.cat([m.distances[slot] for m in matched])  # [rows, C]
    fits = [_Fit(candidate, distances[:, place]) for place, candidate in enumerate(wanted)]
    return [f for f in fits if not f.candidate.shift or int((~f.rows.isnan()).sum()) >= MIN_ROWS]


def _scaled_fits(slot: int, matched: Sequence[Matched], wanted: Sequence[Candidate]) -> list[_Fit]:
    fits = []
    for place, candidate in enumerate(wanted):
        if candidate.shift:
            break
        factor, rows = scaled_fit(matched, slot, place)
        if abs(factor) < torch.inf and abs(factor - 1) >= MIN_SCALING:
            fits.append(_Fit(candidate.model_copy(update={"scale": float(f"{factor:.4g}")}), rows))
    return fits


def _judge_slot(
    slot: int,
    label: str,
    claimed: CapturePoint | None,
    matched: Sequence[Matched],
    wanted: Sequence[Candidate],
    calibration: Calibration,
) -> SlotAttribution:
    # Of equals the claimed one comes first.
    fits = sorted(_fits(slot, matched, wanted), key=lambda fit: (fit.error, fit.candidate != _claim(claimed)))
    plain = {f.candidate.point: f.error for f in fits if not f.candidate.shift and not f.candidate.norms}
    scaled = sorted(_scaled_fits(slot, matched, wanted), key=lambda fit: fit.error)
    if scaled and scaled[0].error <= min(calibration.bound(scaled[0].candidate), MARGIN * fits[0].error):
        fits = sorted([*scaled, *(f for f in fits if f.candidate.shift)], key=lambda fit: fit.error)
    if fits[0].error > calibration.bound(fits[0].candidate):
        fits.sort(key=lambda fit: not _fits_in_part(fit, matched, calibration.bound(fit.candidate)))
    found, runner_up = fits[0], fits[1]
    bound = calibration.bound(found.candidate)
    loose = loosely(bound, runner_up.error)
    facts = words.SlotFacts(
        label=label,
        claimed=claimed,
        found=found.candidate,
        error=found.error,
        claimed_error=None if claimed is None else plain[claimed],
        runner_up=runner_up.candidate,
        runner_up_error=runner_up.error,
        bound=bound,
        rows=len(found.rows),
        rows_needed=MIN_ROWS,
        untold_shifts=tuple(sorted({c.shift for c in wanted} - {f.candidate.shift for f in fits})),
        misfitting_thirds=_misfitting_thirds(found, matched, bound, loose),
    )
    verdict, sentence = _verdict(facts)
    return SlotAttribution(
        label=label,
        claimed=claimed,
        found=found.candidate,
        error=found.error,
        claimed_error=facts.claimed_error,
        runner_up=runner_up.candidate,
        runner_up_error=runner_up.error,
        bound=bound,
        rows_fitting=float((found.rows[~found.rows.isnan()] <= loose).float().mean()),
        verdict=verdict,
        errors={point: plain[point] for point in sorted(plain, key=_depth)},
        sentence=sentence,
    )


def loosely(bound: float, runner_up_error: float) -> float:
    """The distance up to which a single row, sample or third of the samples still fits what the slot is."""
    return max(2 * bound, MARGIN * runner_up_error)


def _verdict(facts: words.SlotFacts) -> tuple[SlotVerdict, str]:
    as_claimed = facts.claimed is None or facts.found == _claim(facts.claimed)
    far_from_claim = facts.claimed_error is not None and _told_apart(facts.error, facts.claimed_error)
    clear = _told_apart(facts.error, facts.runner_up_error)
    rules: tuple[tuple[bool, SlotVerdict, Callable[[words.SlotFacts], str]], ...] = (
        (facts.rows < MIN_ROWS, "undecided", words.too_few),
        (bool(facts.misfitting_thirds), "refuted", words.partly),
        (facts.error > NOWHERE * facts.bound, "refuted", words.nowhere),
        (facts.error > facts.bound, "undecided", words.not_near_enough),
        (not as_claimed and far_from_claim, "refuted", words.refuted),
        (not as_claimed or not clear, "undecided", words.nearly_equal),
        (bool(facts.untold_shifts), "undecided", words.shifts_untold),
    )
    for applies, verdict, sentence in rules:
        if applies:
            return verdict, sentence(facts)
    return "proven", words.proven(facts)


def _claim(claimed: CapturePoint | None) -> Candidate | None:
    return None if claimed is None else Candidate(point=claimed)


def _told_apart(error: float, other: float) -> bool:
    return error <= MARGIN * other and other > RESOLUTION


def _misfitting_thirds(found: _Fit, matched: Sequence[Matched], bound: float, loose: float) -> tuple[int, ...]:
    """Of 0, 1 and 2: the thirds of the samples' rows that do not fit although another third does.

    A prefix cache or chunked prefill spoils the beginning of samples, or most of them; a cut request their end.
    """
    if not _fits_in_part(found, matched, bound):
        return ()
    return tuple(third for third, error in _errors_of_thirds(found, matched).items() if error > loose)


def _fits_in_part(fit: _Fit, matched: Sequence[Matched], bound: float) -> bool:
    return any(error <= bound for error in _errors_of_thirds(fit, matched).values())


def _errors_of_thirds(fit: _Fit, matched: Sequence[Matched]) -> dict[int, float]:
    """Median error of each third of the samples' rows; of a third with too few rows nothing."""
    places = torch.cat([torch.arange(len(m.picks)) * 3 // len(m.picks) for m in matched])
    thirds = {third: fit.rows[places == third] for third in range(3)}
    return {third: float(rows.nanmedian()) for third, rows in thirds.items() if len(rows) >= MIN_ROWS}


def _misfits(
    matched: Sequence[Matched],
    slots: Sequence[SlotAttribution],
    wanted: Sequence[Candidate],
    calibration: Calibration,
    reference: Reference,
) -> Iterable[SampleFinding]:
    """Samples whose rows lie elsewhere than those of the other samples."""
    named = 0
    for place, slot in enumerate(slots):
        if slot.found.scale != 1 or slot.error > slot.bound:
            continue  # no common tensor that a sample could be compared with
        column = wanted.index(slot.found)
        for one in matched:
            rows = one.distances[place, :, column]
            error = float(rows.nanmedian())
            if len(rows) < MIN_ROWS or not error > loosely(slot.bound, slot.runner_up_error):
                continue
            medians = one.distances[place].nanmedian(dim=0).values.nan_to_num(torch.inf)
            own = wanted[int(medians.argmin())]
            explained = str(own) if float(medians.min()) <= calibration.bound(own) else None
            if explained is None and named < MAX_NAMED:
                explained = _owner(one, slot, matched, calibration, reference)
            named += 1
            yield SampleFinding(
                sample=one.sample.id,
                label=slot.label,
                error=error,
                sentence=words.misfit(one.sample.id, slot, error, explained),
            )


def _owner(
    one: Matched, slot: SlotAttribution, matched: Sequence[Matched], calibration: Calibration, reference: Reference
) -> str | None:
    """The sample, among those that were looked at, whose rows these are."""
    for other in matched:
        states = None if other is one else reference.states(other.sample.id, other.sample.input_ids)
        if states is None:
            continue
        rows = states[slot.found.point]
        distance = foreign_distance(one.sample, slot.label, reference, rows, len(one.sample.input_ids))
        if distance <= calibration.bound(slot.found):
            return f"{slot.found.point} of sample {other.sample.id!r}"
    return None


def _depth(point: CapturePoint) -> float:
    return float("inf") if point.boundary is None else point.boundary
