"""Ray, for work that is spread over processes or machines: a local one while it is needed, or one that runs already."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eagle3.errors import Eagle3Error
from infra.quiet import quiet_libraries
from infra.settings import Settings

OBJECT_STORE_BYTES = 128 * 2**20
"""Shared memory of a local Ray: results only pass through it, and Ray wants 75 MiB at least."""

_LOOPBACK = "127.0.0.1"
_LOCAL = {
    # Ray's node would listen on the machine's own address: told that there is no cluster, it stays on 127.0.0.1. The
    # name speaks of the systems where that is Ray's default.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ADDRESS": None,  # somebody's cluster, which would be taken for the local one
}


class RayUnavailable(Eagle3Error):
    """No Ray to work on: it is not installed, does not start, or does not answer."""


@contextmanager
def connected_ray(settings: Settings, *, workers: int) -> Iterator[None]:
    """`ray` is initialised inside: by `EAGLE3_RAY_ADDRESS`, or as a local node with `workers` CPUs that ends with it.

    A local node listens on 127.0.0.1 only, wants a token of this run, has no dashboard, and leaves no process and no
    file. RayUnavailable says what is missing.
    """
    quiet_libraries()
    if settings.ray_address is not None:
        _require_answer(settings.ray_address)
        with _initialised(f"the Ray at {settings.ray_address}", address=settings.ray_address):
            yield
        return
    # Short: the names of Ray's sockets, of at most 107 bytes, begin with it.
    folder = tempfile.mkdtemp(prefix="e3ray-")
    try:
        with (
            _environment({**_LOCAL, "RAY_AUTH_TOKEN": secrets.token_hex(32)}),
            _initialised(
                "a local Ray",
                address="local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
            ),
        ):
            _require_loopback()
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _initialised(what: str, **options: Any) -> Iterator[None]:
    try:
        import ray
    except ImportError:
        raise RayUnavailable(
            "EAGLE3_MAP_RUNNER is ray, and Ray is not installed here: pip install 'eagle3-pipeline[ray]', or set it to "
            "threads"
        ) from None
    if ray.is_initialized():
        raise RayUnavailable("this process is connected to a Ray already: one run at a time")
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, namespace="eagle3", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise RayUnavailable(
            f"{what} does not answer: {type(error).__name__}: {error}. Look whether it runs, and with the Ray and the "
            "Python of this environment; without EAGLE3_RAY_ADDRESS a local one is started"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Where nobody listens, Ray itself tries for minutes."""
    if address == "auto":
        return
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise RayUnavailable(
            f"nothing answers at EAGLE3_RAY_ADDRESS {address}: {error}. Start Ray there, or unset it: then a local one "
            "is started"
        ) from None


def _require_loopback() -> None:
    """Ray reads where to listen when it is imported: too late where somebody imported it before."""
    import ray

    found = {node["NodeManagerAddress"] for node in ray.nodes()}
    if found != {_LOOPBACK}:
        raise RayUnavailable(
            f"the local Ray listens on {', '.join(sorted(found))}, which other machines may reach: Ray was imported in "
            "this process before. Start the run in a process of its own"
        )


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
