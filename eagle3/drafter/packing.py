"""Documents of unlike lengths packed one after the other for the unroll: no padding, and no row sees another document.

Only rows that some step's loss (or draft) needs are computed; what stands before them in their document is context and
gives keys at step 0 only. Context lies in tensors of its own, so that rows lie side by side:

    document A     a a a A A A A        a, b: context      context   a a a b
    document B           b B B B        A, B: rows         rows      A A A A B B B

Row i reads the token `ids[i + k]` at step k. A document's last rows so read tokens of the next document at the later
steps; nothing else ever sees what becomes of these rows, and no loss counts them (`rows_left`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.drafter.attention import Document


@dataclass(frozen=True)
class Window:
    """A document, and which of its rows are needed: rows first_row ... end_row - 1."""

    input_ids: Tensor  # int64, longer than end_row
    aux: Tensor  # [>= end_row, K*H]
    first_row: int
    end_row: int


@dataclass(frozen=True)
class PackedBatch:
    """Input of `unroll`: N rows and C rows of context."""

    documents: tuple[Document, ...]
    ids: Tensor  # int64 [N + spare]: row i reads ids[i + k] at step k, the token after its own (and k further)
    aux: Tensor  # [N, K*H]
    positions: Tensor  # int64 [N], of the rows in their documents
    context_ids: Tensor  # int64 [C]
    context_aux: Tensor  # [C, K*H]
    context_positions: Tensor  # int64 [C]

    @property
    def num_rows(self) -> int:
        return len(self.aux)

    def to(self, device: torch.device) -> "PackedBatch":
        tensors = (self.ids, self.aux, self.positions, self.context_ids, self.context_aux, self.context_positions)
        return PackedBatch(self.documents, *(t.to(device, non_blocking=True) for t in tensors))

    def rows_left(self) -> Tensor:
        """Rows of the own document from each row on, itself included: int64 [N]."""
        return torch.cat([torch.arange(d.rows, 0, -1) for d in self.documents])


def pack(windows: Sequence[Window], num_steps: int) -> PackedBatch:
    """Pack windows for an unroll of up to `num_steps`."""
    first, end = [w.first_row for w in windows], [w.end_row for w in windows]
    spans = list(zip(windows, first, end, strict=True))
    return PackedBatch(
        documents=tuple(Document(context=f, rows=e - f) for _, f, e in spans),
        ids=torch.cat([*(w.input_ids[f + 1 : e + 1] for w, f, e in spans), torch.zeros(num_steps, dtype=torch.int64)]),
        aux=torch.cat([w.aux[f:e] for w, f, e in spans]),
        positions=torch.cat([torch.arange(f, e) for _, f, e in spans]),
        context_ids=torch.cat([w.input_ids[1 : f + 1] for w, f, _ in spans]),
        context_aux=torch.cat([w.aux[:f] for w, f, _ in spans]),
        context_positions=torch.cat([torch.arange(f) for _, f, _ in spans]),
    )
