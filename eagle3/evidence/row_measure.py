"""One slot's rows, measured in one pass and in constant memory: norms, dimensions, first values."""

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch

from eagle3.evidence.examination import spread
from eagle3.evidence.statistics import Spread

NEAR_MAX = 0.5
"""Share of the dtype's largest number from which a value counts as near to overflow."""

SPREAD_ROWS = 64
"""Rows of a sample, evenly spread, over which the dimensions are taken: each costs about four times its norm."""

MASSIVE = 16.0
"""A dimension with more than 16 times the average one's energy is massive. A few dimensions of a residual stream carry
much of its norm, and they are the same ones for every text: a fingerprint that a scale cannot change."""

FIRST_VALUES = 5
SUSPECTS_AT_ONCE = 1024
BINS_PER_OCTAVE, LOWEST_OCTAVE, OCTAVES = 32, -40, 104


@dataclass(frozen=True)
class Suspects:
    """Rows of one sample that hold NaN or infinity, with a value near the dtype's largest number, and of zeros."""

    nonfinite: tuple[int, ...]
    near_max: tuple[int, ...]
    zero: tuple[int, ...]


class RowMeasure:
    """Feed `see` the slot's states sample by sample; `measures` are the fields of RowStatistics."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._limit = NEAR_MAX * torch.finfo(dtype).max
        self._norms, self._dimensions = _Norms(hidden_size), _Dimensions(hidden_size)
        self._nonfinite, self._near_max = 0, 0
        self._first: tuple[float | None, ...] = ()

    def see(self, state: torch.Tensor) -> Suspects:
        """State [rows, H] of one sample."""
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32)  # [rows]
        # Only a row whose norm is large or not finite can hold a value that is: the others are not looked at again.
        suspects = (~(norms < self._limit)).nonzero().flatten()
        bad, near = [], []
        for rows in suspects.split(SUSPECTS_AT_ONCE):
            values = state[rows]
            broken = ~values.isfinite().all(-1)
            bad += rows[broken].tolist()
            near += rows[~broken & (values.abs() >= self._limit).any(-1)].tolist()
        if not self._first and len(state):
            values = state[0, :FIRST_VALUES].tolist()
            self._first = tuple(value if isfinite(value) else None for value in values)
        finite = torch.ones(len(norms), dtype=torch.bool)
        finite[bad] = False
        self._nonfinite += len(bad)
        self._near_max += len(near)
        self._norms.add(norms[finite])
        rows = spread(0, len(norms), SPREAD_ROWS)
        if bad:
            rows = rows[finite[rows]]
        self._dimensions.add(state if len(rows) == len(state) else state[rows], norms[rows])
        return Suspects(tuple(bad), tuple(near), tuple((norms == 0).nonzero().flatten().tolist()))

    def join(self, later: "RowMeasure") -> None:
        """The samples that another worker saw, after these."""
        self._nonfinite += later._nonfinite
        self._near_max += later._near_max
        self._first = self._first or later._first
        self._norms.join(later._norms)
        self._dimensions.join(later._dimensions)

    def measures(self) -> dict[str, Any]:
        """Values for the fields of RowStatistics."""
        return {
            **self._norms.measures(),
            "nonfinite_rows": self._nonfinite,
            "near_max_rows": self._near_max,
            "spread": self._dimensions.spread(),
            "first_values": self._first,
        }


class _Norms:
    """Moments and a fine logarithmic histogram of row norms."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._count = 0
        self._sum, self._squares = 0.0, 0.0
        self._min, self._max = float("inf"), 0.0
        self._histogram = torch.zeros(OCTAVES * BINS_PER_OCTAVE, dtype=torch.int64)

    def add(self, norms: torch.Tensor) -> None:
        """Row norms [rows] float32; a norm that overflowed float32 counts as float32's largest number."""
        if not len(norms):
            return
        norms = norms.clamp(max=torch.finfo(torch.float32).max).double()
        self._count += len(norms)
        self._sum += float(norms.sum())
        self._squares += float(norms.square().sum())
        self._min, self._max = min(self._min, float(norms.min())), max(self._max, float(norms.max()))
        bins = ((norms.log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).clamp(0, len(self._histogram) - 1).long()
        self._histogram += torch.bincount(bins, minlength=len(self._histogram))

    def join(self, later: "_Norms") -> None:
        self._count += later._count
        self._sum += later._sum
        self._squares += later._squares
        self._min, self._max = min(self._min, later._min), max(self._max, later._max)
        self._histogram += later._histogram

    def measures(self) -> dict[str, float | None]:
        if not self._count:
            return {"rows": 0, **dict.fromkeys(_MEASURES)}
        mean = self._sum / self._count
        return {
            "rows": self._count,
            "mean_norm": mean,
            "std_norm": sqrt(max(0.0, self._squares / self._count - mean**2)),
            "min_norm": self._min,
            "max_norm": self._max,
            "p05_norm": self._quantile(0.05),
            "median_norm": self._quantile(0.5),
            "p95_norm": self._quantile(0.95),
            "mean_rms": mean / sqrt(self._hidden_size),
        }

    def _quantile(self, share: float) -> float:
        """The middle of the bin in which that share of the rows is reached."""
        reached = int((self._histogram.cumsum(0) >= share * self._count).nonzero()[0])
        middle = 2.0 ** ((reached + 0.5) / BINS_PER_OCTAVE + LOWEST_OCTAVE)
        return min(max(middle, self._min), self._max)


class _Dimensions:
    """Sums over rows, one number a dimension: x, x^2, and the share x^2 / |x|^2 of each row's energy."""

    def __init__(self, hidden_size: int) -> None:
        self._rows = 0
        self._sum, self._squares, self._shares = (torch.zeros(hidden_size, dtype=torch.float64) for _ in range(3))

    def add(self, rows: torch.Tensor, norms: torch.Tensor) -> None:
        """Finite rows [n, H], and their norms [n] float32."""
        self._rows += len(rows)
        x = rows.float()
        squares = x.square()
        weights = norms.square().clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
        self._sum += x.sum(0)
        self._squares += squares.sum(0)
        self._shares += weights @ squares

    def join(self, later: "_Dimensions") -> None:
        self._rows += later._rows
        self._sum += later._sum
        self._squares += later._squares
        self._shares += later._shares

    def spread(self) -> Spread | None:
        """None before the first row, and where a square left float32's range."""
        sums = (self._sum, self._squares, self._shares)
        if not self._rows or not all(bool(s.isfinite().all()) for s in sums):
            return None
        mean, square, shares = (s / self._rows for s in sums)
        energy = float(square.sum())
        return Spread(
            rows=self._rows,
            mean_std=float((square - mean.square()).clamp(min=0).sqrt().mean()),
            top_dimension=int(shares.argmax()),
            top_share=float(shares.max()),
            massive=int((shares > MASSIVE * shares.mean()).sum()),
            mean_share=float(mean.square().sum()) / energy if energy else 0.0,
        )


_MEASURES = ("mean_norm", "std_norm", "min_norm", "max_norm", "p05_norm", "median_norm", "p95_norm", "mean_rms")
