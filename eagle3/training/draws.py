"""Which samples each step is trained on.

A step takes `gradient_accumulation` micro-batches, each from a stream of its own: stream m of M is rank m of M of the
dump's order. Processes share the streams among them, so the samples of a step do not depend on how many processes
there are, and one cursor says where all of them stand.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from eagle3.dump.order import Cursor, Order, OrderedSample


@dataclass(frozen=True)
class Draws:
    """Endless draws from some places in a sequence of samples."""

    places: Sequence[int]
    order: Order

    def walk(self, cursor: Cursor | None = None) -> Iterator[tuple[int, Cursor]]:
        """A place, and the cursor with which to go on after it."""
        return ((self.places[index], cursor) for index, cursor in self.order.walk(cursor))


Drawing = Callable[[Sequence[int], int, int], Draws]
"""(places that can be trained on, stream, number of streams) -> the draws of that stream."""


def full_shuffle(ids: Sequence[str], seed: int) -> Drawing:
    """For samples in memory: every epoch is a shuffle of all. `ids`: of all samples, by place."""

    def draws(places: Sequence[int], stream: int, streams: int) -> Draws:
        samples = [OrderedSample(f"{place}/{ids[place]}", block) for block, place in enumerate(places)]
        return Draws(places, Order(samples, seed=seed, rank=stream, num_ranks=streams))

    return draws


def steps(streams: Sequence[Draws], batch_size: int, cursor: Cursor | None) -> Iterator[tuple[list[list[int]], Cursor]]:
    """Endless: the places of each micro-batch of a step, and the cursor after it."""
    walks = [stream.walk(cursor) for stream in streams]
    while True:
        taken = [list(islice(walk, batch_size)) for walk in walks]
        yield [[place for place, _ in batch] for batch in taken], taken[0][-1][1]
