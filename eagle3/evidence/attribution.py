"""Which tensor of the target does a slot hold? Sampled rows against every boundary, by relative L2 distance.

The rule: a claim is proven where the claimed point is the nearest of all candidates, at most half as far as the next
one, and not farther than noise explains (`calibration`), and nine of ten rows fit one by one, over all and in each
group: prompts, answers, thirds. Distances are medians over rows: a few rows of attention sinks are a thousand times
longer than the others and would decide a pooled distance, and in 16 bits single rows of a mixture of experts jump by
60% where the routing flips.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds
from eagle3.dump.slots import SlotSample
from eagle3.errors import Eagle3Error
from eagle3.evidence import attribution_words as words
from eagle3.evidence.attributed import Attribution, Candidate, SampleFinding, SlotAttribution, SlotVerdict
from eagle3.evidence.calibration import CALM, Calibration
from eagle3.evidence.even_lengths import evened_fits
from eagle3.evidence.fitting import (
    HALF,
    MIN_ROWS,
    Fit,
    elsewhere,
    fits_in_part,
    groups_of,
    plain_fits,
    scaled_fits,
    shares,
    spoilt,
)
from eagle3.evidence.matching import (
    Matched,
    candidates,
    foreign_distance,
    match,
    reference_rows,
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
final norm once and twice. In a probe, SmolLM2: slot against hooks of the same pass 0, a bfloat16 server against a
float32 one 0.004 to 0.016 of a row at every boundary, the next boundary 0.22 away or more."""
RESOLUTION = 1e-3
"""Tensors that differ by less are one: storage in bfloat16 alone moves a row by 0.0017."""
SLACK = 0.3
"""By so much the share of one sample's rows that fit may lie lower than that of all samples, and twice that in a group
of them: routing flips come in runs. Measured, lowest in clean 16-bit mixtures of experts: 0.71 of a sample, 0.38 of a
third of its rows; in dense targets 0.92 of a group."""
NOWHERE = 3.0
"""A slot whose nearest candidate is farther than three times its bound holds none of the target's tensors; up to there
it could not be decided. Rows of other tokens are 0.4 to 1.4 away, rows of weights rounded naively to 4 bits 0.12."""
COARSER = 2.0
"""Rows that are more than this many times as far as the dtype's own arithmetic explains are coarser than it."""
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
    sent: EngineIds | None = None,
) -> Attribution:
    """Match every slot of the samples against every boundary of the reference.

    `claims` maps the label of each slot, in order, to the point that it claims to be (None: it claims nothing).
    `dtype` is that of the stored states; `model_class` that of the target and `sent` the ids that the engine was given,
    for the causes. Reads every sample to its end: hand in a bounded choice (`attribution_check.choose_samples`). Raises
    NothingToCompare, SlotsIncomplete, WrongTarget, and TargetError where the target cannot be loaded.
    """
    labels = tuple(claims)
    matched, calibration, wanted = _match_all(samples, labels, reference, dtype)
    judged = [
        _judge_slot(slot, label, claims[label], matched, wanted, calibration) for slot, label in enumerate(labels)
    ]
    slots = tuple(one.slot for one in judged)
    profile = torch.cat([m.lengths for m in matched]).median(dim=0).values.tolist()
    return Attribution(
        reference=reference.name,
        num_layers=reference.num_layers,
        samples=len(matched),
        rows=sum(len(m.picks) for m in matched),
        answer_rows=sum(int(m.answers.sum()) for m in matched),
        slots=slots,
        misfits=tuple(_misfits(matched, judged, wanted, calibration, reference)),
        remarks=tuple(words.coarser(o.slot, own) for o in judged if (own := _coarser(o, calibration)) is not None),
        causes=words.causes(slots, num_layers=reference.num_layers, model_class=model_class, sent=sent),
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
            ids = sample.input_ids[: calibration.missing_rows]
            coarse = reference.coarse_states(ids, dtype)
            own = reference.coarse_states(ids, dtype, int8=False) if reference.dtype == torch.float32 else None
            calibration.add(states, coarse, own)
        matched.append(match(sample, labels, reference, reference_rows(states, reference, wanted), wanted))
    if not matched:
        raise NothingToCompare(
            f"none of the {asked} samples is one that the {reference.name} knows: nothing can be compared. Give the "
            "target's folder, or a probe that was made for this dump"
        )
    return matched, calibration, wanted


@dataclass(frozen=True)
class _Judged:
    """A slot, the fit that it was judged by, and the places of the samples whose rows do not follow it."""

    slot: SlotAttribution
    fit: Fit
    odd: tuple[int, ...]


def _judge_slot(
    slot: int,
    label: str,
    claimed: CapturePoint | None,
    matched: Sequence[Matched],
    wanted: Sequence[Candidate],
    calibration: Calibration,
) -> _Judged:
    groups = groups_of(matched)
    # Of equals the claimed one comes first.
    fits = sorted(plain_fits(slot, matched, wanted), key=lambda fit: (fit.error, fit.candidate != _claim(claimed)))
    plain = {f.candidate.point: f.error for f in fits if not f.candidate.shift and not f.candidate.norms}
    for fits_of in (scaled_fits, evened_fits):
        altered = fits_of(slot, matched, wanted, MIN_SCALING)
        best = min(altered, key=lambda fit: fit.error, default=None)
        if best and best.error <= min(calibration.bound(best.candidate), MARGIN * fits[0].error):
            fits = sorted([*altered, *(f for f in fits if f.candidate.shift)], key=lambda fit: fit.error)
    if fits[0].error > calibration.bound(fits[0].candidate):
        fits.sort(key=lambda fit: not fits_in_part(fit.rows, groups, calibration.bound(fit.candidate)))
    found, runner_up = fits[0], fits[1]
    bound = calibration.bound(found.candidate)
    loose = loosely(bound, runner_up.error)
    least_share = partial(calibration.least_share, found.candidate, loose)
    odd = _odd_samples(found, matched, loose, least_share)
    followed = torch.cat([torch.full((len(m.picks),), place not in odd) for place, m in enumerate(matched)])
    share = shares(found.rows, {"all": followed} | {name: mask & followed for name, mask in groups.items()}, loose)
    astray = followed & (found.rows > loose)
    there = elsewhere(slot, matched, astray)[:1]
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
        spoilt=spoilt(share) if fits_in_part(found.rows, groups, bound) else (),
        share={name: part.fitting for name, part in share.items()},
        too_few_fit=any(part.fitting < least_share(part.rows) for part in share.values()),
        elsewhere=next((wanted[i] for i, error in there if error <= calibration.bound(wanted[i])), None),
    )
    verdict, sentence = _verdict(facts)
    judged = SlotAttribution(
        label=label,
        claimed=claimed,
        found=found.candidate,
        error=found.error,
        claimed_error=facts.claimed_error,
        claimed_bound=None if claimed is None else calibration.bound(Candidate(point=claimed)),
        runner_up=runner_up.candidate,
        runner_up_error=runner_up.error,
        bound=bound,
        rows_fitting=float((found.rows[~found.rows.isnan()] <= loose).float().mean()),
        verdict=verdict,
        errors={point: plain[point] for point in sorted(plain, key=_depth)},
        sentence=sentence,
    )
    return _Judged(judged, found, odd)


def told_apart(error: float, other: float) -> bool:
    """Rows this far from one tensor are not the other one, which is that far away."""
    return error <= MARGIN * other and other > RESOLUTION


def loosely(bound: float, runner_up_error: float) -> float:
    """The distance up to which a single row, sample or third of the samples still fits what the slot is."""
    return max(2 * bound, MARGIN * runner_up_error)


def _verdict(facts: words.SlotFacts) -> tuple[SlotVerdict, str]:
    as_claimed = facts.claimed is None or facts.found == _claim(facts.claimed)
    far_from_claim = facts.claimed_error is not None and told_apart(facts.error, facts.claimed_error)
    clear = told_apart(facts.error, facts.runner_up_error)
    rules: tuple[tuple[bool, SlotVerdict, Callable[[words.SlotFacts], str]], ...] = (
        (facts.rows < MIN_ROWS, "undecided", words.too_few),
        (bool(facts.spoilt), "refuted", words.partly),
        (facts.error > NOWHERE * facts.bound, "refuted", words.nowhere),
        (facts.error > facts.bound, "undecided", words.not_near_enough),
        (not as_claimed and far_from_claim, "refuted", words.refuted),
        (facts.too_few_fit, "refuted", words.scattered),
        (not as_claimed or not clear, "undecided", words.nearly_equal),
        (bool(facts.untold_shifts), "undecided", words.shifts_untold),
    )
    for applies, verdict, sentence in rules:
        if applies:
            return verdict, sentence(facts)
    return "proven", words.proven(facts)


def _claim(claimed: CapturePoint | None) -> Candidate | None:
    return None if claimed is None else Candidate(point=claimed)


def _odd_samples(
    found: Fit, matched: Sequence[Matched], loose: float, least_share: Callable[[int], float]
) -> tuple[int, ...]:
    """The places of the samples of which a group of rows does not fit; empty where they are not the lesser part: then
    it is the slot that is wrong."""
    odd = []
    for place, rows in enumerate(found.rows.split([len(m.picks) for m in matched])):
        whole = shares(rows, {"all": torch.ones(len(rows), dtype=torch.bool)}, loose)
        parts = shares(rows, groups_of([matched[place]]), loose)
        if any(part.fitting < least_share(part.rows) - SLACK for part in whole.values()) or any(
            part.fitting < min(HALF, least_share(part.rows) - 2 * SLACK) for part in parts.values()
        ):
            odd.append(place)
    return tuple(odd) if 2 * len(odd) < len(matched) else ()


def _misfits(
    matched: Sequence[Matched],
    judged: Sequence[_Judged],
    wanted: Sequence[Candidate],
    calibration: Calibration,
    reference: Reference,
) -> Iterable[SampleFinding]:
    """Samples whose rows lie elsewhere than those of the other samples."""
    named = 0
    for place, one in enumerate(judged):
        slot = one.slot
        if not slot.fits:
            continue  # no common tensor that a sample could be compared with
        loose = loosely(slot.bound, slot.runner_up_error)
        rows_of = one.fit.rows.split([len(m.picks) for m in matched])
        for sample in (matched[odd] for odd in one.odd):
            rows = rows_of[matched.index(sample)]
            astray = rows > loose
            there = elsewhere(place, [sample], astray)[:1]
            own = next((str(wanted[i]) for i, error in there if error <= calibration.bound(wanted[i])), None)
            if own is None and named < MAX_NAMED:
                own = _owner(sample, slot, matched, calibration, reference)
            named += 1
            error, share = float(rows[astray].nanmedian()), float(astray.float().mean())
            yield SampleFinding(
                sample=sample.sample.id,
                label=slot.label,
                error=error,
                sentence=words.misfit(sample.sample.id, slot, error, own, share=share),
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


def _coarser(one: _Judged, calibration: Calibration) -> float | None:
    """What the dtype's own arithmetic does to the rows of a proven slot, where they are moved by clearly more."""
    own = calibration.own(one.slot.found)
    calm = float(one.fit.rows.nanquantile(CALM))
    return own if own is not None and one.slot.verdict == "proven" and calm > COARSER * own else None


def _depth(point: CapturePoint) -> float:
    return float("inf") if point.boundary is None else point.boundary
