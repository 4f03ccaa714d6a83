"""Requests in flight: as many as there are streams, and none while the disk holds too much. Nothing is queued."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

_Result = TypeVar("_Result")
_LOOK_SECONDS = 0.2  # how often held-back requests are tried again


class Gate(Protocol):
    """Says whether one more request may start."""

    def may_start(self, number: int) -> bool:
        """Whether there is room for what request `number` will leave on the disk."""

    def started(self, number: int) -> None:
        """Request `number` is in flight."""

    def wait_for_room(self) -> bool:
        """Wait until something on the disk goes; False where nothing there is about to go."""


def pump(
    numbers: Iterable[int],
    ask: Callable[[int], _Result],
    take: Callable[[int, _Result], None],
    *,
    streams: int,
    gate: Gate,
    give_up: Callable[[list[int]], None],
) -> None:
    """`ask(number)` in a thread for every number, at most `streams` at once; `take(number, result)` here, one by one.

    A number counts as in flight until it was taken: a slow `take` holds the requests back. Where nothing is in flight
    and nothing on the disk is about to go, one request starts whatever the gate says, so that the work always ends.
    The first failure calls `give_up` with the numbers in flight, and is raised.
    """
    rest = iter(numbers)
    following = next(rest, None)
    flying: dict[Future[_Result], int] = {}
    with ThreadPoolExecutor(max_workers=streams, thread_name_prefix="sglang") as pool:
        try:
            while following is not None or flying:
                held_back = False
                while following is not None and len(flying) < streams and not held_back:
                    if gate.may_start(following) or (not flying and not gate.wait_for_room()):
                        gate.started(following)
                        flying[pool.submit(ask, following)] = following
                        following = next(rest, None)
                    else:
                        held_back = True
                look_again = _LOOK_SECONDS if held_back else None
                done, _ = wait(flying, timeout=look_again, return_when=FIRST_COMPLETED)
                for future in done:
                    take(flying[future], future.result())
                    del flying[future]
        except BaseException:
            give_up([number for future, number in flying.items() if not future.cancel()])
            raise
