"""A SGLang server that we start, or one that runs already. Leaving the context ends what was started."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from infra.ports import free_ports, is_free
from infra.settings import Settings
from infra.sglang.client import SglangClient, SglangError
from infra.sglang.launch import HOST, LaunchError, LaunchPlan, ServerConfig, check_device, launch_plan

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
POLL = 0.3  # seconds
TAIL_LINES = 12
# Lines of a log that tell nothing: empty ones, a traceback's underlining, the parser's list of flags.
NOISE = re.compile(r"[\s^~]*|\s+\[-.*")
OURS = "EAGLE3_"

OnWait = Callable[[float, str], None]


class ServerStartError(SglangError):
    """A server that died or did not answer in time; the message ends with its last log lines."""


class SglangServer:
    """A server and a client of it. `client` asks, `close()` ends the server if it was started here."""

    def __init__(
        self, client: SglangClient, *, process: "_Process | None" = None, log_path: Path | None = None
    ) -> None:
        self.client = client
        self.url = client.url
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int | None:
        """Process id of the guard that holds the server, None where the server was only attached to."""
        return self._process.pid if self._process else None

    def is_running(self) -> bool:
        return self._process.exit_code() is None if self._process else self.client.is_healthy()

    def close(self) -> None:
        """End the server with all its processes, if it was started here. May be called again."""
        self.client.close()
        if self._process:
            self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(url: str, *, settings: Settings) -> SglangServer:
    """A server that runs already. `close()` leaves it running."""
    client = SglangClient(url, api_key=settings.sglang_api_key)
    try:
        client.model_info()
    except BaseException:
        client.close()
        raise
    return SglangServer(client)


def start_server(
    config: ServerConfig,
    *,
    settings: Settings,
    log_path: Path,
    port: int | None = None,
    on_wait: OnWait | None = None,
) -> SglangServer:
    """Start a server on 127.0.0.1 and wait until it answers; both of its outputs go to `log_path`.

    `on_wait(seconds, last log line)` is called while it starts. Raises LaunchError for a configuration that cannot be
    started, ServerStartError where the server dies or is not healthy within `settings.sglang_start_timeout`.
    """
    _check_folder(config.target, "target")
    if config.draft:
        _check_folder(config.draft.path, "drafter")
    if config.staging:
        config.staging.mkdir(parents=True, exist_ok=True)
    port = _check_port(port) if port is not None else free_ports(1, settings.ports)[0]
    plan = launch_plan(config, port, settings)
    check_device(plan.device, settings)
    process = _Process(plan, log_path)
    client = SglangClient(f"http://{HOST}:{port}", api_key=plan.api_key)
    try:
        _wait_until_healthy(process, client, settings.sglang_start_timeout, on_wait)
        _check_served(client, config)
    except BaseException:
        client.close()
        process.close()
        raise
    return SglangServer(client, process=process, log_path=log_path)


class _Process:
    """The guard process that holds the server (see guard.py), and the server's log."""

    def __init__(self, plan: LaunchPlan, log_path: Path) -> None:
        self._secret_file = _write_secret(plan)
        self._pump: threading.Thread | None = None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        command = list(plan.command)
        if self._secret_file:
            command += ["--config", str(self._secret_file)]
        log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(GRACE), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if plan.api_key else log,
                stderr=subprocess.STDOUT,
                env=_environment(plan),
                start_new_session=True,
            )
        except OSError:
            os.close(log)
            self.forget_secret()
            raise
        if plan.api_key and self._guard.stdout:
            # SGLang logs its arguments, the key among them.
            secret = plan.api_key.get_secret_value().encode()
            self._pump = threading.Thread(
                target=_copy_masked, args=(self._guard.stdout, log, secret), name="sglang-log", daemon=True
            )
            self._pump.start()
        else:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._guard.pid

    def exit_code(self) -> int | None:
        return self._guard.poll()

    def forget_secret(self) -> None:
        """Remove the file with the API key; the server has read it once it answers."""
        if self._secret_file:
            self._secret_file.unlink(missing_ok=True)

    def close(self) -> None:
        self.forget_secret()
        if self._guard.stdin:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()  # the guard ends the server and then itself
        try:
            self._guard.wait(timeout=GRACE + 15)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the server dies with it
            self._guard.wait()
        if self._pump:
            self._pump.join(timeout=5)


def _wait_until_healthy(process: _Process, client: SglangClient, timeout: float, on_wait: OnWait | None) -> None:
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        exit_code = process.exit_code()
        if exit_code is not None:
            raise ServerStartError(
                f"the SGLang server ended with exit code {exit_code} after {waited:.0f} s, before it answered. "
                f"{_last_lines(process.log_path)}"
            )
        if waited > timeout:
            raise ServerStartError(
                f"the SGLang server did not answer within {timeout:g} s (EAGLE3_SGLANG_START_TIMEOUT). "
                f"{_last_lines(process.log_path)}"
            )
        if client.is_healthy():
            process.forget_secret()
            return
        if on_wait:
            lines = log_tail(process.log_path, 1)
            on_wait(waited, lines[-1] if lines else "")
        time.sleep(POLL)


def _check_served(client: SglangClient, config: ServerConfig) -> None:
    served = client.server_info().model_path
    if served != str(config.target):
        raise ServerStartError(
            f"{client.url} serves {served} instead of {config.target}: another server took the port in between; "
            "start again"
        )


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say something, each cut to 400 characters."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip()[:400] for line in text.splitlines() if not NOISE.fullmatch(line)][-lines:]


def _last_lines(path: Path) -> str:
    lines = log_tail(path)
    return f"Its log ({path}) ends with:\n" + "\n".join(f"  {line}" for line in lines or ["(nothing)"])


def _environment(plan: LaunchPlan) -> dict[str, str]:
    """Ours without our settings (they hold secrets, and switches of other servers), then what the plan sets."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    searched = [plan.env.get("PYTHONPATH"), env.get("PYTHONPATH")]
    merged = os.pathsep.join(folder for folder in searched if folder)
    return env | plan.env | ({"PYTHONPATH": merged} if merged else {})


def _write_secret(plan: LaunchPlan) -> Path | None:
    if plan.api_key is None:
        return None
    handle, name = tempfile.mkstemp(prefix="eagle3-sglang-", suffix=".yaml")  # mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"api-key": plan.api_key.get_secret_value()}, file)  # JSON is YAML
    return Path(name)


def _copy_masked(source: IO[bytes], log: int, secret: bytes) -> None:
    with source, os.fdopen(log, "wb", buffering=0) as target:
        for line in source:
            with contextlib.suppress(OSError):  # a full disk must not stop the server, which waits for this reader
                target.write(line.replace(secret, b"********"))


def _check_port(port: int) -> int:
    if not is_free(port):
        raise LaunchError(
            f"port {port} of {HOST} is in use or not allowed: end what listens there, or name no port, and a free one "
            "is taken"
        )
    return port


def _check_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise LaunchError(f"the {what} {folder} is not a folder: expected a Hugging Face folder with a config.json")
    if not (folder / "config.json").is_file():
        raise LaunchError(f"the {what}'s folder {folder} has no config.json: expected a Hugging Face folder")
