"""Captured states as evidence sees them: rows of one sequence under labels, whoever captured them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class SlotSample:
    """The slots of one sequence: row t of each state is the state after reading token t.

    A label is a capture point's name in our own dumps; `aux_0`, `aux_1`, ... and `final` in other people's, whose names
    claim nothing.
    """

    id: str
    input_ids: torch.Tensor  # [T] int64
    states: Mapping[str, torch.Tensor]  # label -> [T, H]
    prompt_tokens: int | None = None  # rows from there on are the answer's; None: not known

    def first(self, tokens: int) -> Self:
        """Its beginning. A decoder reads from left to right: the first rows need no others."""
        states = {label: state[:tokens] for label, state in self.states.items()}
        return replace(self, input_ids=self.input_ids[:tokens], states=states)
