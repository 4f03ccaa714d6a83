"""What every streaming check shares: it sees each sample once, in order, and concludes at the end."""

from typing import Protocol

import torch

from eagle3.dump.reader import Sample
from eagle3.evidence.findings import Findings
from eagle3.evidence.report import Check

__all__ = ["Examination", "Findings", "spread"]


class Examination(Protocol):
    """One pass over a dump feeds all examinations, so that a shard is read from the disk once."""

    def see(self, sample: Sample) -> None: ...

    def conclude(self) -> list[Check]: ...


def spread(start: int, stop: int, count: int) -> torch.Tensor:
    """At most `count` indices of range(start, stop), evenly spread, both ends included."""
    total = stop - start
    if total <= count:
        return torch.arange(start, stop)
    return torch.linspace(start, stop - 1, count).round().long()
