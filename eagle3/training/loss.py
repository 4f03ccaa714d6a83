"""Targets and loss, over the draft vocabulary only.

The target's distribution comes from the head's rows of the draft vocabulary, softmax in float32; the loss is the
cross-entropy of the drafter against it (KL up to a constant). It counts at rows whose predicted token is under the loss
mask and where the target's first choice over its **whole** vocabulary is one that the drafter can propose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.drafter.attention import unroll_attention
from eagle3.drafter.model import Drafter
from eagle3.drafter.packing import PackedBatch, Window, pack
from eagle3.drafter.unroll import unroll
from eagle3.drafter.vocab import VocabMap
from eagle3.training.cross_entropy import Comparison, StepSums, cross_entropy
from eagle3.training.parallel import Processes
from eagle3.training.samples import TargetParts, TrainingSample

_HEAD_ROWS = 256  # rows of full-vocabulary logits at a time


@dataclass(frozen=True)
class Targets:
    """What the packed rows are to predict: at step k, row i is compared with the target's state of place i + k."""

    final: Tensor  # float32 [M, H], as the head reads it: only the states that are trained on
    places: Tensor  # int64 [M], ascending: their places among the N rows, 0 ... N - 1
    before: Tensor  # int64 [M]: how many rows of the same document stand before the place

    def to(self, device: torch.device) -> "Targets":
        return Targets(*(t.to(device, non_blocking=True) for t in (self.final, self.places, self.before)))


@dataclass(frozen=True)
class StepMetrics:
    """One unroll step over a batch."""

    rows: int
    loss: float
    top1: float  # share of rows where drafter and target choose the same token
    acceptance: float  # sum of min(p, q), over the draft vocabulary


def valid_states(sample: TrainingSample, parts: TargetParts, vocab: VocabMap, final: CapturePoint) -> Tensor:
    """Which of the target's states are trained on -> bool [T].

    State c predicts token c+1: that token is under the loss mask, and the target's argmax is in the draft vocabulary.
    State 0 never counts, because row p uses the states from p+1 on.
    """
    valid = sample.loss_mask[1:].clone()
    valid[0] = False
    for rows in valid.nonzero()[:, 0].split(_HEAD_ROWS):
        states = parts.normed(sample.final[rows], final)
        best = (states.to(parts.head.dtype) @ parts.head.T).argmax(-1)
        valid[rows] = torch.isin(best.cpu(), vocab.target_ids)
    return valid


def needed_window(sample: TrainingSample, valid: Tensor, num_steps: int) -> Window:
    """The rows of a sample that any step trains: step k of row p uses the state p+1+k."""
    states = valid.nonzero()[:, 0]
    return Window(sample.input_ids, sample.aux, first_row=max(0, int(states[0]) - num_steps), end_row=int(states[-1]))


def training_batch(
    samples: Sequence[TrainingSample],
    valid: Sequence[Tensor],
    parts: TargetParts,
    final: CapturePoint,
    num_steps: int,
) -> tuple[PackedBatch, Targets]:
    """Pack samples (each with at least one valid state) and their targets."""
    windows = [needed_window(s, v, num_steps) for s, v in zip(samples, valid, strict=True)]
    states, places, before, offset = [], [], [], 0
    for sample, window, mask in zip(samples, windows, valid, strict=True):
        chosen = mask.nonzero()[:, 0]  # state p + 1 stands at row p's place
        states.append(parts.normed(sample.final[chosen], final))
        before.append(chosen - 1 - window.first_row)
        places.append(before[-1] + offset)
        offset += window.end_row - window.first_row
    return pack(windows, num_steps), Targets(torch.cat(states), torch.cat(places), torch.cat(before))


def rows_per_step(targets: Targets, num_steps: int) -> list[int]:
    """How many rows each step compares: a target's state at a place is seen by step k from the row k before it."""
    return [int((targets.before >= k).sum()) for k in range(num_steps)]


def unroll_loss(
    drafter: Drafter,
    embedding: Tensor,
    draft_head: Tensor,
    batch: PackedBatch,
    targets: Targets,
    *,
    num_steps: int,
    decay: float,
    with_metrics: bool,
    rows: Sequence[int] | None = None,
    attention: Callable[..., Tensor] = unroll_attention,
) -> tuple[Tensor, list[StepMetrics]]:
    """Sum over the steps of decay^k times the mean loss of step k's rows -> (loss, metrics per step or []).

    embedding [V_target, H]; draft_head [V_draft, H]: the target's head, rows of the draft vocabulary. `rows`: what each
    step's sum is divided by, where the batch is a part of a larger one; `rows_per_step` of the batch unless given.
    """
    counts = rows_per_step(targets, num_steps)
    comparisons, states = [], []
    for k, hidden in enumerate(unroll(drafter, embedding, batch, num_steps, attention=attention)):
        chosen = (targets.before >= k).nonzero()[:, 0]
        of_step = targets.places[chosen] - k
        every = len(of_step) == batch.num_rows  # then they are in order
        states.append(drafter.norm(hidden[0] if every else hidden[0, of_step]))
        comparisons.append(Comparison(chosen, decay**k / max(1, (rows or counts)[k])))
    loss, sums = cross_entropy(
        states, drafter.lm_head.weight, targets.final, draft_head, comparisons, with_metrics=with_metrics
    )
    if not with_metrics:
        return loss, []
    return loss, [_metrics(count, figures) for count, figures in zip(counts, sums, strict=True)]


def _metrics(rows: int, sums: StepSums) -> StepMetrics:
    figures = (float(sums.loss), float(sums.top1), float(sums.acceptance))
    return StepMetrics(rows, *(figure / max(1, rows) for figure in figures))


def combined(batches: Sequence[Sequence[StepMetrics]], among: Processes | None = None) -> list[StepMetrics]:
    """The metrics of several batches (of all processes) as if they were one."""
    sums = torch.tensor(
        [[[m.rows, m.loss * m.rows, m.top1 * m.rows, m.acceptance * m.rows] for m in batch] for batch in batches],
        dtype=torch.float64,
    ).sum(0)
    rows = (among.sum(sums) if among else sums).tolist()
    return [StepMetrics(int(n), *(figure / max(1.0, n) for figure in figures)) for n, *figures in rows]
