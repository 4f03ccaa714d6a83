"""The order of a dump's samples: every sample once, no matter how many ranks, and the same again from any cursor."""

from itertools import islice, pairwise, product
from pathlib import Path

import pytest

from eagle3.dump.manifest import DumpError
from eagle3.dump.order import Cursor, Order, OrderedSample, samples_per_block
from eagle3.dump.reader import DumpReader
from eagle3.training.dump_samples import DumpSamples
from tests.dumps import capture, write_dump

pytestmark = pytest.mark.unit

MANY = list(product((1, 2, 7, 64, 101), (1, 2, 3, 8), (0, 1, 12345), (1, 4)))


def samples(n: int, block: int = 1) -> list[OrderedSample]:
    return [OrderedSample(f"p{i:05d}", i // block) for i in range(n)]


def ranks_of(n: int, ranks: int, *, seed: int = 0, block: int = 1, window: int = 8) -> list[Order]:
    chosen = samples(n, block)
    return [Order(chosen, seed=seed, window_blocks=window, rank=r, num_ranks=ranks) for r in range(ranks)]


@pytest.mark.parametrize(("n", "ranks", "seed", "block"), [m for m in MANY if m[0] >= m[1]])
def test_the_ranks_share_an_epoch_without_overlap_or_loss(n: int, ranks: int, seed: int, block: int) -> None:
    orders = ranks_of(n, ranks, seed=seed, block=block, window=3)
    for epoch in range(3):
        parts = [order.epoch(epoch) for order in orders]
        left = orders[0].remainder(epoch)
        assert {len(part) for part in parts} == {n // ranks} == {orders[0].per_rank}
        assert len(left) == n % ranks
        assert all(order.remainder(epoch) == left for order in orders)
        assert sorted([place for part in parts for place in part] + left) == list(range(n))


def test_what_is_left_out_comes_in_another_epoch() -> None:
    order = ranks_of(50, 8)[0]
    assert set().union(*(order.remainder(epoch) for epoch in range(400))) == set(range(50))


def test_epochs_and_seeds_give_other_orders_and_the_same_ones_again() -> None:
    orders = {tuple(ranks_of(30, 1, seed=seed)[0].epoch(epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert orders == {tuple(ranks_of(30, 1, seed=seed)[0].epoch(epoch)) for seed in range(4) for epoch in range(4)}


def test_the_order_of_a_seed_never_changes() -> None:
    """A cursor that was kept must mean the same after an update of anything."""
    assert ranks_of(10, 1)[0].epoch(0) == [7, 8, 1, 0, 9, 4, 2, 3, 6, 5]
    assert ranks_of(10, 2, seed=7, block=3, window=2)[1].epoch(5) == [1, 3, 9, 5, 4]


@pytest.mark.parametrize(("ranks", "block"), [(1, 1), (2, 4), (3, 5)])
def test_a_cursor_goes_on_exactly_where_it_was_taken(ranks: int, block: int) -> None:
    for order in ranks_of(23, ranks, seed=3, block=block, window=2):
        steps = list(islice(order.walk(), 3 * order.per_rank))
        assert [place for place, _ in steps] == [place for epoch in range(3) for place in order.epoch(epoch)]
        for done, (_, cursor) in enumerate(steps[:-1], start=1):
            kept = Cursor.parse(cursor.model_dump_json(), where="the checkpoint")
            assert list(islice(order.walk(kept), len(steps) - done)) == steps[done:]


def test_all_ranks_have_one_cursor() -> None:
    first, second = (list(islice(order.walk(), 25)) for order in ranks_of(20, 2))
    assert [cursor for _, cursor in first] == [cursor for _, cursor in second]
    assert not {place for place, _ in first[:10]} & {place for place, _ in second[:10]}


def test_the_cursor_of_another_order_is_refused() -> None:
    cursor = ranks_of(20, 2)[0].start()
    others = (ranks_of(20, 2, seed=1), ranks_of(21, 2), ranks_of(20, 4), ranks_of(20, 2, block=2))
    for order in (orders[0] for orders in others):
        with pytest.raises(DumpError, match="belongs to another order"):
            next(order.walk(cursor))
    too_far = cursor.model_copy(update={"position": 11})
    with pytest.raises(DumpError, match="position 11"):
        next(ranks_of(20, 2)[0].walk(too_far))
    with pytest.raises(DumpError, match=r"state\.json is no cursor"):
        Cursor.parse('{"epoch": 0}', where="state.json")


def test_a_reader_with_room_for_one_window_fetches_each_block_once() -> None:
    """The point of blocks: with a full shuffle the same reader would fetch nearly every sample's block anew."""

    def fetches(window: int, block_of_order: int) -> int:
        order = Order(samples(4000, block_of_order), seed=1, window_blocks=window)
        held: list[int] = []
        count = 0
        for place in order.epoch(0):
            block = place // 50
            if block in held:
                held.remove(block)
            else:
                count += 1
            held.append(block)
            held = held[-8:]
        return count

    assert fetches(8, 50) == 80
    assert fetches(8, 1) > 3000


def test_neighbours_in_the_dump_are_spread_over_a_window() -> None:
    order = Order(samples(400, 10), seed=1, window_blocks=8).epoch(0)
    together = sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert together < 20  # of 360 pairs of neighbours inside a block


def test_ranks_meet_in_at_most_one_window_each() -> None:
    orders = ranks_of(1000, 4, block=10, window=5)
    blocks = [{place // 10 for place in order.epoch(0)} for order in orders]
    for a, b in pairwise(blocks):
        assert len(a & b) <= 5
    assert not blocks[0] & blocks[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "num_ranks": 2}, "ranks are counted from 0"),
        ({"num_ranks": 9}, "8 samples for 9 ranks"),
        ({"window_blocks": 0}, "at least 1"),
    ],
)
def test_an_order_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(DumpError, match=message):
        Order(samples(8), seed=0, **options)
    with pytest.raises(DumpError, match="two samples have one id"):
        Order([*samples(8), *samples(1)], seed=0)


def test_the_order_does_not_depend_on_how_the_dump_is_packed(tiny_llama: Path, tmp_path: Path) -> None:
    captured = capture(tiny_llama)
    orders = []
    for name, shard_bytes in (("small", 1), ("large", 2**30)):
        write_dump(captured, tmp_path / name, shard_bytes=shard_bytes)
        reader = DumpReader.open(tmp_path / name)
        drawn = DumpSamples(reader, range(len(reader))).order(range(len(reader)), seed=5)
        orders.append([reader.records[place].id for place in drawn.epoch(2)])
        assert samples_per_block(reader.manifest, 1) == 1
        assert samples_per_block(reader.manifest) > len(reader)  # tiny samples: a window holds them all
    assert orders[0] == orders[1]


def test_single_samples_are_ordered_by_their_ids_alone() -> None:
    forward, backward = samples(50), samples(50)[::-1]
    backward = [OrderedSample(sample.id, i) for i, sample in enumerate(backward)]
    one, other = Order(forward, seed=2), Order(backward, seed=2)
    assert [forward[place].id for place in one.epoch(1)] == [backward[place].id for place in other.epoch(1)]
    assert one.digest == other.digest
