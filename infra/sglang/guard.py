"""Runs a server as a child and leaves nothing of it: `python -I guard.py GRACE COMMAND...`. Standard library only.

The guard's standard input is a pipe whose other end its starter holds. When the pipe closes, because the starter asked
for it or died in whatever way (kill -9 included), the guard ends the server's whole process group: SIGTERM to the
server, GRACE seconds, SIGKILL to the group. A death signal on the server itself would not do: Linux sends it when the
*thread* that started the child ends, and an orchestrator's threads come and go.

Exits with the server's exit code, 128 + n where signal n ended it.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL = 0.1  # seconds


def main() -> int:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the server come to the guard, which reaps them
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # Should the guard itself be killed, the server dies with it, and SGLang's children with the server.
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 (one thread)
    )
    exit_code: int | None = None
    starter_lives = True
    while exit_code is None and starter_lives:
        starter_lives = not select.select([sys.stdin], [], [], POLL)[0]
        exit_code = _reap(server.pid)
    if exit_code is None:
        exit_code = _end(server.pid, grace)
    _kill_group(server.pid)
    return exit_code


def _end(server: int, grace: float) -> int:
    """Ask the server to end, and not its children: it takes a child that ends before it for a crash."""
    os.kill(server, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        exit_code = _reap(server)
        if exit_code is not None:
            return exit_code
        time.sleep(POLL)
    return 128 + signal.SIGKILL


def _reap(server: int) -> int | None:
    """Collect what has ended; the server's exit code if it was among them."""
    exit_code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if pid == 0:
            return exit_code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            exit_code = code if code >= 0 else 128 - code


def _kill_group(group: int) -> None:
    """SIGKILL for whatever is left of a process group, until nothing is."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        _reap(group)
        time.sleep(POLL)


if __name__ == "__main__":
    sys.exit(main())
