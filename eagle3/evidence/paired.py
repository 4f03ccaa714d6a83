"""The same tokens in two captures: are their rows the same states, and if not, what does the second one hold?"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field

from eagle3.digests import sha256_ids
from eagle3.dump.slots import SlotSample
from eagle3.evidence.attributed import shift_in_words
from eagle3.evidence.examination import spread
from eagle3.evidence.findings import Findings
from eagle3.evidence.measured import EvidenceModel, Measured
from eagle3.evidence.report import Verdict

SAMPLES, ROWS_PER_SAMPLE = 64, 8
"""Sequences of the first capture that are kept, and rows of each: with their neighbours 147 MB at most for four slots
of 7,168 in bfloat16."""
MIN_ROWS = 4
"""Tokens that two sequences of the same id must begin with alike; a sample of fewer rows is not judged by itself."""
SAME, FAR = 0.05, 0.15
"""Median relative L2 distance up to which two captures agree, and from which they do not. Measured: bfloat16 against
float32 0.2-2.1%, int8 weights 1.2%, fp8 features 2.7%; the nearest other layer 18-31% (lab and SmolLM2, 8 to 30
layers); int4 weights, 12-15%, lie between."""
SHIFTS = (0, -1, 1, -2, 2)
FARTHEST = 1e6


class PairedSlot(EvidenceModel):
    """One slot of the second capture, over rows of the sequences that both hold. Distances are medians over rows of
    |second - first| / |first|."""

    slot: str
    rows: int
    error: Measured | None = Field(description="Distance to the slot of that name in the first; None: it has none")
    nearest: str = Field(description="The first capture's slot that it is nearest to")
    shift: int = Field(description="Row t is nearest to the first's row t + shift")
    nearest_error: Measured
    verdict: Verdict
    sentence: str


@dataclass(frozen=True)
class _Kept:
    id: str
    ids: torch.Tensor  # [T]
    rows: torch.Tensor  # [n]
    states: Mapping[str, torch.Tensor]  # label -> [n + room for shifts, H], at `around`
    around: Mapping[int, torch.Tensor]  # shift -> index into the states, per row


class Pairing:
    """Feed `keep` the first capture and `match` the second; `slots` says how they compare."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._errors: dict[tuple[str, str, int], list[torch.Tensor]] = {}
        self._misfits: dict[str, Findings] = {}
        self.samples = 0

    def keep(self, sample: SlotSample) -> None:
        """Remember a sequence of the first capture, up to `SAMPLES` of them."""
        if len({id(kept) for kept in self._kept.values()}) >= SAMPLES or not len(sample.input_ids):
            return
        rows = spread(0, len(sample.input_ids), ROWS_PER_SAMPLE)
        places = torch.cat([(rows + shift).clamp(0, len(sample.input_ids) - 1) for shift in SHIFTS]).unique()
        around = {
            shift: torch.searchsorted(places, (rows + shift).clamp(0, len(sample.input_ids) - 1)) for shift in SHIFTS
        }
        states = {label: state[places].clone() for label, state in sample.states.items()}
        kept = _Kept(sample.id, sample.input_ids.clone(), rows, states, around)
        self._kept[sample.id] = kept
        self._kept[_tokens_key(sample)] = kept

    def match(self, sample: SlotSample) -> None:
        """Compare a sequence of the second capture, if the first holds it: the same tokens, or the same id and tokens
        that begin alike (a causal model's states there do not depend on what follows)."""
        kept = self._kept.get(_tokens_key(sample)) or self._kept.get(sample.id)
        if kept is None:
            return
        length = min(len(kept.ids), len(sample.input_ids))
        differs = (kept.ids[:length] != sample.input_ids[:length]).nonzero().flatten()
        common = int(differs[0]) if len(differs) else length
        if common < min(MIN_ROWS, length):
            return
        usable = kept.rows < common
        self.samples += 1
        for label, state in sample.states.items():
            second = state[kept.rows[usable]].float()  # [n, H]
            for name, first in kept.states.items():
                if first.shape[-1] != second.shape[-1]:
                    continue
                for shift in SHIFTS:
                    place = kept.rows + shift
                    inside = usable & (place >= 0) & (place < common)
                    a = first[kept.around[shift][inside]].float()
                    b = second[inside[usable]]
                    error = ((b - a).norm(dim=-1) / a.norm(dim=-1)).nan_to_num(FARTHEST, FARTHEST).clamp(max=FARTHEST)
                    self._errors.setdefault((label, name, shift), []).append(error)
                    if (name, shift) == (label, 0) and len(error) >= MIN_ROWS and float(error.median()) > FAR:
                        self._misfits.setdefault(label, Findings()).add(f"{sample.id!r} ({float(error.median()):.0%})")

    def slots(self) -> tuple[PairedSlot, ...]:
        """Every slot of the second capture that could be compared."""
        medians = {key: float(torch.cat(errors).median()) for key, errors in self._errors.items() if _rows(errors)}
        labels = dict.fromkeys(label for label, _, _ in medians)
        return tuple(self._slot(label, medians) for label in labels)

    def _slot(self, label: str, medians: Mapping[tuple[str, str, int], float]) -> PairedSlot:
        own = medians.get((label, label, 0))
        candidates = {(name, shift): m for (slot, name, shift), m in medians.items() if slot == label}
        # The slot's own name first: of several equal ones it is the one that is meant.
        name, shift = min(candidates, key=lambda c: (candidates[c], c != (label, 0), abs(c[1])))
        nearest = candidates[name, shift]
        verdict, sentence = self._judge(label, own, name, shift, nearest)
        return PairedSlot(
            slot=label,
            rows=_rows(self._errors[label, name, shift]),
            error=own,
            nearest=name,
            shift=shift,
            nearest_error=nearest,
            verdict=verdict,
            sentence=sentence,
        )

    def _judge(self, label: str, own: float | None, name: str, shift: int, nearest: float) -> tuple[Verdict, str]:
        late = f", {shift_in_words(shift)}" if shift else ""
        held = f"the second holds in `{label}` what the first calls `{name}`{late} ({nearest:.2%} apart)"
        misfits = self._misfits.get(label)
        if own is None:
            if nearest > SAME:
                return (
                    "warn",
                    f"`{label}` is none of the first's slots; `{name}`{late} is nearest, {nearest:.0%} apart.",
                )
            return "fail" if shift else "pass", f"{held[0].upper()}{held[1:]}."
        if own <= FAR and misfits:
            verdict: Verdict = "fail"
            sentence = (
                f"`{label}` agrees ({own:.2%} apart), but not in {misfits}: there one of the two captures holds rows "
                "of another request."
            )
        elif own <= SAME:
            verdict, sentence = "pass", f"`{label}` is the same in both ({own:.2%} apart)."
        elif (name, shift) != (label, 0) and nearest <= FAR:
            verdict, sentence = "fail", f"`{label}` differs ({own:.0%} apart): {held}."
        elif own <= FAR:
            verdict, sentence = (
                "warn",
                (
                    f"`{label}` differs by {own:.1%}: other weights (a quantised target), other kernels, or a near "
                    "layer. Attribution tells which: `eagle3 dump attribute`."
                ),
            )
        else:
            verdict, sentence = (
                "fail",
                (
                    f"`{label}` is {own:.0%} apart for the same tokens, and no other slot of the first is near "
                    f"(`{name}`{late} {nearest:.0%}): another layer, another norm or scale, or another target."
                ),
            )
        return verdict, sentence


def _rows(errors: list[torch.Tensor]) -> int:
    return sum(len(error) for error in errors)


def _tokens_key(sample: SlotSample) -> str:
    return "tokens " + sha256_ids(sample.input_ids.tolist())
