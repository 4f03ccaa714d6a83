"""Work ahead of its consumer: bounded, in order, errors where they are seen, and an end."""

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from eagle3.dump.prefetch import Prefetch

pytestmark = pytest.mark.unit


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_items_come_in_order_and_end(depth: int) -> None:
    with Prefetch(iter(range(20)), depth) as items:
        assert list(items) == list(range(20))
        assert list(items) == []


def test_no_more_is_made_than_the_buffer_holds() -> None:
    made: list[int] = []

    def make() -> Iterator[int]:
        for number in count():
            made.append(number)
            yield number

    with Prefetch(make(), 3) as items:
        wait_for(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3
        assert next(items) == 0
        wait_for(lambda: len(made) == 4)
        time.sleep(0.05)
        assert len(made) == 4


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_is_raised_after_the_items_before_it(depth: int) -> None:
    def make() -> Iterator[int]:
        yield from range(2)
        raise ValueError("shard-00002 is gone")

    with Prefetch(make(), depth) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(ValueError, match="shard-00002 is gone"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_closing_ends_the_thread_though_nobody_takes_what_is_ready() -> None:
    before = threading.active_count()
    items = Prefetch(count(), 2)
    assert next(items) == 0
    items.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(items)
    items.close()


def test_leaving_by_an_error_ends_the_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), Prefetch(count(), 2) as items:
        1 / next(items)
    assert threading.active_count() == before


def test_depth_0_makes_an_item_when_it_is_asked_for() -> None:
    made: list[int] = []
    items = Prefetch((made.append(number) or number for number in range(3)), 0)
    assert made == []
    assert next(items) == 0
    assert made == [0]
