"""Distances of a slot's rows to every tensor of the target that it may hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.capture import CapturePoint, all_points
from eagle3.dump.slots import SlotSample
from eagle3.errors import Eagle3Error
from eagle3.evidence.attributed import Candidate
from eagle3.evidence.examination import spread
from eagle3.evidence.references import Reference, WrongTarget

SHIFTS = (0, -1, 1, -2, 2)
ROWS_PER_SAMPLE = 64
"""Rows of a sample that are compared: half of the prompt, half of the answer; what one lacks the other gets."""
FARTHEST = 1e6
"""Stands for a distance that is larger or not defined: rows of zeros, NaN or infinity."""
SAME = 1e-3
"""Where the final norm applied again moves rows by less (a norm of ones), once and twice are one tensor."""


class SlotsIncomplete(Eagle3Error, ValueError):
    """A sample without a slot, or with another number of rows than tokens."""


@dataclass(frozen=True)
class Matched:
    """One sample against every candidate: S slots, n rows, C candidates, of which the first C' are unshifted.

    distances [S, n, C] float32: |row - candidate| / |row|; NaN where the candidate has no row there, or where a shift
    leads to the same token and so tells nothing. dots and squares [S, n, C'] float64: row . candidate / |row|^2 and
    |candidate|^2 / |row|^2, from which a scaled fit follows. lengths [n, C'] float32: |candidate|.
    """

    sample: SlotSample
    picks: torch.Tensor  # [n] int64: the rows, in their order
    distances: torch.Tensor
    dots: torch.Tensor
    squares: torch.Tensor
    lengths: torch.Tensor

    @property
    def answers(self) -> torch.Tensor:
        """Which of the rows are an answer's, [n] bool; none where nothing says where the answer begins."""
        start = self.sample.prompt_tokens
        return torch.zeros(len(self.picks), dtype=torch.bool) if start is None else self.picks >= start


def candidates(num_layers: int, *, with_norm: bool) -> tuple[Candidate, ...]:
    """Every candidate but the scaled ones, the unshifted ones first; `with_norm`: also under the final norm."""
    plain = [(point, 0) for point in all_points(num_layers)]
    last = CapturePoint.at_boundary(num_layers)  # under the final norm it is `norm` itself
    normed = [(point, 1) for point, _ in plain if point != last] if with_norm else []
    return tuple(Candidate(point=p, norms=n, shift=s) for s in SHIFTS for p, n in (*plain, *normed))


def reference_rows(
    states: Mapping[CapturePoint, torch.Tensor], reference: Reference, wanted: Sequence[Candidate]
) -> list[torch.Tensor]:
    """The rows [t, D] of every unshifted candidate, in order."""
    rows = []
    for candidate in wanted:
        if candidate.shift:
            break
        state: torch.Tensor | None = states[candidate.point]
        if candidate.norms and state is not None:
            state = reference.norm(state)
        assert state is not None, "a reference without a norm has no candidates under it"
        rows.append(state)
    return rows


def without_doubles(wanted: Sequence[Candidate], rows: Sequence[torch.Tensor]) -> tuple[Candidate, ...]:
    """The candidates without `norm` under the final norm again where that changes nothing (a norm of ones)."""
    place = dict(zip(wanted, rows, strict=False))
    once, twice = Candidate(point=CapturePoint("norm")), Candidate(point=CapturePoint("norm"), norms=1)
    if twice not in place or float(_distances(place[twice], place[once]).median()) > SAME:
        return tuple(wanted)
    return tuple(c for c in wanted if (c.point, c.norms) != ("norm", 1))


def match(
    sample: SlotSample,
    labels: Sequence[str],
    reference: Reference,
    rows: Sequence[torch.Tensor],
    wanted: Sequence[Candidate],
) -> Matched:
    """Compare rows of every slot, evenly spread over prompt and answer, with every candidate; `rows` come from
    `reference_rows`.

    Raises SlotsIncomplete, and WrongTarget where the states have another width than the reference's.
    """
    total, ids = len(rows[0]), sample.input_ids
    picks = chosen_rows(total, sample.prompt_tokens)
    slots = torch.stack([_project(sample, label, picks, reference, rows[0].shape[-1]) for label in labels])  # [S, n, D]
    distances, dots, squares = [], [], []
    for place, candidate in enumerate(wanted):
        source = picks + candidate.shift
        tells = (source >= 0) & (source < total)
        source = source.clamp(0, total - 1)
        if candidate.shift:
            tells &= ids[source] != ids[picks]
        state = rows[place % len(rows)][source]  # [n, D]
        distances.append(torch.where(tells, _distances(state, slots), torch.nan))
        if not candidate.shift:
            exact = state.double()
            dots.append((slots.double() * exact).sum(-1))
            squares.append(exact.square().sum(-1))
    per_row = slots.double().square().sum(-1)[..., None]  # [S, n, 1]
    return Matched(
        sample=sample,
        picks=picks,
        distances=torch.stack(distances, -1),
        dots=torch.stack(dots, -1) / per_row,
        squares=torch.stack(squares, -1) / per_row,
        lengths=torch.stack([row[picks].norm(dim=-1) for row in rows], -1),
    )


def scaled_fit(matched: Sequence[Matched], slot: int, candidate: int) -> tuple[float, torch.Tensor]:
    """The factor under which a candidate fits a slot best (median over rows), and the distances [rows] that remain."""
    dots = torch.cat([m.dots[slot, :, candidate] for m in matched])
    squares = torch.cat([m.squares[slot, :, candidate] for m in matched])
    factor = float((dots / squares).nanmedian())
    return factor, _usable((1 - 2 * factor * dots + factor**2 * squares).clamp(min=0).sqrt().float())


def chosen_rows(total: int, prompt_tokens: int | None) -> torch.Tensor:
    """The rows that are compared, in their order: evenly spread over the prompt's and over the answer's, the first and
    the last of each included."""
    border = total if prompt_tokens is None else min(prompt_tokens, total)
    answer = min(total - border, max(ROWS_PER_SAMPLE // 2, ROWS_PER_SAMPLE - border))
    return torch.cat([spread(0, border, ROWS_PER_SAMPLE - answer), spread(border, total, answer)])


def foreign_distance(
    sample: SlotSample, label: str, reference: Reference, other: torch.Tensor, first_rows: int
) -> float:
    """Median distance of a slot's rows to the rows [t, D] of another sample at the same places."""
    picks = spread(0, min(first_rows, len(other)), ROWS_PER_SAMPLE)
    slot = _project(sample, label, picks, reference, other.shape[-1])
    return float(_distances(other[picks], slot).median())


def _project(sample: SlotSample, label: str, picks: torch.Tensor, reference: Reference, width: int) -> torch.Tensor:
    if label not in sample.states:
        raise SlotsIncomplete(f"sample {sample.id!r} has no {label}; it has {', '.join(sample.states) or 'no states'}")
    state = sample.states[label]
    if state.dim() != 2 or len(state) != len(sample.input_ids):
        raise SlotsIncomplete(
            f"sample {sample.id!r}, {label}: a row for each of the {len(sample.input_ids)} tokens was expected, the "
            f"state is {list(state.shape)}. Without a row for every token nothing says which row is which"
        )
    rows = reference.project(state[picks].float())
    if rows.shape[-1] != width:
        raise WrongTarget(
            f"sample {sample.id!r}, {label}: states of width {state.shape[-1]}, and the target's are {width} wide: it "
            "is another target. Give the folder that was served."
        )
    return rows


def _distances(candidate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """|row - candidate| / |row|."""
    return _usable((rows - candidate).norm(dim=-1) / rows.norm(dim=-1))


def _usable(distance: torch.Tensor) -> torch.Tensor:
    return distance.nan_to_num(FARTHEST, FARTHEST).clamp(max=FARTHEST)
