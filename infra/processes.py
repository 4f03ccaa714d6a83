"""Processes that outlive the one that starts them: started in a session of their own, found again, ended whole.

Every one carries a mark in its environment, which its children inherit. The mark finds what a pid cannot: a flow run
whose worker was killed, a server in a session of its own. A pid alone never decides: it may have been recycled.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

# Not EAGLE3_*: our settings are taken out of the environment of servers that must not see them.
MARK = "PART_OF_EAGLE3_STACK"
_SAME_START_S = 2.0  # the start time is computed from the clock, which may be set
_MARK_WAIT_S = 1.0
_KILL_WAIT_S = 10.0
_KEPT_LOG_LINES = 20
_TAIL_BYTES = 2**16


class ProcessRecord(BaseModel):
    """What identifies a process after its starter has gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started: float  # seconds since the epoch


def mark_of(part: str, home: Path) -> str:
    return f"{part}@{home}"


def start(command: list[str], *, mark: str, environment: dict[str, str], folder: Path, log: Path) -> ProcessRecord:
    """Start a process in a session of its own; its output goes to `log`, the log of before to `log` + ".1".

    Raises OSError where the command, the folder or the log cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = time.time()
    with suppress(psutil.Error, OSError):  # it may have ended already, which `find` will tell
        child = psutil.Process(process.pid)
        started = child.create_time()
        deadline = time.monotonic() + _MARK_WAIT_S
        while not child.environ() and time.monotonic() < deadline:
            time.sleep(0.001)  # the kernel shows the environment, and so the mark, a moment after the start
    # It is meant to run on when this object goes; psutil collects its exit status when it is ended.
    process.returncode = 0
    return ProcessRecord(pid=process.pid, started=started)


def find(record: ProcessRecord | None, mark: str) -> psutil.Process | None:
    """The recorded process if it still runs; None where it ended or its pid has gone to another one."""
    if record is None:
        return None
    with suppress(psutil.Error, OSError):
        process = psutil.Process(record.pid)
        same_start = abs(process.create_time() - record.started) < _SAME_START_S
        environment = process.environ()
        same_mark = not environment or environment.get(MARK) == mark  # one that sets its own title wipes it
        if same_start and same_mark and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def marked(wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """Every running process of this user, but this one, whose mark is wanted."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or gone meanwhile
            mark = process.environ().get(MARK) if process.pid != os.getpid() else None
            if mark is not None and wanted(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def runs(process: psutil.Process, command: list[str]) -> bool:
    """Whether this is the process of the command itself, not one of its children."""
    try:
        return bool(process.cmdline()[1:] == command[1:])  # the interpreter may be a link
    except psutil.Error:
        return False


def end(find_them: Callable[[], Iterable[psutil.Process]], *, grace: float, descendants: bool = True) -> int:
    """Ask processes and their descendants to end, wait `grace` seconds, then make them; how many there were.

    They are looked for again until none is left, because they may start others meanwhile. Descendants are remembered,
    because one that sets its own title (as SGLang's do) wipes its mark.

    Raises TimeoutError where one does not even end by SIGKILL.
    """
    known: set[psutil.Process] = set()
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + grace
    while True:
        for process in find_them():
            known.add(process)
            with suppress(psutil.Error):
                known.update(process.children(recursive=True) if descendants else ())
        running = {process for process in known if _runs(process)}
        if not running:
            return len(known)
        force = time.monotonic() > deadline
        if time.monotonic() > deadline + _KILL_WAIT_S:
            pids = ", ".join(str(process.pid) for process in running)
            raise TimeoutError(f"the processes {pids} did not end, not even by SIGKILL")
        for process in running if force else running - asked:
            with suppress(psutil.Error):
                process.kill() if force else process.terminate()
        asked |= running
        psutil.wait_procs(list(running), timeout=0.2)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def last_lines(log: Path, count: int = _KEPT_LOG_LINES) -> str:
    """The end of a log, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return "\n".join(lines[-count:]) or f"({log} is empty)"
