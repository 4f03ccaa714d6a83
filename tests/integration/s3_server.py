"""A real S3 server for tests: ministack on a free loopback port, its data in a folder of the test."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.local_s3 import COMMAND, HEALTH_PATH, server_environment
from infra.ports import free_ports
from infra.settings import Settings

_START_TIMEOUT_S = 30.0


class S3Server:
    """A running server: `endpoint`, its keys, and a process that a test may stop, freeze and start again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1, Settings().ports)[0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.access_key = f"TEST{uuid.uuid4().hex[:12].upper()}"
        self.secret_key = uuid.uuid4().hex
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def settings(self, **changes: Any) -> Settings:
        """Settings of a client of this server; a test's buckets start with `s3://test-`."""
        values = {
            "home": self._folder / "home",
            "s3_endpoint": self.endpoint,
            "s3_access_key": self.access_key,
            "s3_secret_key": self.secret_key,
            "store": "s3://test-bucket",
        }
        return Settings.model_validate(values | changes)

    def start(self) -> None:
        """Start it (again, with the objects of before) and wait until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = server_environment(self.port, self._folder / "objects", self.access_key, self.secret_key)
        log = self._folder / "s3.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                COMMAND, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.endpoint + HEALTH_PATH, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Serve S3 from `folder`; ended, frozen or not, on the way out."""
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
