"""Work that is done ahead of its consumer, by one thread, into a bounded buffer."""

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T], Generic[T]):
    """The items of an iterator, in order, made up to `depth` ahead by a thread of its own.

    At most `depth` items are ready or in the making at any time; with depth 0 there is no thread, and each item is made
    when it is asked for. An error of the iterator is raised by `next`, after the items before it. `close` (or leaving
    the `with` block) ends the thread after the item in its hands; then there are no more items.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._done, self._closed = False, False
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            return next(self._items)
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._done)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread and drop what is ready. Waits for the item that is being made."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            while self._wait_for_room():
                item = next(self._items)
                with self._changed:
                    if not self._closed:
                        self._ready.append(item)
                    del item  # the consumer's alone: it may be large
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  # the consumer raises it
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed
