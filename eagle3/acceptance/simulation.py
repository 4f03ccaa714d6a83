"""Acceptance of greedy chains, simulated by one batched unroll.

Where the answer is the target's own greedy text, a correct draft equals the answer's next token, and the state that the
drafter sees after j correct drafts is exactly that of unroll step j. So one unroll says how far a chain from every row
would have got, and walking from verification to verification gives the counts of the real loop, without a server.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.acceptance.definitions import AcceptanceFigure, RequestCounts, SpecSettings, summarise
from eagle3.drafter.model import Drafter
from eagle3.drafter.packing import Window, pack
from eagle3.drafter.unroll import unroll
from eagle3.drafter.vocab import VocabMap
from eagle3.training.samples import TrainingSample


def simulate_acceptance(
    drafter: Drafter,
    vocab: VocabMap,
    embedding: Tensor,
    samples: Sequence[TrainingSample],
    *,
    num_steps: int = 3,
    batch_size: int = 8,
) -> AcceptanceFigure:
    """Acceptance of chains of `num_steps` on greedy answers, each run of the loss mask walked from its first token.

    embedding [V_target, H], on the drafter's device. Only starts whose whole chain lies inside the answer count, as
    serving stops at its end. Raises AcceptanceError where no answer is longer than the chain.
    """
    counts = []
    with torch.no_grad():
        for first in range(0, len(samples), batch_size):
            chosen = [samples[i] for i in range(first, min(first + batch_size, len(samples)))]
            counts += _simulate_batch(drafter, vocab, embedding, chosen, num_steps)
    return summarise(counts, SpecSettings.chain(num_steps))


def _simulate_batch(
    drafter: Drafter, vocab: VocabMap, embedding: Tensor, samples: Sequence[TrainingSample], num_steps: int
) -> list[RequestCounts]:
    # The target itself gives an answer's first token (index s); the first draft comes from row s-1 and guesses s+1.
    runs = [[(max(start - 1, 0), end) for start, end in _runs(sample.loss_mask)] for sample in samples]
    windows: list[Window | None] = []
    for sample, sample_runs in zip(samples, runs, strict=True):
        first = sample_runs[0][0] if sample_runs else sample.num_rows
        enough = first < sample.num_rows - num_steps
        windows.append(Window(sample.input_ids, sample.aux, first, sample.num_rows) if enough else None)
    present = [w for w in windows if w is not None]
    right = iter(_right_drafts(drafter, vocab, embedding, present, num_steps) if present else [])
    return [
        _walk(next(right), sample_runs, window.first_row, num_steps) if window is not None else _nothing()
        for window, sample_runs in zip(windows, runs, strict=True)
    ]


def _right_drafts(
    drafter: Drafter, vocab: VocabMap, embedding: Tensor, windows: Sequence[Window], num_steps: int
) -> Sequence[Tensor]:
    """How many drafts of the chain from each row are right, before the first wrong one -> per window int64 [R].

    The last `num_steps` rows of a window guess past its end: their figures mean nothing.
    """
    batch = pack(windows, num_steps).to(embedding.device)
    target_ids = vocab.target_ids.to(embedding.device)
    right = []
    for k, hidden in enumerate(unroll(drafter, embedding, batch, num_steps)):
        drafts = target_ids[drafter.logits(hidden).argmax(-1)[0]]  # [N]
        right.append(drafts == batch.ids[1 + k : 1 + k + batch.num_rows])
    return torch.stack(right, dim=-1).cumprod(-1).sum(-1).cpu().split([d.rows for d in batch.documents])


def _walk(right: Tensor, runs: Sequence[tuple[int, int]], first_row: int, num_steps: int) -> RequestCounts:
    """From verification to verification through each run: right [R] for the rows from `first_row` on."""
    histogram = [0] * (num_steps + 1)
    for start, end in runs:
        row = start
        while row + 1 + num_steps < end:  # the chain's last guess is token row + 1 + k
            correct = int(right[row - first_row])
            histogram[correct] += 1
            row += correct + 1
    verifications = sum(histogram)
    return RequestCounts(
        verifications=verifications,
        correct=sum(i * n for i, n in enumerate(histogram)),
        proposed=verifications * num_steps,
        histogram=tuple(histogram),
    )


def _nothing() -> RequestCounts:
    return RequestCounts(verifications=0, correct=0, proposed=0)


def _runs(mask: Tensor) -> list[tuple[int, int]]:
    """The runs of True in a mask [n], as (start, end) token indices."""
    edges = torch.diff(
        mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    starts, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(starts, ends, strict=True))
