"""The loss over the draft vocabulary for all unroll steps at once, never holding [rows, vocabulary].

Of each chunk of target states the target's distribution is computed once; the rows of all steps that are compared with
it follow, and the gradient of their logits is turned into gradients of the head and of the states while the chunk lies
in the cache. So a forward pass does the arithmetic of forward and backward, nothing is computed twice, and the largest
tensor is [chunk, V_draft]. A backward pass then only scales.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_VALUES = 1 << 19  # of [chunk, V_draft]: 2 MiB in float32, which stays in a cache


@dataclass(frozen=True)
class Comparison:
    """With which target states the rows of a step are compared, and what each weighs in the loss."""

    targets: Tensor  # int64 [n], ascending: rows of the target's states
    weight: float  # of each


@dataclass(frozen=True)
class StepSums:
    """Sums over the compared rows of a step, float64 scalars."""

    loss: Tensor
    top1: Tensor  # rows where drafter and target choose the same token
    acceptance: Tensor  # sum of min(p, q) over the draft vocabulary


def cross_entropy(
    states: list[Tensor],
    head: Tensor,
    target_states: Tensor,
    target_head: Tensor,
    comparisons: list[Comparison],
    *,
    with_metrics: bool,
) -> tuple[Tensor, list[StepSums]]:
    """Sum over steps k and their rows of weight * cross-entropy -> (loss, sums per step).

    states: per step the normed states of its compared rows [n_k, H], as the head reads them; head [V_draft, H];
    target_states [M, H], which `comparisons[k].targets` points into; target_head [V_draft, H]. Products run in
    autocast's type where it is on, softmax and sums in float32 at least. Without `with_metrics` only losses are summed.
    """
    device = head.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
    wants = torch.is_grad_enabled()
    loss, sums = _CrossEntropy.apply(comparisons, target_states, target_head, kind, with_metrics, wants, head, *states)
    return loss, [StepSums(*figures) for figures in sums]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comparisons: list[Comparison], target_states: Tensor, target_head: Tensor, kind: torch.dtype,
        with_metrics: bool, wants: bool, head: Tensor, *states: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chunk = max(16, _CHUNK_VALUES // len(head))
        into_head = torch.zeros_like(head) if wants else None
        into_states = [torch.empty_like(s) for s in states] if wants else []
        sums = torch.zeros(len(states), 3, dtype=torch.float64, device=head.device)
        head, target_head = head.to(kind), target_head.to(kind)
        bounds = [_bounds(c.targets, len(target_states), chunk) for c in comparisons]
        for number, first in enumerate(range(0, len(target_states), chunk)):
            p = F.linear(target_states[first : first + chunk].to(kind), target_head)
            p = p.to(sums_type(p)).softmax(-1)
            for k, (comparison, state) in enumerate(zip(comparisons, states, strict=True)):
                rows = slice(bounds[k][number], bounds[k][number + 1])
                if rows.stop == rows.start:
                    continue
                local = comparison.targets[rows] - first
                own = p if len(local) == len(p) else p[local]
                x = state[rows].to(kind)
                logits = x @ head.T
                logits = logits.to(sums_type(logits))
                gradient = _one_chunk(own, logits, sums[k], with_metrics)
                if into_head is not None:
                    gradient, weight = gradient.to(kind), comparison.weight
                    into_states[k][rows] = torch.mm(gradient, head).mul_(weight)
                    if kind == into_head.dtype:
                        into_head.addmm_(gradient.T, x, alpha=weight)
                    else:
                        into_head.add_(gradient.T @ x, alpha=weight)
        ctx.save_for_backward(*(t for t in (into_head, *into_states) if t is not None))
        weights = torch.tensor([c.weight for c in comparisons], dtype=torch.float64, device=head.device)
        loss = (sums[:, 0] * weights).sum().to(sums_type(target_states))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return (None, None, None, None, None, None, *(g * grads[0] for g in gradients))


def sums_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _bounds(targets: Tensor, total: int, chunk: int) -> list[int]:
    """Where each chunk of target states begins and ends among the comparisons, which are in their order."""
    edges = torch.arange(0, total + chunk, chunk, device=targets.device)
    return torch.searchsorted(targets, edges).tolist()


def _one_chunk(p: Tensor, logits: Tensor, sums: Tensor, with_metrics: bool) -> Tensor:
    """Adds to the sums; -> the gradient of the summed loss with respect to the logits, q - p."""
    q = logits.softmax(-1)
    # The largest of the logits l and its probability give the log-sum-exp: log q = l - logsumexp.
    total = logits.amax(-1) - q.amax(-1).log_()
    if with_metrics:
        sums[1] += (logits.argmax(-1) == p.argmax(-1)).sum()
        sums[2] += torch.minimum(p, q).sum()
    sums[0] += total.sub_(logits.mul_(p).sum(-1)).sum()  # as p sums to 1
    return q.sub_(p)
