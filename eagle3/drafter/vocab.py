"""The draft vocabulary: which of the target's tokens a drafter can propose, and in which order.

In a checkpoint it is two tensors: `d2t` int64 [V_draft] holds **offsets** (target id = d2t[i] + i) and `t2d` bool
[V_target] marks the chosen tokens. Engines believe both without a check, so every way into a VocabMap checks them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from eagle3.digests import sha256_ids
from eagle3.errors import Eagle3Error


class VocabMapError(Eagle3Error, ValueError):
    """A draft vocabulary that breaks an invariant: not ascending, out of range, or d2t and t2d disagree."""


class VocabMap:
    """The target ids of the draft vocabulary, ascending. Draft id i is the i-th of them."""

    def __init__(self, target_ids: Tensor, target_vocab_size: int) -> None:
        """target_ids: int64 [V_draft], strictly increasing, 0 <= id < target_vocab_size."""
        if target_ids.dtype != torch.int64 or target_ids.dim() != 1 or not len(target_ids):
            raise VocabMapError(
                f"the draft vocabulary must be a non-empty int64 list of target ids; got {target_ids.dtype} "
                f"{list(target_ids.shape)}"
            )
        if bool((target_ids[1:] <= target_ids[:-1]).any()):
            at = int((target_ids[1:] <= target_ids[:-1]).nonzero()[0])
            raise VocabMapError(
                f"target ids must be strictly increasing, but draft ids {at} and {at + 1} stand for target ids "
                f"{int(target_ids[at])} and {int(target_ids[at + 1])}"
            )
        if int(target_ids[0]) < 0 or int(target_ids[-1]) >= target_vocab_size:
            raise VocabMapError(
                f"target ids reach from {int(target_ids[0])} to {int(target_ids[-1])}; the target has tokens 0 to "
                f"{target_vocab_size - 1}"
            )
        self.target_ids = target_ids.clone()
        self.target_vocab_size = target_vocab_size

    def __len__(self) -> int:
        return len(self.target_ids)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, *, fill_from: Tensor | None = None) -> "VocabMap":
        """The `size` most frequent tokens; ties go to the smaller id, so the smallest unused ids fill what is left.

        counts: int64 [V_target], e.g. from `count_tokens`. A small dump counts fewer tokens than there are places: then
        `fill_from`, counts of related text like the prompts, says which come before the smallest unused ids.
        """
        if not 0 < size <= len(counts):
            raise VocabMapError(f"a draft vocabulary of {size} tokens: the target has {len(counts)}")
        order = torch.arange(len(counts))
        for key in ([] if fill_from is None else [fill_from]) + [counts]:  # stable: the last key decides first
            order = order[torch.sort(key[order], descending=True, stable=True).indices]
        return cls(order[:size].sort().values, len(counts))

    @classmethod
    def whole(cls, target_vocab_size: int) -> "VocabMap":
        """Every token of the target, in its own order."""
        return cls(torch.arange(target_vocab_size), target_vocab_size)

    @classmethod
    def from_tensors(cls, d2t: Tensor, t2d: Tensor) -> "VocabMap":
        """Read the map of a checkpoint; the error says which mistake it looks like."""
        if t2d.dtype != torch.bool or t2d.dim() != 1:
            raise VocabMapError(f"t2d must be bool [V_target]; got {t2d.dtype} {list(t2d.shape)}")
        if d2t.dtype != torch.int64 or d2t.dim() != 1:
            raise VocabMapError(f"d2t must be int64 [V_draft]; got {d2t.dtype} {list(d2t.shape)}")
        chosen = t2d.nonzero()[:, 0]
        if len(chosen) != len(d2t):
            raise VocabMapError(
                f"t2d marks {len(chosen)} tokens, d2t has {len(d2t)} entries: they must be equal in number"
            )
        index = torch.arange(len(d2t))
        if not torch.equal(d2t + index, chosen):
            raise VocabMapError(f"d2t and t2d disagree: {_diagnose(d2t, index, chosen)}")
        return cls(chosen, len(t2d))

    @property
    def d2t(self) -> Tensor:
        """Offsets, int64 [V_draft]: target id = d2t[i] + i."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """bool [V_target], True for the chosen tokens."""
        mask = torch.zeros(self.target_vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens (int64 [V_target]) that the drafter can propose, 0 to 1."""
        total = int(counts.sum())
        return int(counts[self.target_ids].sum()) / total if total else 0.0

    def digest(self) -> str:
        """sha256 over the target ids: `vocab_map_sha256` of the contract."""
        return sha256_ids(self.target_ids.tolist())


def count_tokens(sequences: Iterable[tuple[Tensor, Tensor]], target_vocab_size: int) -> Tensor:
    """How often each token stands under the loss mask -> int64 [V_target].

    sequences: (ids int64 [n], loss_mask bool [n]) pairs; the mask is that of the token itself.
    """
    counts = torch.zeros(target_vocab_size, dtype=torch.int64)
    for ids, mask in sequences:
        chosen = ids[mask]
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < target_vocab_size:
            raise VocabMapError(
                f"token ids from {int(chosen.min())} to {int(chosen.max())} in a dump of a target with "
                f"{target_vocab_size} tokens: the dump and the target do not belong together"
            )
        counts += torch.bincount(chosen, minlength=target_vocab_size)
    return counts


def _diagnose(d2t: Tensor, index: Tensor, chosen: Tensor) -> str:
    if torch.equal(d2t, chosen):
        return "d2t holds target ids instead of offsets (target id - draft id); subtract the draft id from each entry"
    if torch.equal(d2t, index):
        return "d2t is 0, 1, 2, ...: as offsets that maps draft id i to target id 2i; an identity map is all zeros"
    at = int((d2t + index != chosen).nonzero()[0])
    return f"draft id {at} stands for target id {int(d2t[at]) + at} by d2t, for {int(chosen[at])} by t2d"
