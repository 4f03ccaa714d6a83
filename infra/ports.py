"""Free loopback ports for local servers."""

import secrets
import socket
from contextlib import ExitStack

from eagle3.errors import Eagle3Error

LOOPBACK = "127.0.0.1"


class NoFreePort(Eagle3Error):
    """The allowed range has no port left."""


def free_ports(count: int, port_range: str) -> list[int]:
    """`count` different ports of `port_range` ("first-last", inclusive) on which nothing listens now.

    The search starts at a random place, so that two users of one machine rarely meet. The default range of the
    settings lies below the kernel's ephemeral ports: a remembered port is not lost to somebody's outgoing connection.
    Nothing reserves the ports: start the servers soon.

    Raises NoFreePort where the range is empty, out of bounds or taken.
    """
    first, last = (int(end) for end in port_range.split("-"))
    if not 1 <= first <= last <= 65535:
        raise NoFreePort(
            f"the port range is {port_range}, expected FIRST-LAST with 1 <= FIRST <= LAST <= 65535. Set EAGLE3_PORTS."
        )
    size = last - first + 1
    offset = secrets.randbelow(size)
    found: list[int] = []
    with ExitStack() as held:  # held until all are found, so that none is found twice
        for step in range(size):
            if len(found) == count:
                break
            port = first + (offset + step) % size
            listener = _bind(port)
            if listener is not None:
                held.enter_context(listener)
                found.append(port)
    if len(found) < count:
        raise NoFreePort(
            f"{count} free ports of {LOOPBACK} were needed in {port_range}, {len(found)} are free. Stop a server that "
            "listens there, or set EAGLE3_PORTS to another range, for example EAGLE3_PORTS=40000-41000."
        )
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    listener = _bind(port)
    if listener is None:
        return False
    listener.close()
    return True


def _bind(port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1)
    except OSError:
        listener.close()
        return None
    return listener
