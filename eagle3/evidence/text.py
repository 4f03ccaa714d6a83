"""Rows against text that is no greedy answer: do the tokens that follow fit the rows' own predictions?

The true next token costs a row -log p, about its entropy where the text is the kind that the target writes; the tokens
one and two places off cost far more. Where nothing is predicted (random ids) no offset stands out, and nothing is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Literal

import torch

from eagle3.evidence.findings import Findings
from eagle3.evidence.head import FinalStateParts, score

OFFSETS = (-2, -1, 0, 1, 2)
NOW = OFFSETS.index(0)
OTHERS = [place for place, offset in enumerate(OFFSETS) if offset]

RATIO = 0.6
"""Somebody's text fits an offset where its tokens cost at most 60% of what the best other offset's cost. Measured on
SmolLM2-135M, rows right, late and early by one: code 25%, prose 36%, chat prompts 34-36%, six languages 20-32%, a bare
chat template 48%; numbers 72-78% and random ids 79-90% (there the target repeats the token that it has just read, so
that an offset of -1 is cheaper than 0 in a right dump): these are not decided."""
DRAWN_EXCESS = 0.3
"""Nats a token by which drawn tokens may cost more than their rows' entropy, on average over the dump. Measured on
SmolLM2-135M at temperatures 0.7, 1 and 1.5: rows right -0.23 to 0.05; late or early by one 2 to 18; foreign 5 to 20."""
SIGMAS = 6.0
"""Standard errors by which a mean must differ from another one: 1e-9 by chance."""
SAMPLE_EXCESS, SAMPLE_DRAWN_EXCESS, SAMPLE_ROWS = 3.0, 0.75, 6
"""Nats a token above its rows' entropy from which a sample of at least 6 rows is not what they predict: somebody's
text, and drawn tokens (these by `SIGMAS` standard errors as well). Measured on SmolLM2-135M: right samples up to 0.4
where they were drawn (T <= 1.5), up to 2.5 in chat prompts, 3.6 in a bare template; rows of another sample 6.6 and more
in chat prompts, 9 and more in answers; random ids 3.3 to 6.1, where nobody can tell."""
OWNED = 0.45
"""Rows belong to another sample where its tokens cost them at most 45% of what their own cost. Measured over 6 rows and
more: exchanged chat prompts 10-43%, any two right samples of 16 domains at least 59%."""
MAX_SUSPECTS = 32
DEAREST = 100.0
BATCH_ROWS = 1024

Outcome = Literal["aligned", "shifted", "unlike", "undecided"]


@dataclass(frozen=True)
class Judgement:
    """What the rows say. nll (by offset) and entropy are means over rows, in nats; shares: of rows that give the token.

    `aligned`: offset 0 stands out. `shifted`: `offset` does. `unlike`: the tokens were drawn from the target, and not
    from these rows' distributions. `undecided`: nothing stands out, or there are too few rows.
    """

    outcome: Outcome
    rows: int = 0
    offset: int = 0
    entropy: float = 0.0
    nll: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    foreign: Findings = field(default_factory=Findings)
    unpredicted: Findings = field(default_factory=Findings)


@dataclass(frozen=True)
class _Sequence:
    name: str
    states: torch.Tensor  # [n, H]
    windows: torch.Tensor  # [n, offsets]
    rows: torch.Tensor  # [n]
    ids: torch.Tensor  # [L]


class TextRows:
    """Collects rows, scores them in batches against the tokens around, and keeps a few numbers of each."""

    def __init__(self, parts: FinalStateParts, vocab_size: int, *, normed: bool, drawn_at: float | None = None) -> None:
        """`normed`: the states are after the final norm. `drawn_at`: the tokens were sampled from the target at this
        temperature; None where they are somebody's text."""
        self._parts, self._vocab_size, self._normed, self._drawn_at = parts, vocab_size, normed, drawn_at
        self._waiting: list[_Sequence] = []
        self._waiting_rows = 0
        self._nll: list[torch.Tensor] = []  # each [n, offsets]
        self._entropy: list[torch.Tensor] = []  # each [n]
        self._given: list[torch.Tensor] = []  # each [n, offsets] bool
        self._suspects: list[tuple[_Sequence, float]] = []  # and their excess over entropy
        self._num_suspects = 0

    def add(self, name: str, states: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, *, first: int = 0) -> None:
        """Rows (indices [n]) of the states [T, H] of a sequence of ids [L]; tokens before `first` are not counted.

        Only rows whose next token differs from the four around it are taken: the others cannot tell an offset.
        """
        places = rows[:, None] + 1 + torch.tensor(OFFSETS)  # [n, offsets]
        inside = ((places >= first) & (places < len(ids))).all(dim=1)
        rows, windows = rows[inside], ids[places[inside]]
        tells = (windows[:, OTHERS] != windows[:, NOW : NOW + 1]).all(dim=1)
        rows, windows = rows[tells], windows[tells]
        if len(rows):
            self._waiting.append(_Sequence(name, states[rows].clone(), windows, rows, ids.clone()))
            self._waiting_rows += len(rows)
        if self._waiting_rows >= BATCH_ROWS:
            self._score()

    def judge(self) -> Judgement:
        """The verdict over everything that was added."""
        self._score()
        if not self._nll:
            return Judgement("undecided")
        nll, entropy = torch.cat(self._nll).double(), torch.cat(self._entropy).double()
        means, expected = nll.mean(dim=0).tolist(), float(entropy.mean())
        best = min(OTHERS, key=lambda place: means[place])
        gaps = nll[:, best] - nll[:, NOW]
        clear = abs(float(gaps.mean())) > SIGMAS * _error(gaps)
        fits = self._fits_drawn if self._drawn_at is not None else _fits_text
        outcome: Outcome = "undecided"
        if clear and means[best] < means[NOW] and fits(nll, entropy, best, NOW):
            outcome = "shifted"
        elif self._drawn_at is not None and not self._fits_drawn(nll, entropy, NOW, best):
            outcome = "unlike"
        elif clear and means[best] > means[NOW] and fits(nll, entropy, NOW, best):
            outcome = "aligned"
        foreign, unpredicted = self._exchanged() if self._drawn_at is None else self._refuted(nll, entropy)
        return Judgement(
            outcome,
            rows=len(nll),
            offset=OFFSETS[best] if outcome == "shifted" else 0,
            entropy=expected,
            nll=tuple(means),
            shares=tuple(torch.cat(self._given).double().mean(dim=0).tolist()),
            foreign=foreign,
            unpredicted=unpredicted,
        )

    def _score(self) -> None:
        if not self._waiting:
            return
        states = torch.cat([sequence.states for sequence in self._waiting])
        windows = torch.cat([sequence.windows for sequence in self._waiting])
        scores = score(
            states,
            windows,
            self._parts,
            self._vocab_size,
            normed=self._normed,
            temperature=self._drawn_at or 1.0,
        )
        sizes = [len(sequence.rows) for sequence in self._waiting]
        # A row that is not finite predicts nothing: infinitely dear, with no entropy to excuse it.
        nll, entropy = scores.nll.nan_to_num(DEAREST, DEAREST).clamp(max=DEAREST), scores.entropy.nan_to_num(0.0)
        self._nll.append(nll)
        self._entropy.append(entropy)
        self._given.append(scores.logits >= scores.best[:, None])
        most = SAMPLE_EXCESS if self._drawn_at is None else SAMPLE_DRAWN_EXCESS
        for sequence, excess in zip(self._waiting, (nll[:, NOW] - entropy).split(sizes), strict=True):
            if len(excess) >= SAMPLE_ROWS and float(excess.mean()) > most:
                self._num_suspects += 1
                if len(self._suspects) < MAX_SUSPECTS:
                    self._suspects.append((sequence, float(excess.mean())))
        self._waiting, self._waiting_rows = [], 0

    def _refuted(self, nll: torch.Tensor, entropy: torch.Tensor) -> tuple[Findings, Findings]:
        """Drawn tokens must be what their own rows predict: a sample that is not holds foreign or shifted rows.
        Of more than `MAX_SUSPECTS` the first are named."""
        foreign = Findings()
        spread = float((nll[:, NOW] - entropy).std())
        for sequence, excess in self._suspects:
            if excess > SIGMAS * spread / sqrt(len(sequence.rows)):
                foreign.add(f"sample {sequence.name!r} ({excess:.1f} nats a token more than its rows expect)")
        return foreign, Findings()

    def _exchanged(self) -> tuple[Findings, Findings]:
        """Somebody's text may be unpredictable by itself. Its rows are foreign where they fit the tokens of another
        sample that is not predicted either; the other samples cannot be judged."""
        foreign, unpredicted = Findings(), Findings()
        owners = self._owners([sequence for sequence, _ in self._suspects])
        for (sequence, _), owner in zip(self._suspects, owners, strict=True):
            if owner is None:
                unpredicted.add(f"sample {sequence.name!r}")
            else:
                foreign.add(f"sample {sequence.name!r} (its rows fit the tokens of {owner.name!r})")
        unpredicted.count += self._num_suspects - len(self._suspects)
        return foreign, unpredicted

    def _owners(self, suspects: Sequence[_Sequence]) -> list[_Sequence | None]:
        """For every suspect the other one whose tokens its rows predict; prompts that begin alike are told apart by the
        rows where their tokens differ."""
        if len(suspects) < 2:
            return [None] * len(suspects)
        tokens = [  # per suspect [n, suspects]: what each of them has at the suspect's places, -1 where it has ended
            torch.stack([_tokens_at(other.ids, sequence.rows + 1) for other in suspects], dim=-1)
            for sequence in suspects
        ]
        states = torch.cat([sequence.states for sequence in suspects])
        scores = score(states, torch.cat(tokens), self._parts, self._vocab_size, normed=self._normed)
        sizes = [len(sequence.rows) for sequence in suspects]
        owners: list[_Sequence | None] = []
        for own, (ids, nll, entropy) in enumerate(
            zip(tokens, scores.nll.split(sizes), scores.entropy.split(sizes), strict=True)
        ):
            fitting = [
                other
                for place, other in enumerate(suspects)
                if place != own and _predicts(nll[:, own], nll[:, place], entropy, ids[:, own] != ids[:, place])
            ]
            owners.append(fitting[0] if fitting else None)
        return owners

    @staticmethod
    def _fits_drawn(nll: torch.Tensor, entropy: torch.Tensor, place: int, _other: int) -> bool:
        """Tokens that are drawn from a distribution cost its entropy on average, exactly."""
        excess = nll[:, place] - entropy
        return float(excess.mean()) <= max(DRAWN_EXCESS, SIGMAS * _error(excess))


def _tokens_at(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.where(places < len(ids), ids[places.clamp(max=len(ids) - 1)], -1)


def _predicts(own: torch.Tensor, other: torch.Tensor, entropy: torch.Tensor, differ: torch.Tensor) -> bool:
    """Do rows predict the other tokens, and those far better than their own? Judged where the two differ. (Rows of
    random ids also find common tokens cheaper than their own, by a fifth.)"""
    rows = differ & other.isfinite() & own.isfinite()
    if int(rows.sum()) < SAMPLE_ROWS:
        return False
    fits = float(other[rows].mean()) <= OWNED * float(own[rows].mean())
    return fits and float((other - entropy)[rows].mean()) <= SAMPLE_EXCESS


def _fits_text(nll: torch.Tensor, _entropy: torch.Tensor, place: int, other: int) -> bool:
    means = nll.mean(dim=0)
    return bool(means[place] <= RATIO * means[other])


def _error(values: torch.Tensor) -> float:
    """Standard error of the mean."""
    return float(values.std()) / sqrt(len(values)) if len(values) > 1 else inf
