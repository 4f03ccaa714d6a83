"""From samples of unlike lengths to one padded batch for the unroll.

Only rows that some step's loss (or draft) needs are computed as queries; what stands before them is context and gives
keys only. So samples are aligned at their first needed row, column `start`:

    column            0  1  2  3  4  5  6  7
    sample A          a  a  a  A  A  A  A  .     a: context, A: needed row, .: padding
    sample B          .  .  b  B  B  .  .  .
                               ^ start = 3
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """A sample, and which of its rows are needed: rows first_row ... end_row - 1."""

    input_ids: Tensor  # int64 [T + 1]
    aux: Tensor  # [T, K*H]
    first_row: int
    end_row: int


@dataclass(frozen=True)
class UnrollBatch:
    """Input of `unroll`: B samples, S columns of which the last R = S - start are needed."""

    ids: Tensor  # int64 [B, S + num_steps + 1]: every token that the unroll reads or guesses
    aux: Tensor  # [B, S, K*H]
    document: Tensor  # int64 [B, S]; -1 is padding
    positions: Tensor  # int64 [B, S]
    start: int

    @property
    def num_rows(self) -> int:
        """R: columns that are computed, padding included."""
        return self.document.shape[1] - self.start

    def to(self, device: torch.device) -> "UnrollBatch":
        ids, aux, document, positions = (t.to(device) for t in (self.ids, self.aux, self.document, self.positions))
        return UnrollBatch(ids, aux, document, positions, self.start)


def align(windows: Sequence[Window], num_steps: int) -> UnrollBatch:
    """Pad and stack, each sample's first needed row in column `start`."""
    start = max(w.first_row for w in windows)
    columns = start + max(w.end_row - w.first_row for w in windows)  # S
    batch = len(windows)
    ids = torch.zeros(batch, columns + num_steps + 1, dtype=torch.int64)
    aux = torch.zeros(batch, columns, windows[0].aux.shape[-1], dtype=windows[0].aux.dtype)
    document = torch.full((batch, columns), -1, dtype=torch.int64)
    positions = torch.zeros(batch, columns, dtype=torch.int64)
    for i, window in enumerate(windows):
        left, rows = start - window.first_row, window.end_row
        tokens = window.input_ids[: rows + num_steps + 1]
        ids[i, left : left + len(tokens)] = tokens
        aux[i, left : left + rows] = window.aux[:rows]
        document[i, left : left + rows] = 0  # one document per line: samples in other lines are out of sight anyway
        positions[i, left : left + rows] = torch.arange(rows)
    return UnrollBatch(ids, aux, document, positions, start)
