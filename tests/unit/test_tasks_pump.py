"""Requests in flight and uploads that wait are bounded; a failure ends the work and is told."""

import threading
import time

import pytest

from tasks.pump import pump
from tasks.uploads import MOST_WAITING, Uploads

pytestmark = pytest.mark.unit


class OpenGate:
    def may_start(self, number: int) -> bool:
        return True

    def started(self, number: int) -> None:
        pass

    def wait_for_room(self) -> bool:
        return False


class Counted(OpenGate):
    """Room for `most` requests that were not taken."""

    def __init__(self, most: int) -> None:
        self.most, self.held, self.peak = most, 0, 0

    def may_start(self, number: int) -> bool:
        return self.held < self.most

    def started(self, number: int) -> None:
        self.held += 1
        self.peak = max(self.peak, self.held)


def nothing(_numbers: list[int]) -> None:
    pass


def test_every_number_is_asked_once_and_taken_in_the_calling_thread() -> None:
    taken: dict[int, int] = {}
    here = threading.get_ident()

    def take(number: int, result: int) -> None:
        assert threading.get_ident() == here
        taken[number] = result

    pump(range(50), lambda number: number * number, take, streams=7, gate=OpenGate(), give_up=nothing)
    assert taken == {number: number * number for number in range(50)}


def test_a_slow_taker_holds_the_requests_back() -> None:
    begun: list[int] = []
    ahead: list[int] = []

    def take(number: int, _: None) -> None:
        time.sleep(0.01)
        ahead.append(len(begun) - len(ahead))

    pump(range(30), begun.append, take, streams=4, gate=OpenGate(), give_up=nothing)
    assert max(ahead) <= 4


def test_no_more_start_than_there_is_room_for() -> None:
    gate = Counted(2)

    def take(_: int, __: None) -> None:
        gate.held -= 1

    pump(range(12), lambda _: time.sleep(0.005), take, streams=8, gate=gate, give_up=nothing)
    assert gate.peak == 2


def test_one_request_starts_where_room_will_never_come() -> None:
    gate = Counted(0)
    taken: list[int] = []
    pump(range(3), lambda n: n, lambda n, _: taken.append(n), streams=8, gate=gate, give_up=nothing)
    assert taken == [0, 1, 2]


def test_the_first_failure_gives_up_what_is_in_flight_and_is_raised() -> None:
    begun = threading.Event()
    given_up: list[int] = []

    def ask(number: int) -> None:
        if number == 0:
            begun.wait(5)
            raise ValueError("the server is gone")
        begun.set()
        time.sleep(0.2)

    with pytest.raises(ValueError, match="the server is gone"):
        pump(range(100), ask, lambda _, __: None, streams=2, gate=OpenGate(), give_up=given_up.extend)
    assert 1 in given_up
    assert len(given_up) <= 2


def test_a_third_shard_waits_for_the_first_upload() -> None:
    go, began = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        go.wait(5)

    with Uploads() as uploads:
        uploads.submit(slow, 10)
        uploads.submit(lambda: None, 10)
        assert began.wait(5)
        assert uploads.num_bytes == 10 * MOST_WAITING
        timer = threading.Timer(0.1, go.set)
        timer.start()
        start = time.monotonic()
        uploads.submit(lambda: None, 10)
        assert time.monotonic() - start > 0.05
        uploads.finish()
        assert uploads.num_bytes == 0


def test_a_failed_upload_is_raised_by_every_later_call_and_the_rest_is_not_uploaded() -> None:
    def fail() -> None:
        raise OSError("the store is full")

    with Uploads() as uploads:
        uploads.submit(fail, 1)
        for _ in range(2):
            with pytest.raises(OSError, match="the store is full"):
                uploads.finish()
        with pytest.raises(OSError, match="the store is full"):
            _ = uploads.num_bytes
