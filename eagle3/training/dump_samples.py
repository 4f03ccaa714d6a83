"""Samples of a dump for the trainer, read when they are asked for: a dump may be many times larger than the memory."""

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from eagle3.dump.order import Order, OrderedSample, samples_per_block
from eagle3.dump.reader import SampleReader
from eagle3.training.draws import Drawing, Draws
from eagle3.training.samples import TrainingSample


class DumpSamples(Sequence[TrainingSample]):
    """Some samples of an open dump, in the order of `indices`. Only the rows of the sample asked for are in memory."""

    def __init__(self, reader: SampleReader, indices: Sequence[int]) -> None:
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
            loss_mask=sample.full_mask(),
        )

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids [T + 1], loss mask [T + 1]) of each sample; no state is read."""
        return (self._reader.tokens(index) for index in self._indices)

    def order(self, places: Sequence[int], *, seed: int, rank: int = 0, num_ranks: int = 1) -> Order:
        """The order in which some of these samples are trained on: the same however the dump is packed and read.

        It yields indices into `places`. Blocks are those that a stream of the dump fetches.
        """
        block, records = samples_per_block(self._reader.manifest), self._reader.records
        indices = [self._indices[place] for place in places]
        samples = [OrderedSample(records[index].id, index // block) for index in indices]
        return Order(samples, seed=seed, rank=rank, num_ranks=num_ranks)

    def drawn_by(self, seed: int) -> Drawing:
        """That order, as `eagle3.training.loop.train` draws it."""
        return lambda places, stream, streams: Draws(
            places, self.order(places, seed=seed, rank=stream, num_ranks=streams)
        )


def split(
    reader: SampleReader, num_heldout: int, *, heldout_reader: SampleReader | None = None
) -> tuple[DumpSamples, DumpSamples]:
    """Training samples, and at most `num_heldout` that only the simulation sees, evenly spread: a fifth at most.

    `heldout_reader` reads the latter, where another way of reading the same dump suits samples that lie apart.
    """
    total = len(reader.records)
    num_heldout = min(num_heldout, total // 5)
    chosen = {round(i * total / num_heldout) for i in range(num_heldout)} if num_heldout else set()
    rest = [index for index in range(total) if index not in chosen]
    return DumpSamples(reader, rest), DumpSamples(heldout_reader or reader, sorted(chosen))
