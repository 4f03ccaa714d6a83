"""In which order the samples of a dump are trained on: by seed and epoch, split across ranks, resumable anywhere.

An epoch is a shuffle of blocks: runs of samples that lie side by side in the dump, and that a reader fetches together.
Blocks are shuffled, `window_blocks` of them are taken at a time, and the samples of such a window are shuffled among
each other. The trade-off: a reader needs room for one window, and fetches each block once an epoch; two samples of one
block stay within a window of each other, so a batch is less mixed than under a full shuffle. With blocks of one sample
the shuffle is full, and depends on nothing but the samples' ids and the seed; with larger ones it depends on the order
of samples.jsonl as well, but never on where shards begin.

Shuffling is sorting by sha256(seed, epoch, id): the same on every machine, in every version of every library.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.digests import sha256_json
from eagle3.dump.manifest import DumpError, Manifest, Sha256
from eagle3.errors import first_fault

BLOCK_BYTES = 64 * 2**20
WINDOW_BLOCKS = 8


class Cursor(BaseModel):
    """A place in the order, the same for every rank: `position` samples of this epoch were taken by each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    order: Sha256 = Field(description="`Order.digest`: samples, seed, blocks, window, number of ranks")
    epoch: int = Field(ge=0)
    position: int = Field(ge=0)

    @classmethod
    def parse(cls, data: str | bytes, *, where: str) -> Self:
        """Read what `model_dump_json` wrote; DumpError otherwise."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            _, what = first_fault(error)
            raise DumpError(f"{where} is no cursor of a dump's order: {what}. Begin the epoch again") from None


@dataclass(frozen=True)
class OrderedSample:
    """What the order knows of a sample: its id, and the block in which it is fetched."""

    id: str
    block: int


class Order:
    """The order of one rank. Samples are named by their place in `samples`.

    Every rank takes `per_rank` samples an epoch: none is taken twice, and the `remainder` (fewer than there are ranks,
    others in every epoch) waits for the next. Ranks that take the same number of samples a step make the same number
    of steps. A rank takes a stretch of the epoch, so that two ranks share a window at most where their stretches meet.
    """

    def __init__(
        self,
        samples: Sequence[OrderedSample],
        *,
        seed: int,
        window_blocks: int = WINDOW_BLOCKS,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise DumpError(f"rank {rank} of {num_ranks}: ranks are counted from 0")
        if window_blocks < 1:
            raise DumpError(f"a window of {window_blocks} blocks: at least 1 is needed")
        if len(samples) < num_ranks:
            raise DumpError(f"{len(samples)} samples for {num_ranks} ranks: every rank needs at least one")
        self._ids = [sample.id for sample in samples]
        if len(set(self._ids)) != len(self._ids):
            raise DumpError("two samples have one id: an order needs ids that differ")
        blocks: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            blocks.setdefault(sample.block, []).append(place)
        self._blocks = list(blocks.values())
        self._seed, self._window, self._rank, self._num_ranks = seed, window_blocks, rank, num_ranks
        self.per_rank = len(samples) // num_ranks
        named = sorted([self._ids[place] for place in block] for block in self._blocks)
        self.digest = sha256_json([named, seed, window_blocks, num_ranks])

    def epoch(self, epoch: int) -> list[int]:
        """The places that this rank takes in an epoch, in order."""
        start = self._rank * self.per_rank
        return self._shuffled(epoch)[start : start + self.per_rank]

    def remainder(self, epoch: int) -> list[int]:
        """The places that no rank takes in an epoch."""
        return self._shuffled(epoch)[self.per_rank * self._num_ranks :]

    def start(self) -> Cursor:
        return Cursor(order=self.digest, epoch=0, position=0)

    def walk(self, cursor: Cursor | None = None) -> Iterator[tuple[int, Cursor]]:
        """Endless: a place, and the cursor with which to go on after it. DumpError for a cursor of another order."""
        cursor = cursor or self.start()
        if cursor.order != self.digest or cursor.position > self.per_rank:
            raise DumpError(
                f"the cursor belongs to another order ({cursor.order[:16]}, position {cursor.position}) than this one "
                f"({self.digest[:16]}, {self.per_rank} samples a rank): the samples, the seed, the blocks, the window "
                "or the number of ranks changed. Go on with those of before, or begin the epoch again"
            )
        epoch, position = cursor.epoch, cursor.position
        while True:
            places = self.epoch(epoch)
            for done, place in enumerate(places[position:], start=position + 1):
                yield place, Cursor(order=self.digest, epoch=epoch, position=done)
            epoch, position = epoch + 1, 0

    def _shuffled(self, epoch: int) -> list[int]:
        blocks = sorted(self._blocks, key=lambda block: self._key(epoch, "block", self._ids[block[0]]))
        places: list[int] = []
        for first in range(0, len(blocks), self._window):
            window = [place for block in blocks[first : first + self._window] for place in block]
            places += sorted(window, key=lambda place: self._key(epoch, "sample", self._ids[place]))
        return places

    def _key(self, epoch: int, kind: str, sample_id: str) -> bytes:
        return hashlib.sha256(f"{self._seed}/{epoch}/{kind}/{sample_id}".encode()).digest()


def samples_per_block(manifest: Manifest, block_bytes: int = BLOCK_BYTES) -> int:
    """How many neighbouring samples make about `block_bytes`, at least 1. The same however the dump was packed."""
    per_sample = manifest.num_tokens * row_bytes(manifest) // manifest.num_samples
    return max(1, block_bytes // max(1, per_sample))


def row_bytes(manifest: Manifest) -> int:
    """Bytes of one row: states, token id, loss mask."""
    width = 4 if manifest.dtype == "float32" else 2
    return len(manifest.spec.points) * manifest.target.hidden_size * width + 8 + 1
