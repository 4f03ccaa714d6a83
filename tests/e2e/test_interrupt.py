"""Signals: `eagle3 run` leaves its run, `eagle3 demo` cancels it; neither takes down a stack that was up before."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import PROJECT, Command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_ctrl_c_leaves_a_run_and_says_how_to_cancel_it(command: Command, config: Path) -> None:
    code, shown = interrupt(command, "run", "--config", str(config))
    assert code == 130
    run = run_of(shown)
    assert "goes on. Watch it, or cancel it, at http://127.0.0.1:" in shown
    assert state_of(command, run) not in {"CANCELLED", "CANCELLING", "CRASHED", "FAILED"}
    found = re.search(r"or cancel it with: (\S+=\S+) (.*)", shown)
    assert found
    variable, arguments = found.groups()
    name, _, value = variable.partition("=")
    environment = command.environment() | {name: value}
    subprocess.run(shlex.split(arguments), env=environment, check=True, capture_output=True, timeout=60)
    wait_for_end(command, run)
    assert state_of(command, run) == "CANCELLED"


def test_ending_the_demo_cancels_its_run_and_leaves_a_stack_that_was_up(command: Command) -> None:
    code, shown = interrupt(command, "demo", "--exit", by=signal.SIGTERM)
    assert code == 130
    assert "is being cancelled" in shown
    assert "The stack was up before, so it stays up" in shown
    wait_for_end(command, run_of(shown))
    assert state_of(command, run_of(shown)) == "CANCELLED"
    assert all(part["healthy"] for part in command.json("status"))


def interrupt(command: Command, *args: str, by: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    """Run a command and press Ctrl-C (or send another signal) once it has a run; exit code and what it printed."""
    # A shell that runs these tests in the background tells its children to ignore Ctrl-C; a child of ours heeds it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "eagle3"), *args],
        cwd=PROJECT,
        env=command.environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "/flow-run/" in line:
                time.sleep(1)
                process.send_signal(by)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()  # only one that did not end
        process.wait()
    return process.returncode, "".join(lines) + rest


def run_of(shown: str) -> str:
    found = re.search(r"/flow-run/([0-9a-f-]{36})", shown)
    assert found, shown
    return found.group(1)


def state_of(command: Command, run: str) -> Any:
    url = next(part["url"] for part in command.json("status", expect=None) if part["name"] == "prefect")
    return httpx.get(f"{url}/api/flow_runs/{run}", trust_env=False).raise_for_status().json()["state_type"]


def wait_for_end(command: Command, run: str) -> None:
    deadline = time.monotonic() + 150  # a busy machine
    while state_of(command, run) not in {"CANCELLED", "CRASHED", "FAILED", "COMPLETED"}:
        assert time.monotonic() < deadline, "the run did not end"
        time.sleep(1)
