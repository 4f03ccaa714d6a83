"""A proxy between boto3 and an S3 server that spoils what a test asks it to spoil, and counts what passes."""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Kind = Literal[
    "500",  # S3's InternalError, the request goes no further
    "503",  # S3's SlowDown
    "denied",  # S3's AccessDenied, as a bucket policy gives it
    "timeout",  # nothing comes, longer than the client waits
    "reset",  # the connection is reset before the server sees the request
    "lost",  # the server does it, the answer is lost
    "truncated",  # half of the answer's body, then the end
    "broken",  # half of the answer's body, then a reset
    "wrong answer",  # one bit of the answer's body is another
    "wrong upload",  # one bit of the request's body is another; the server may find that out by the checksum
    "wrong unnoticed",  # the same, and the server is not told a checksum
]
KINDS: tuple[Kind, ...] = (
    "500",
    "503",
    "timeout",
    "reset",
    "lost",
    "truncated",
    "broken",
    "wrong answer",
    "wrong upload",
    "wrong unnoticed",
)
_ANSWERS = {"500": (500, "InternalError"), "503": (503, "SlowDown"), "denied": (403, "AccessDenied")}
_CHECKSUMS = ("x-amz-checksum-", "x-amz-sdk-checksum-algorithm", "content-md5")
_SKIPPED = {"connection", "transfer-encoding", "expect", "keep-alive"}


@dataclass
class FaultProxy:
    """Faults are drawn for each request that passes; without any it is transparent."""

    upstream: int
    hang_s: float = 1.1
    port: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path with query) of everything that came."""
    before: Callable[[], None] = lambda: None
    """Called before each request goes on."""
    spoiled: list[Kind] = field(default_factory=list)
    _planned: list[tuple[Kind, str, str]] = field(default_factory=list)
    _always: tuple[Kind, str, str] | None = None
    _random: tuple[random.Random, float] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def once(self, kind: Kind, *, method: str = "", path: str = "") -> None:
        """Spoil the next request whose method is `method` ("": any) and whose path contains `path`."""
        self._planned.append((kind, method, path))

    def always(self, kind: Kind, *, method: str = "", path: str = "") -> None:
        self._always = (kind, method, path)

    def at_random(self, seed: int, share: float) -> None:
        """Spoil that share of the requests, each in a way drawn by the seed."""
        self._random = (random.Random(seed), share)

    def clear(self) -> None:
        self._planned, self._always, self._random = [], None, None
        self.requests, self.spoiled = [], []

    def count(self, method: str, path: str = "") -> int:
        return sum(found == method and path in where for found, where in self.requests)

    def draw(self, method: str, path: str) -> Kind | None:
        with self._lock:
            self.requests.append((method, path))
            kind = self._drawn(method, path)
            if kind:
                self.spoiled.append(kind)
            return kind

    def _drawn(self, method: str, path: str) -> Kind | None:
        for index, (kind, wanted, part) in enumerate(self._planned):
            if wanted in {"", method} and part in path:
                del self._planned[index]
                return kind
        if self._always and self._always[1] in {"", method} and self._always[2] in path:
            return self._always[0]
        if self._random and self._random[0].random() < self._random[1]:
            return self._random[0].choice(KINDS)
        return None


def flipped(data: bytes) -> bytes:
    """The bytes with one bit of the middle one changed; nothing stays nothing."""
    spoiled = bytearray(data)
    if spoiled:
        spoiled[len(spoiled) // 2] ^= 1
    return bytes(spoiled)


@contextmanager
def fault_proxy(upstream: int) -> Iterator[FaultProxy]:
    """A proxy on a free loopback port before the server on the port `upstream`."""
    proxy = FaultProxy(upstream)

    class Handler(_Handler):
        faults = proxy

    server = _Server(("127.0.0.1", 0), Handler)
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """No orderly end before the close: it would forestall a reset."""
        self.close_request(request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: FaultProxy

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client gave up
            super().handle_one_request()
            return
        self.close_connection = True

    def _pass(self) -> None:
        kind = self.faults.draw(self.command, self.path)
        self.faults.before()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if kind == "reset":
            self._reset()
        elif kind == "timeout":
            time.sleep(self.faults.hang_s)
            self.close_connection = True
        elif kind in _ANSWERS:
            status, code = _ANSWERS[kind]
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self._answer(status, [("x-amz-request-id", "0"), ("Content-Length", str(len(text)))], text)
        else:
            self._forward(kind, body)

    def _forward(self, kind: Kind | None, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _SKIPPED}
        if kind in {"wrong upload", "wrong unnoticed"}:
            body = flipped(body)
        if kind == "wrong unnoticed":
            headers = {name: value for name, value in headers.items() if not name.lower().startswith(_CHECKSUMS)}
        server = http.client.HTTPConnection("127.0.0.1", self.faults.upstream, timeout=60)
        try:
            server.request(self.command, self.path, body=body or None, headers=headers)
            answer = server.getresponse()
            data = answer.read()
            status = answer.status
            found = [(name, value) for name, value in answer.getheaders() if name.lower() not in _SKIPPED]
        finally:
            server.close()
        if not any(name.lower() == "content-length" for name, _ in found) and status not in {204, 304}:
            found.append(("Content-Length", str(len(data))))
        if kind == "lost":
            self._reset()
        elif kind in {"truncated", "broken"} and data:
            self._answer(status, found, data[: len(data) // 2])
            self._reset() if kind == "broken" else self._end()
        else:
            self._answer(status, found, flipped(data) if kind == "wrong answer" else data)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _reset(self) -> None:
        """The next close of the socket sends a reset instead of an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end()

    def _end(self) -> None:
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
