"""The guard process: whatever happens to its starter, nothing of the server is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.sglang import guard

pytestmark = pytest.mark.unit

# A server with a child; both write their pid and then wait. The child ignores SIGTERM, as a busy scheduler would.
SERVER = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
time.sleep(0.3)
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(60)
"""
STARTER = """
import subprocess, sys, time
guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(guard.pid, flush=True)
time.sleep(60)
"""


def guarded(*command: str, grace: float = 5) -> list[str]:
    return [sys.executable, "-I", guard.__file__, str(grace), *command]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def pids_in(file: Path) -> list[int]:
    wait_for(file.exists)
    return [int(pid) for pid in file.read_text().split()]


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_the_server_and_its_children_end_when_the_pipe_closes(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    process = subprocess.Popen(guarded(sys.executable, "-c", SERVER, str(pids_file)), stdin=subprocess.PIPE)
    pids = pids_in(pids_file)
    assert process.poll() is None
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert all_gone(pids)


def test_nothing_is_left_of_a_server_whose_starter_is_killed(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *guarded(sys.executable, "-c", SERVER, str(pids_file))], stdout=subprocess.PIPE
    )
    assert starter.stdout
    guard_pid = int(starter.stdout.readline())
    pids = pids_in(pids_file)
    starter.kill()
    starter.communicate()
    wait_for(lambda: all_gone(pids))
    # The guard is an orphan now; whoever inherits it may leave it as a zombie.
    wait_for(lambda: not psutil.pid_exists(guard_pid) or psutil.Process(guard_pid).status() == psutil.STATUS_ZOMBIE)


def test_the_server_dies_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    process = subprocess.Popen(guarded(sys.executable, "-c", SERVER, str(pids_file)), stdin=subprocess.PIPE)
    server, child = pids_in(pids_file)
    process.kill()
    process.communicate()
    wait_for(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE)
    os.kill(child, signal.SIGKILL)  # SGLang's own children ask for a death signal themselves; this one did not


def test_a_server_that_ignores_the_request_is_killed_after_the_grace() -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    command = guarded(sys.executable, "-c", stubborn, grace=0.5)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    started = time.monotonic()
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    assert 0.5 <= time.monotonic() - started < 5


def test_the_servers_exit_code_is_passed_on() -> None:
    process = subprocess.Popen(guarded(sys.executable, "-c", "raise SystemExit(7)"), stdin=subprocess.PIPE)
    assert process.wait(timeout=20) == 7


def test_a_server_outlives_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    command = guarded(sys.executable, "-c", "import time; time.sleep(60)")
    thread = threading.Thread(target=lambda: started.append(subprocess.Popen(command, stdin=subprocess.PIPE)))
    thread.start()
    thread.join()
    time.sleep(1)
    assert started[0].poll() is None
    started[0].communicate()
