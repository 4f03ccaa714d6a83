"""A real MLflow server for tests: a free loopback port, SQLite and artifacts in a folder of the test."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.ports import free_ports
from infra.settings import Settings

_START_TIMEOUT_S = 180.0  # 8 s alone, 40 s beside other servers on two cores
_STOP_TIMEOUT_S = 10.0


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve MLflow from `folder` and yield its URL; the server's whole process group is ended on the way out.

    Raises RuntimeError with the server's last log lines where it does not answer within 180 s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "mlflow.log"
    (port,) = free_ports(1, Settings().ports)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    environment |= {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(server, url, log)
        yield url
    finally:
        _end_group(server)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(
        f"the MLflow server at {url} did not answer (exit code {server.poll()}); its last lines:\n{tail}"
    )


def _end_group(server: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, then make it; the group is the server's own (start_new_session)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline and _group_lives(server):
            time.sleep(0.05)
        if server.poll() is not None and not _group_lives(server):
            break
    server.wait()


def _group_lives(server: subprocess.Popen[bytes]) -> bool:
    server.poll()  # reaps the leader: a zombie would keep the group alive
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True
