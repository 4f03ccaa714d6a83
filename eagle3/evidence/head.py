"""From the final hidden state to the target's distribution over the next token, a piece of the vocabulary at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from eagle3.target import Target

VOCAB_CHUNK = 8192


@dataclass(frozen=True)
class FinalStateParts:
    """The parts of the target that the checks need: from the hidden state to logits, and the embedding.

    head [V, H] and embedding [V, H] in any float dtype (V may be padded above the vocabulary size); final_norm [H] is
    the factor of the RMS norm. The logits are multiplied by `logit_scale`, then capped at +-softcap by a tanh: that
    changes no argmax, but it changes probabilities.
    """

    head: torch.Tensor
    final_norm: torch.Tensor
    rms_norm_eps: float
    embedding: torch.Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, target: "Target") -> Self:
        """Read selectively from the target's folder."""
        config: dict[str, Any] = dict(target.text_config)
        scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        return cls(
            head=target.head(),
            final_norm=target.final_norm(),
            rms_norm_eps=target.rms_norm_eps,
            embedding=target.embedding(),
            logit_scale=scale,
            softcap=config.get("final_logit_softcapping") or None,
        )


@dataclass(frozen=True)
class Scores:
    """What n rows say of k tokens each, float32. A token outside the vocabulary has the logit -inf and the nll inf.

    best [n]: the largest logit. logits, nll [n, k]: nll is -log p. entropy [n]: the mean of -log p under the row's own
    distribution, which is what a token that is drawn from it costs on average.
    """

    best: torch.Tensor
    logits: torch.Tensor
    nll: torch.Tensor
    entropy: torch.Tensor


def obstacle(parts: FinalStateParts, *, vocab_size: int, hidden_size: int) -> str:
    """Why these parts cannot be those of a target of this shape; empty where they can."""
    if parts.head.ndim != 2 or parts.head.shape[0] < vocab_size or parts.head.shape[1] != hidden_size:
        return f"the head is {list(parts.head.shape)}, expected [{vocab_size}, {hidden_size}]"
    if tuple(parts.final_norm.shape) != (hidden_size,):
        return f"the final norm is {list(parts.final_norm.shape)}, expected [{hidden_size}]"
    return ""


def normed_rows(states: torch.Tensor, parts: FinalStateParts, *, normed: bool) -> torch.Tensor:
    """Final states [n, H] as the head takes them, float32; `normed` False: they come before the final norm."""
    x = states.float()
    if normed:
        return x
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + parts.rms_norm_eps) * parts.final_norm.float()


def logit_pieces(
    x: torch.Tensor, parts: FinalStateParts, vocab_size: int, temperature: float = 1.0
) -> Iterator[torch.Tensor]:
    """The logits of rows x [n, H] from `normed_rows`, [n, piece] at a time."""
    for start in range(0, vocab_size, VOCAB_CHUNK):
        head = parts.head[start : min(start + VOCAB_CHUNK, vocab_size)].float()
        yield _shaped(x @ head.T, parts, temperature)


def token_logits(
    x: torch.Tensor, tokens: torch.Tensor, parts: FinalStateParts, vocab_size: int, temperature: float = 1.0
) -> torch.Tensor:
    """The logits [n, k] of tokens [n, k]; -inf for what is no token of the vocabulary."""
    known = (tokens >= 0) & (tokens < vocab_size)
    columns = [parts.head[column].float() for column in tokens.clamp(0, vocab_size - 1).T]  # k times [n, H]
    logits = torch.stack([(x * column).sum(dim=-1) for column in columns], dim=-1)
    return _shaped(logits, parts, temperature).masked_fill(~known, float("-inf"))


def score(
    states: torch.Tensor,
    tokens: torch.Tensor,
    parts: FinalStateParts,
    vocab_size: int,
    *,
    normed: bool,
    temperature: float = 1.0,
) -> Scores:
    """Score tokens [n, k] under the distributions of final states [n, H] at a temperature > 0."""
    x = normed_rows(states, parts, normed=normed)
    running = _Running(len(x))
    for logits in logit_pieces(x, parts, vocab_size, temperature):
        running.add(logits)
    logits = token_logits(x, tokens, parts, vocab_size, temperature)
    return Scores(
        best=running.best,
        logits=logits,
        nll=(running.best + running.sum.log())[:, None] - logits,
        entropy=running.sum.log() - running.first / running.sum,
    )


def _shaped(logits: torch.Tensor, parts: FinalStateParts, temperature: float) -> torch.Tensor:
    if parts.softcap is not None:
        logits = (logits * (parts.logit_scale / parts.softcap)).tanh()
    scale = (parts.softcap or parts.logit_scale) / temperature
    return logits if scale == 1.0 else logits * scale


class _Running:
    """Sums over the vocabulary, relative to the largest logit so far: of e^d and d e^d, d = logit - best."""

    def __init__(self, rows: int) -> None:
        self.best = torch.full((rows,), float("-inf"))
        self.sum, self.first = torch.zeros(rows), torch.zeros(rows)

    def add(self, logits: torch.Tensor) -> None:
        """Logits [n, piece], which are overwritten."""
        best = torch.maximum(self.best, logits.amax(dim=-1))
        shift = (self.best - best).nan_to_num(0.0, neginf=-1e4)  # the first piece comes after none
        scale = shift.exp()
        self.first = scale * (self.first + shift * self.sum)
        self.sum = scale * self.sum
        self.best = best
        d = logits.sub_(best[:, None])
        weight = d.exp()
        self.sum += weight.sum(dim=-1)
        self.first += torch.linalg.vecdot(weight, d)
