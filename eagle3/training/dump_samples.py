"""Samples of a dump for the trainer, read when they are asked for: a dump may be many times larger than the memory."""

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from eagle3.dump.reader import DumpReader
from eagle3.training.samples import TrainingSample


class DumpSamples(Sequence[TrainingSample]):
    """Some samples of an open dump, in the order of `indices`. Only the rows of the sample asked for are in memory."""

    def __init__(self, reader: DumpReader, indices: Sequence[int]) -> None:
        self._reader, self._indices = reader, tuple(indices)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, place: slice) -> "DumpSamples": ...
    def __getitem__(self, place: int | slice) -> "TrainingSample | DumpSamples":
        if isinstance(place, slice):
            return DumpSamples(self._reader, self._indices[place])
        sample, spec = self._reader.read(self._indices[place]), self._reader.manifest.spec
        return TrainingSample(
            id=sample.id,
            input_ids=sample.full_ids(),
            aux=torch.cat([sample.states[point] for point in spec.aux], dim=-1),
            final=sample.states[spec.final],
            loss_mask=_full_mask(sample.loss_mask),
        )

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids [T + 1], loss mask [T + 1]) of each sample; no state is read."""
        for index in self._indices:
            sample = self._reader.read(index)
            yield sample.full_ids(), _full_mask(sample.loss_mask)


def split(reader: DumpReader, num_heldout: int) -> tuple[DumpSamples, DumpSamples]:
    """Training samples, and at most `num_heldout` that only the simulation sees, evenly spread: a fifth at most."""
    total = len(reader)
    num_heldout = min(num_heldout, total // 5)
    chosen = {round(i * total / num_heldout) for i in range(num_heldout)} if num_heldout else set()
    rest = [index for index in range(total) if index not in chosen]
    return DumpSamples(reader, rest), DumpSamples(reader, sorted(chosen))


def _full_mask(mask: Tensor) -> Tensor:
    return torch.cat([mask, torch.ones(1, dtype=torch.bool)])  # the last token ends the answer
