"""What an attribution says to a person: the sentence of a slot, of a sample, and what explains the refuted slots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds, slips
from eagle3.evidence.attributed import Candidate, SlotAttribution


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
    spoilt: tuple[str, ...]
    """The groups of rows that do not fit `found` as a whole."""
    share: Mapping[str, float]
    """Share of rows that fit `found` one by one: of all, and of each group."""
    too_few_fit: bool
    elsewhere: Candidate | None
    """What the rows hold that do not fit."""


def proven(f: SlotFacts) -> str:
    times = f"{f.runner_up_error / f.error:.3g} times" if f.error > 1e-9 else "many times"
    return (
        f"{f.label} is {f.found}: its rows are {f.error:.2g} from it (noise explains {f.bound:.2g}), the next nearest, "
        f"{f.runner_up}, is {times} as far."
    )


def refuted(f: SlotFacts) -> str:
    claim = "" if f.claimed is None else f" and {f.claimed_error:.2g} from {f.claimed}"
    share = f.share.get("all", 1.0)
    there = f", the others hold {f.elsewhere}" if f.elsewhere else ""
    part = f" Only {share:.0%} of its rows are{there}: the capture changed on the way." if f.too_few_fit else ""
    return f"{f.label} holds {f.found}: its rows are {f.error:.2g} from that{claim}.{part}"


def nowhere(f: SlotFacts) -> str:
    return (
        f"{f.label} holds none of the target's tensors: the nearest, {f.found}, is {f.error:.2g} of a row's length "
        f"away, and noise explains {f.bound:.2g}. The rows belong to other tokens (another request's rows, a shift of "
        "more than two), to other weights (another revision, weights in 4 bits), or they were damaged (a gather over "
        "the wrong group, an overflow)."
    )


def partly(f: SlotFacts) -> str:
    there = f"hold {f.elsewhere}" if f.elsewhere else "fit nothing there"
    if f.spoilt[0].endswith("third"):
        thirds = [name.removesuffix(" third") for name in f.spoilt]
        where = f"the {' and '.join(thirds)} third{'s' if len(thirds) > 1 else ''} of its samples' rows"
    else:
        where = f"the rows of the {' and '.join(f.spoilt)}"
    if f.elsewhere and f.elsewhere.shift != f.found.shift:
        causes = (
            "Rows are cut at another place there: look at where the capture joins the prompt's rows and the answer's"
        )
    elif f.elsewhere:
        causes = (
            "The parts come from two captures, or from two paths of the server (prefill, decode) with unlike layers"
        )
    elif f.spoilt == ("answers",):
        causes = (
            "The server computes prompts and answers on two paths (prefill, decode), and the capture of the answers "
            "is broken: a buffer that was read too late or never filled, a graph that was replayed without the capture"
        )
    else:
        causes = "Rows are missing or doubled: a prefix cache that was on, chunked prefill, or a request that was cut"
    return f"{f.label} holds {f.found}, but not in {where}, which {there}. {causes}."


def scattered(f: SlotFacts) -> str:
    worst = min(f.share, key=lambda name: f.share[name])
    among = "" if worst == "all" or f.share[worst] == f.share["all"] else f" ({f.share[worst]:.0%} in the {worst})"
    there = f"hold {f.elsewhere}" if f.elsewhere else "fit nothing together"
    return (
        f"{f.label} holds {f.found} in only {f.share['all']:.0%} of its rows{among}; the others {there}. Rows were "
        "overwritten, left empty, or mixed with those of other requests or another layer."
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


def misfit(sample: str, slot: SlotAttribution, error: float, explained: str | None, *, share: float) -> str:
    """`share` of the sample's rows are `error` from what the slot is."""
    if explained == slot.claimed:
        return (
            f"sample {sample!r}: its rows of {slot.label} are {explained}, as the label says, and {slot.found} in the "
            "other samples: the capture changed between them (another server, another rank, a restart)"
        )
    nothing = (
        "they fit no tensor of the target for these tokens: they are of another request, or rows before them are "
        "missing or doubled (a prefix cache, chunked prefill)"
    )
    what = f"they are {explained}" if explained else nothing
    rows = "its rows" if share > 0.95 else f"{share:.0%} of its rows"
    return (
        f"sample {sample!r}: {rows} of {slot.label} are {error:.2g} from {slot.found.point}, which the slot is in "
        f"the other samples; {what}"
    )


def coarser(slot: SlotAttribution, own: float) -> str:
    return (
        f"{slot.label} is right, but coarser than its dtype: its rows are {slot.error:.2g} from {slot.found.point}, "
        f"and the dtype's own arithmetic explains {own:.2g}. The weights that served, or the states on their way, went "
        "through fewer bits (fp8, int8)."
    )


def causes(
    slots: Sequence[SlotAttribution], *, num_layers: int, model_class: str | None, sent: EngineIds | None = None
) -> tuple[str, ...]:
    """What explains the slots that are refuted, likeliest first. `sent`: the ids that the engine was given."""
    wrong = [
        slot
        for slot in slots
        if slot.verdict == "refuted" and slot.fits and slot.claimed not in (None, str(slot.found))
    ]
    if not wrong:
        return ()
    sentences = (
        *_shifted(wrong),
        *_repeated(slots),
        *_slips(slots, num_layers, model_class),
        *_sent(slots, num_layers, sent),
        *_final(wrong, num_layers),
        *_normed(wrong),
        *_scaled(wrong),
        *_evened(wrong),
    )
    return tuple(dict.fromkeys(sentences))


def _slips(slots: Sequence[SlotAttribution], num_layers: int, model_class: str | None) -> tuple[str, ...]:
    """Conventions under which what means the claims to one system is what was found to another.

    A slot can be of another layer and scaled, normed or shifted as well: the layers are explained first as they were
    found, then with such slots taken for right. What fits nothing says nothing.
    """
    claims = [(slot.claimed, slot) for slot in slots if slot.claimed is not None]
    held = [(claimed, _held(slot)) for claimed, slot in claims if slot.fits]
    plain = [(c, slot.found.point if slot.found.is_plain and slot.fits else c) for c, slot in claims]
    for pairs in (held, plain):
        found = slips.explain(
            [c for c, _ in pairs], [f for _, f in pairs], num_layers=num_layers, model_class=model_class
        )
        if found:
            return found
    moved = [f"{c} is really {f}" for c, f in held if c != f and {c.boundary, f.boundary}.isdisjoint({None})]
    if not moved or len(held) < len(claims) or not all(slot.found.is_plain for _, slot in claims):
        return ()
    return (
        f"{', '.join(moved)}: no known convention turns the one list into the other. An id was mistyped, or the slots "
        "were labelled by hand. `eagle3 layers` says which ids capture what in each engine.",
    )


def _sent(slots: Sequence[SlotAttribution], num_layers: int, sent: EngineIds | None) -> tuple[str, ...]:
    """What the ids that were sent have to do with it, where a slot is of another layer than its label."""
    fits = [slot for slot in slots if slot.claimed is not None and slot.fits]
    if sent is None or all(slot.claimed == _held(slot) for slot in fits):
        return ()
    said = slips.of_sent([slot.claimed for slot in slots if slot.claimed is not None], sent, num_layers)
    return (said,) if said else ()


def _held(slot: SlotAttribution) -> CapturePoint:
    """The point that a slot really holds. A final state that was normed anywhere has an explanation of its own, and
    of points that are nearly equal it is the claimed one."""
    normed = slot.claimed == "norm" and slot.found.norms
    return slot.claimed if slot.claimed and (normed or slot.verdict == "undecided") else slot.found.point


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
        if slot.fits:
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
        if slot.claimed == "norm" and slot.found.point not in ends and slot.found.is_plain
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


def _evened(wrong: Sequence[SlotAttribution]) -> list[str]:
    return [
        f"Every row of {slot.label} has length {slot.found.length:.3g}: each was normalised by itself before it was "
        "stored. An L2 norm leaves length 1, an RMS norm without its weight the square root of the hidden size; states "
        "are stored as the stream holds them."
        for slot in wrong
        if slot.found.length is not None
    ]


def _names(slots: Iterable[SlotAttribution]) -> str:
    return ", ".join(slot.label for slot in slots)
