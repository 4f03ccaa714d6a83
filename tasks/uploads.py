"""Shards on their way to the store, beside the capture: few at a time, and what waits is known in bytes."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

MOST_WAITING = 2
"""Shards on the disk: one that is uploaded, one that waits. A third is not begun before the first is stored."""


class Uploads:
    """Runs `submit`ted uploads one after another in a thread. The first failure is raised by every later call.

    with Uploads() as uploads:
        uploads.submit(lambda: store.put_file(...), num_bytes)
        uploads.finish()
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._waiting: dict[Future[None], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, upload: Callable[[], None], num_bytes: int) -> None:
        """Queue an upload that frees `num_bytes` of the disk; waits while MOST_WAITING are not through."""
        while len(self._waiting) >= MOST_WAITING:
            self.wait_for_one()
        self._waiting[self._pool.submit(upload)] = num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk that wait for their upload. Raises what an upload has raised."""
        self._collect({future for future in self._waiting if future.done()})
        return sum(self._waiting.values())

    def wait_for_one(self) -> None:
        """Wait for the next upload to end; returns at once where none waits."""
        if self._waiting:
            self._collect(wait(self._waiting, return_when=FIRST_COMPLETED).done)

    def finish(self) -> None:
        """Wait for all of them."""
        while self._waiting:
            self.wait_for_one()

    def _collect(self, done: set[Future[None]]) -> None:
        for future in done:
            future.result()  # a failed one stays, so that no later call passes it over
            del self._waiting[future]
