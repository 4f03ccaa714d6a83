"""Targets and loss, over the draft vocabulary only.

The target's distribution comes from the head's rows of the draft vocabulary, softmax in float32; the loss is the
cross-entropy of the drafter against it (KL up to a constant). It counts at rows whose predicted token is under the loss
mask and where the target's first choice over its **whole** vocabulary is one that the drafter can propose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.drafter.model import Drafter
from eagle3.drafter.unroll import unroll
from eagle3.drafter.vocab import VocabMap
from eagle3.training.batch import UnrollBatch, Window, align
from eagle3.training.samples import TargetParts, TrainingSample

_HEAD_ROWS = 256  # rows of full-vocabulary logits at a time


@dataclass(frozen=True)
class Targets:
    """What the needed rows are to predict at every step; column c is the target's state at column start + 1 + c."""

    final: Tensor  # float32 [B, R + num_steps - 1, H], as the head reads it
    valid: Tensor  # bool [B, R + num_steps - 1]

    def to(self, device: torch.device) -> "Targets":
        return Targets(self.final.to(device), self.valid.to(device))


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
) -> tuple[UnrollBatch, Targets]:
    """Stack samples (each with at least one valid state) and their targets, aligned alike."""
    windows = [needed_window(s, v, num_steps) for s, v in zip(samples, valid, strict=True)]
    batch = align(windows, num_steps)
    width = batch.num_rows + num_steps - 1
    states = torch.zeros(len(samples), width, samples[0].final.shape[-1], device=parts.final_norm.device)
    masks = torch.zeros(len(samples), width, dtype=torch.bool)
    for i, (sample, window) in enumerate(zip(samples, windows, strict=True)):
        chosen = slice(window.first_row + 1, window.first_row + 1 + width)
        rows = sample.final[chosen]
        states[i, : len(rows)] = parts.normed(rows, final)
        masks[i, : len(rows)] = valid[i][chosen]
    return batch, Targets(states, masks)


def unroll_loss(
    drafter: Drafter,
    embedding: Tensor,
    draft_head: Tensor,
    batch: UnrollBatch,
    targets: Targets,
    *,
    num_steps: int,
    decay: float,
    with_metrics: bool,
) -> tuple[Tensor, list[StepMetrics]]:
    """Sum over the steps of decay^k times the mean loss of step k's valid rows -> (loss, metrics per step or []).

    embedding [V_target, H]; draft_head [V_draft, H]: the target's head, rows of the draft vocabulary.
    """
    with torch.no_grad():
        probabilities = F.linear(targets.final, draft_head).float().softmax(-1)  # [B, R + num_steps - 1, V_draft]
    total = torch.zeros((), device=probabilities.device)
    metrics = []
    steps = unroll(
        drafter,
        F.embedding(batch.ids, embedding),
        batch.aux,
        batch.document,
        batch.positions,
        start=batch.start,
        num_steps=num_steps,
    )
    for k, hidden in enumerate(steps):
        valid = targets.valid[:, k : k + batch.num_rows]
        p = probabilities[:, k : k + batch.num_rows][valid]  # [n, V_draft]
        logits = drafter.logits(hidden[valid])  # [n, V_draft]
        losses = logits.logsumexp(-1) - (p * logits).sum(-1)  # cross-entropy, as p sums to 1
        loss = losses.sum() / max(1, len(losses))
        total = total + decay**k * loss
        if with_metrics:
            metrics.append(_metrics(p, logits.detach(), loss))
    return total, metrics


@torch.no_grad()
def _metrics(p: Tensor, logits: Tensor, loss: Tensor) -> StepMetrics:
    rows = max(1, len(p))
    agree = (logits.argmax(-1) == p.argmax(-1)).sum()
    accepted = torch.minimum(p, logits.softmax(-1)).sum()
    return StepMetrics(len(p), float(loss), float(agree) / rows, float(accepted) / rows)
