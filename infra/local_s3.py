"""The local S3 server: ministack with nothing but S3, on loopback, behind keys, its data on the disk.

Run as `python -m infra.local_s3` in the environment of `server_environment`. Ministack is an emulator for development;
production has a real S3 server (EAGLE3_S3_ENDPOINT).
"""

import asyncio
import hmac
import importlib.util
import logging
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from eagle3.errors import Eagle3Error
from infra.ports import LOOPBACK

HEALTH_PATH = "/_ministack/health"
_REFUSAL = b"<Error><Code>InvalidAccessKeyId</Code><Message>Not the key of this server.</Message></Error>"
_NOT_KEPT = b"<Error><Code>InsufficientStorage</Code><Message>The disk of this server is full.</Message></Error>"
COMMAND = [sys.executable, "-m", "infra.local_s3"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class NoLocalS3(Eagle3Error):
    """The package of the local S3 server is not installed."""


def check_installed() -> None:
    """Raises NoLocalS3 where ministack is not installed."""
    if importlib.util.find_spec("ministack") is None:
        raise NoLocalS3(
            "the local S3 server needs the package ministack: pip install 'eagle3-pipeline[demo]'. Or use an S3 server "
            "of your own (EAGLE3_S3_ENDPOINT, EAGLE3_S3_ACCESS_KEY, EAGLE3_S3_SECRET_KEY), or a folder "
            "(EAGLE3_STORE=file:///...)."
        )


def server_environment(port: int, data: Path, access_key: str, secret_key: str) -> dict[str, str]:
    """What ministack and its guard read: port, folder of the objects, the one key that is let in."""
    return {
        "BIND_HOST": LOOPBACK,
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "IOT_MTLS_ENABLED": "false",
        "SFTP_ENABLED": "false",
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(data),
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "LOG_LEVEL": "WARNING",
        # It would look for Docker containers of its own and end them.
        "DOCKER_HOST": "unix:///nonexistent/docker.sock",
        "DO_NOT_TRACK": "1",
    }


def guard(app: _App, access_key: str) -> _App:
    """S3 with our key and the health page only, under a loopback name.

    Ministack lets everybody in: it does not check the signature of its own key, and it answers POST /_ministack/reset,
    which any web page that the user visits could send, by deleting every object. So each request must name our access
    key, which is random and known to those who may read its file; and no bucket's name starts with an underscore.
    """

    async def guarded(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif scope["type"] == "http" and _may_pass(scope, access_key.encode()):
            await _honest(app, scope, receive, send)
        elif scope["type"] == "http":
            await _answer(scope, send, 403, _REFUSAL)

    return guarded


async def _honest(app: _App, scope: _Scope, receive: _Receive, send: _Send) -> None:
    """Serve a request; where ministack could not write an object to the disk, answer 507 in place of its 200.

    It would keep the object in memory only, write a warning to its log, and lose it at the next start.
    """
    failures: list[str] = []
    _FAILURES.set(failures)
    answer: list[MutableMapping[str, Any]] = []

    async def hold(message: MutableMapping[str, Any]) -> None:
        if scope["method"] == "GET":
            await send(message)  # large, and it writes nothing
        else:
            answer.append(message)

    await app(scope, receive, hold)
    if failures:
        await _forget(app, scope)
        await _answer(scope, send, 507, _NOT_KEPT)
        return
    for message in answer:
        await send(message)


async def _forget(app: _App, scope: _Scope) -> None:
    """Delete the object that a request has left in memory, so that it does not stand in the way of the next one."""
    headers = [(name, value) for name, value in scope["headers"] if not name.lower().startswith(b"content-")]
    deletion = {**scope, "method": "DELETE", "query_string": b"", "headers": headers}
    said = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return said.pop() if said else {"type": "http.disconnect"}

    async def ignore(_message: MutableMapping[str, Any]) -> None:
        pass

    await app(deletion, receive, ignore)


_FAILURES: ContextVar[list[str] | None] = ContextVar("failures", default=None)


class _FailureLog(logging.Handler):
    """Notes, for the request that is being served, what ministack says it could not write."""

    def emit(self, record: logging.LogRecord) -> None:
        failures, said = _FAILURES.get(), record.getMessage()
        if failures is not None and said.startswith("Failed to persist"):
            failures.append(said)


async def _answer(scope: _Scope, send: _Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/xml"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _may_pass(scope: _Scope, access_key: bytes) -> bool:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    # A page of another site can reach us under a name of its own that points to 127.0.0.1.
    hosts = headers.get(b"host", [])
    if len(hosts) != 1 or hosts[0].rpartition(b":")[0] not in {LOOPBACK.encode(), b"localhost"}:
        return False
    path: str = scope["path"]
    if path.startswith("/_"):
        return path == HEALTH_PATH and scope["method"] == "GET"
    signature = b"".join(headers.get(b"authorization", []))
    start = b"AWS4-HMAC-SHA256 Credential=" + access_key + b"/"
    return hmac.compare_digest(signature[: len(start)], start)


def main() -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    logging.getLogger("s3").addHandler(_FailureLog())
    config = Config()
    config.bind = [f"{LOOPBACK}:{os.environ['GATEWAY_PORT']}"]
    config.loglevel = "WARNING"
    config.keep_alive_timeout = 75
    asyncio.run(serve(guard(app, os.environ["AWS_ACCESS_KEY_ID"]), config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
