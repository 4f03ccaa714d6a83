"""What the tap does behind the scheduler's back: a thread that takes its work, and the files. Part of the tap."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class Line:
    """Work done by one thread, in the order in which it was given, with a bound on the memory that waits for it.

    Whoever gives more than `most_bytes` waits until there is room; one piece of work is taken whatever its size. What
    waits when the process ends is lost, as are the answers that wait for it.
    """

    def __init__(self, name: str, most_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)  # its thread starts with the first work
        self._most = most_bytes
        self._waiting = 0
        self._room = Condition()

    def put(self, work: Callable[[], _Result], num_bytes: int = 0) -> "Future[_Result]":
        """Do `work` later, which holds `num_bytes` until it is done."""
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._waiting + num_bytes <= self._most)
            self._waiting += num_bytes
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._leave(num_bytes))
        return future

    def _leave(self, num_bytes: int) -> None:
        with self._room:
            self._waiting -= num_bytes
            self._room.notify_all()


@dataclass
class Held:
    """A finished request whose last answer waits for its file."""

    req: Any
    work: "Future[Future[None] | None]"  # done when the file is given to the writer, which is done when it is there
    send: Callable[[], None]

    def is_over(self) -> bool:
        return self.work.done() and ((writing := self.work.result()) is None or writing.done())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for it, about `timeout` seconds at most."""
        wait([self.work], timeout)
        if self.work.done() and (writing := self.work.result()):
            wait([writing], timeout)


def write_safetensors(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]) -> None:
    """Write each tensor given as parts along its first dimension, without joining them in memory.

    The order is that of `tensors`: wider types first, so that all of them are aligned in the mapped file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, parts in tensors.items():
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        header[name] = {"dtype": _TYPES[parts[0].dtype], "shape": shape, "data_offsets": [start, end]}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)  # the format's alignment
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for parts in tensors.values():
            for part in parts:
                file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy())


def publish(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place and move it there: it is whole or absent. What failed is removed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
