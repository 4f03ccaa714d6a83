"""What every streaming check shares: it sees each sample once, in order, and concludes at the end."""

from typing import Protocol

import torch

from eagle3.dump.reader import Sample
from eagle3.evidence.report import Check


class Examination(Protocol):
    """One pass over a dump feeds all examinations, so that a shard is read from the disk once."""

    def see(self, sample: Sample) -> None: ...

    def conclude(self) -> list[Check]: ...


class Findings:
    """Counts what was found and keeps the first few in words."""

    def __init__(self, keep: int = 3) -> None:
        self.count = 0
        self._keep, self._first = keep, list[str]()

    def add(self, text: str) -> None:
        self.count += 1
        if len(self._first) < self._keep:
            self._first.append(text.rstrip("."))

    def __str__(self) -> str:
        more = self.count - len(self._first)
        return "; ".join(self._first) + (f"; and {more} more" if more else "")


def spread(start: int, stop: int, count: int) -> torch.Tensor:
    """At most `count` indices of range(start, stop), evenly spread, both ends included."""
    total = stop - start
    if total <= count:
        return torch.arange(start, stop)
    return torch.linspace(start, stop - 1, count).round().long()
