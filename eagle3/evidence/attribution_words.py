"""What an attribution says to a person: the sentence of a slot, of a sample, and what explains the refuted slots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3.capture import CapturePoint
from eagle3.conventions import slips
from eagle3.evidence.attributed import Candidate, SlotAttribution

_THIRDS = ("first", "middle", "last")


@dataclass(frozen=True)
class SlotFacts:
    """What was measured on a slot; errors are median distances relative to a row's length."""

    label: str
    claimed: CapturePoint | None
    found: Candidate
    error: float
    claimed_error: float | None
    runner_up: Candidate
    runner_up_error: float
    bound: float
    rows: int
    rows_needed: int
    untold_shifts: tuple[int, ...]
    misfitting_thirds: tuple[int, ...]


def proven(f: SlotFacts) -> str:
    times = f"{f.runner_up_error / f.error:.3g} times" if f.error > 1e-9 else "many times"
    return (
        f"{f.label} is {f.found}: its rows are {f.error:.2g} from it (noise explains {f.bound:.2g}), the next nearest, "
        f"{f.runner_up}, is {times} as far."
    )


def refuted(f: SlotFacts) -> str:
    claim = "" if f.claimed is None else f" and {f.claimed_error:.2g} from {f.claimed}"
    return f"{f.label} holds {f.found}: its rows are {f.error:.2g} from that{claim}."


def nowhere(f: SlotFacts) -> str:
    return (
        f"{f.label} holds none of the target's tensors: the nearest, {f.found}, is {f.error:.2g} of a row's length "
        f"away, and noise explains {f.bound:.2g}. The rows belong to other tokens (another request's rows, a shift of "
        "more than two), to other weights (another revision, weights in 4 bits), or they were damaged (a gather over "
        "the wrong group, an overflow)."
    )


def partly(f: SlotFacts) -> str:
    where = " and ".join(_THIRDS[third] for third in f.misfitting_thirds)
    thirds = "thirds" if len(f.misfitting_thirds) > 1 else "third"
    return (
        f"{f.label} holds {f.found}, but not in the {where} {thirds} of its samples' rows, which fit nothing there. "
        "Rows are missing or doubled: a prefix cache that was on, chunked prefill, or a request that was cut."
    )


def not_near_enough(f: SlotFacts) -> str:
    return (
        f"{f.label} could not be decided: the nearest, {f.found}, is {f.error:.2g} away, and noise explains "
        f"{f.bound:.2g}. Perhaps the weights that served were quantised more coarsely than the reference's."
    )


def nearly_equal(f: SlotFacts) -> str:
    return (
        f"{f.label} could not be decided: {f.found} ({f.error:.2g} away) and {f.runner_up} ({f.runner_up_error:.2g}) "
        "are nearly equal in this target, or its states are noisier than they differ."
    )


def shifts_untold(f: SlotFacts) -> str:
    shifts = " or ".join(f"{abs(s)} {'late' if s < 0 else 'early'}" for s in f.untold_shifts)
    return (
        f"{f.label} is {f.found} ({f.error:.2g} away, the next {f.runner_up_error:.2g}), but whether rows are {shifts} "
        "could not be decided: too few rows, or a text that repeats one token. Take samples that say more."
    )


def too_few(f: SlotFacts) -> str:
    return (
        f"{f.label} could not be decided: {f.rows} rows to compare, {f.rows_needed} are needed. The nearest tensor is "
        f"{f.found}."
    )


def misfit(sample: str, slot: SlotAttribution, error: float, explained: str | None) -> str:
    what = f"they are {explained}" if explained else "they fit no tensor of the target for these tokens"
    return (
        f"sample {sample!r}: its rows of {slot.label} are {error:.2g} from {slot.found.point}, which the slot is in "
        f"the other samples; {what}"
    )


def causes(slots: Sequence[SlotAttribution], *, num_layers: int, model_class: str | None) -> tuple[str, ...]:
    """What explains the slots that are refuted, likeliest first; empty where none is."""
    wrong = [
        slot
        for slot in slots
        if slot.verdict == "refuted" and slot.error <= slot.bound and slot.claimed not in (None, str(slot.found))
    ]
    if not wrong:
        return ()
    sentences = (
        *_shifted(wrong),
        *_repeated(slots),
        *_slips(slots, num_layers, model_class),
        *_final(wrong, num_layers),
        *_normed(wrong),
        *_scaled(wrong),
    )
    return tuple(dict.fromkeys(sentences))


def _slips(slots: Sequence[SlotAttribution], num_layers: int, model_class: str | None) -> tuple[str, ...]:
    """Conventions under which what means the claims to one system is what was found to another.

    A slot that was normed, scaled or shifted has an explanation of its own: here it counts as right.
    """
    pairs = [
        (slot.claimed, slot.found.point if slot.found == Candidate(point=slot.found.point) else slot.claimed)
        for slot in slots
        if slot.claimed is not None
    ]
    explained = slips.explain(
        [c for c, _ in pairs], [f for _, f in pairs], num_layers=num_layers, model_class=model_class
    )
    moved = [f"{c} is really {f}" for c, f in pairs if c != f and {c.boundary, f.boundary}.isdisjoint({None})]
    if explained or not moved:
        return explained
    return (
        f"{', '.join(moved)}: no known convention turns the one list into the other. An id was mistyped, or the slots "
        "were labelled by hand. `eagle3 layers` says which ids capture what in each engine.",
    )


def _shifted(wrong: Sequence[SlotAttribution]) -> list[str]:
    shifts = sorted({slot.found.shift for slot in wrong} - {0})
    return [
        f"Rows are {'late' if shift < 0 else 'early'} by {abs(shift)} in "
        f"{_names(slot for slot in wrong if slot.found.shift == shift)}: row t belongs to token t {shift:+d}. Look at "
        "where the capture cuts the first row, the prompt and the answer."
        for shift in shifts
    ]


def _repeated(slots: Sequence[SlotAttribution]) -> list[str]:
    """One tensor under several labels."""
    held: dict[str, list[SlotAttribution]] = {}
    for slot in slots:
        if slot.error <= slot.bound:
            held.setdefault(str(slot.found), []).append(slot)
    return [
        f"{_names(same)} hold one tensor, {tensor}: look at how the concatenated states are split into slots."
        for tensor, same in held.items()
        if len(same) > 1
    ]


def _final(wrong: Sequence[SlotAttribution], num_layers: int) -> list[str]:
    """A final state that is neither the last layer's nor the one before (those are slips of a convention)."""
    ends = {CapturePoint.at_boundary(b) for b in (num_layers, num_layers - 1)}
    return [
        f"{slot.label} is the stream after {slot.found.point} and not the final state: the list of states has another "
        "last entry than was thought."
        for slot in wrong
        if slot.claimed == "norm" and slot.found.point not in ends and slot.found == Candidate(point=slot.found.point)
    ]


def _normed(wrong: Sequence[SlotAttribution]) -> list[str]:
    sentences = []
    for slot in wrong:
        if not slot.found.norms:
            continue
        if slot.found.point == "norm":
            sentences.append(
                f"{slot.label} was through the final norm twice: the engine's final state is normed already (SGLang, "
                "transformers). Do not apply the norm again."
            )
        elif slot.claimed == "norm":
            sentences.append(
                f"{slot.label} is {slot.found}: the final state was taken from another layer than the last and normed."
            )
        else:
            sentences.append(
                f"{slot.label} was through the final norm: slots are taken from the residual stream, before any final "
                "norm. Only the final state is normed."
            )
    return sentences


def _scaled(wrong: Sequence[SlotAttribution]) -> list[str]:
    return [
        f"{slot.label} was multiplied by {slot.found.scale:.3g}: an embedding scale, a quantisation scale that was not "
        "undone, or states that were normalised before they were stored."
        for slot in wrong
        if slot.found.scale != 1
    ]


def _names(slots: Iterable[SlotAttribution]) -> str:
    return ", ".join(slot.label for slot in slots)
