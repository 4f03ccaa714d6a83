"""Starting the local stack: ports, parts side by side, bucket, deployments."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from infra import local_s3, processes, stack_parts
from infra.ports import free_ports, is_free
from infra.processes import ProcessRecord, last_lines, mark_of
from infra.settings import Settings
from infra.stack_deploy import DEPLOY, Stopped, apply_deployments, are_deployed, deployments_digest, limit_pool
from infra.stack_parts import Part
from infra.stack_runs import crash_lost_runs, crash_orphans
from infra.stack_state import (
    Progress,
    ServerName,
    StackError,
    StackState,
    clear_home_errors,
    make_keys,
    make_state,
    read_record,
    told_to_up,
    wanted_servers,
    with_told,
    write_record,
)
from infra.store import open_store

_TRIES = 3  # answers that a running part may miss before it counts as hung
_POLL_S = 0.1


@dataclass(frozen=True)
class UpResult:
    """What `up` did: where the stack is, the parts that ran before, and those that this call started."""

    state: StackState
    found: frozenset[str]
    started: frozenset[str]


def start_stack(settings: Settings, deployments: Path, on_progress: Progress) -> UpResult:
    """What `infra.stack.up` does once it holds the lock."""
    with clear_home_errors(settings.root):
        return _Start(_as_running(settings), deployments, on_progress).run()


def _as_running(settings: Settings) -> Settings:
    """While a worker or a flow run of it lives, the stack's places are the ones that it was told.

    Raises StackError where the settings name another one.
    """
    record = read_record(settings.root)
    if not any(stack_parts.has_processes(settings.root, pool) for pool in stack_parts.POOLS):
        return settings
    for name, value in told_to_up(settings, record).items():
        running = record.told.get(name, Settings.model_fields[name].default)
        if value != running:
            variable = f"EAGLE3_{name.upper()}"
            raise StackError(
                f"{variable} is {value} here, but the stack of {settings.root} was started with {running or 'none'}. "
                f"`eagle3 down` first, or unset {variable}."
            )
    return with_told(settings, record)


class _Start:
    """One `up`. The threads share the record (behind a lock) and the event that stops them all."""

    def __init__(self, settings: Settings, deployments: Path, on_progress: Progress) -> None:
        self._settings = settings
        self._root = settings.root
        self._deployments = deployments
        self._say = on_progress
        self._record = read_record(self._root)
        self._record_lock = threading.Lock()
        self._stop = threading.Event()
        self._started: set[str] = set()
        self._found: set[str] = set()

    def run(self) -> UpResult:
        running = self._settle_ports()
        self._record = self._record.model_copy(update={"told": told_to_up(self._settings, self._record)})
        state = self._state()
        parts = {part.name: part for part in stack_parts.servers(self._settings, state, self._own_ports())}
        chains: list[Callable[[], None]] = [
            partial(self._serve_prefect, parts["prefect"], running, state),
            partial(self._serve_objects, parts.get("s3"), running, state),
        ]
        if "mlflow" in parts:
            chains.append(partial(self._bring_up, parts["mlflow"], running))
        try:
            self._run_side_by_side(chains)
        except BaseException:
            # Nothing half started is left; parts that ran before go on.
            stack_parts.end_parts(self._root, lambda part: part in self._started or part == DEPLOY)
            self._forget(self._started)
            raise
        return UpResult(state, found=frozenset(self._found), started=frozenset(self._started))

    def _run_side_by_side(self, chains: list[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(chains)) as pool:
            futures: list[Future[None]] = [pool.submit(chain) for chain in chains]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, Stopped)]
        if causes:
            raise causes[0]

    def _settle_ports(self) -> set[str]:
        """Choose the ports that are not known or no longer free; the parts that run and answer."""
        wanted = wanted_servers(self._settings, self._record)
        if "s3" in wanted:
            local_s3.check_installed()
            make_keys(self._settings)
        missing = [name for name in wanted if name not in self._record.ports]
        self._set_ports(dict(zip(missing, free_ports(len(missing), self._settings.ports), strict=True)))
        parts = stack_parts.servers(self._settings, self._state(), self._own_ports())
        running = {part.name for part in parts if self._works(part)}
        self._found |= running
        for part in parts:
            if part.name not in running:
                stack_parts.end_parts(self._root, part.name.__eq__)  # what is left of it
        taken = [name for name in wanted if name not in running and not is_free(self._record.ports[name])]
        if taken:
            self._say(f"another program took the port of {', '.join(taken)}: new ports, links of before are void")
            stack_parts.end_parts(self._root, lambda _: True)  # the other parts have the old addresses
            self._set_ports(dict(zip(taken, free_ports(len(taken), self._settings.ports), strict=True)))
            running = set()
        return running

    def _set_ports(self, ports: dict[ServerName, int]) -> None:
        self._record = self._record.model_copy(update={"ports": self._record.ports | ports})
        write_record(self._root, self._record)

    def _own_ports(self) -> dict[ServerName, int]:
        return {name: self._record.ports[name] for name in wanted_servers(self._settings, self._record)}

    def _state(self) -> StackState:
        return make_state(self._settings, self._record, self._deployments.parent)

    def _serve_prefect(self, server: Part, running: set[str], state: StackState) -> None:
        self._bring_up(server, running)
        workers = stack_parts.workers(self._settings, state)
        alive = {part.name for part in workers if self._works(part)}
        self._found |= alive
        for part in workers:
            if part.name not in alive:
                self._end_same(part)  # a worker that hangs goes; its flow runs go on to their end
        idle = [pool for pool in stack_parts.POOLS if not stack_parts.has_processes(self._root, pool)]
        if lost := crash_lost_runs(state.prefect_api_url, idle, "its process was gone when the stack started"):
            self._say(f"{lost} flow runs of before have no process any more: set to Crashed")
        if orphans := crash_orphans(state.prefect_api_url, stack_parts.POOLS):
            self._say(f"{orphans} flow runs waited for their turn in a run that is over: set to Crashed")
        for part in workers:
            if part.name not in alive:
                self._launch(part)
        for part in workers:
            if part.name not in alive:
                self._wait_for(part)
        self._limit_pool(state)
        self._deploy(state)

    def _serve_objects(self, server: Part | None, running: set[str], state: StackState) -> None:
        if server is not None:
            self._bring_up(server, running)
        client = self._settings.model_copy(
            update={
                "s3_endpoint": state.s3_endpoint,
                "s3_access_key": state.s3_keys.access_key if state.s3_keys else None,
                "s3_secret_key": state.s3_keys.secret_key if state.s3_keys else None,
            }
        )
        open_store(self._settings.store, client).ensure_bucket()

    def _bring_up(self, part: Part, running: set[str]) -> None:
        if part.name in running:
            self._say(f"{part.title} runs already at {part.url}")
            return
        self._launch(part)
        self._wait_for(part)

    def _works(self, part: Part) -> bool:
        """Whether the part's process lives and answers, now or soon."""
        record = self._record.processes.get(part.name)
        if record is None or processes.find(record, mark_of(part.name, self._root)) is None:
            return False
        for attempt in range(_TRIES):
            if part.ready(record.started):
                return True
            if attempt + 1 < _TRIES:
                time.sleep(1)
        return False

    def _launch(self, part: Part) -> None:
        if self._stop.is_set():
            raise Stopped
        self._started.add(part.name)
        mark = mark_of(part.name, self._root)
        record = processes.start(
            part.command, mark=mark, environment=part.environment, folder=part.folder, log=part.log
        )
        self._remember(part.name, record)

    def _end_same(self, part: Part) -> None:
        """End what was started with the part's command, recorded or not; its children may go on."""

        def same() -> list[psutil.Process]:
            found = stack_parts.processes_of_part(self._root, part.name)
            return [process for process in found if processes.runs(process, part.command)]

        processes.end(same, grace=stack_parts.GRACE_S, descendants=False)

    def _wait_for(self, part: Part) -> None:
        record = self._record.processes[part.name]
        begin = time.monotonic()
        while not part.ready(record.started):
            if self._stop.is_set():
                raise Stopped
            if processes.find(record, mark_of(part.name, self._root)) is None:
                raise StackError(
                    f"the {part.title} ended while it started. The last lines of {part.log}:\n{last_lines(part.log)}"
                )
            if time.monotonic() - begin > self._settings.stack_start_timeout:
                raise StackError(
                    f"the {part.title} did not answer within {self._settings.stack_start_timeout:g} s "
                    f"(EAGLE3_STACK_START_TIMEOUT). The last lines of {part.log}:\n{last_lines(part.log)}"
                )
            time.sleep(_POLL_S)
        where = f" at {part.url}" if part.url else ""
        self._say(f"{part.title} is up{where} ({time.monotonic() - begin:.1f} s)")

    def _remember(self, name: str, process: ProcessRecord) -> None:
        with self._record_lock:
            self._record = self._record.model_copy(update={"processes": self._record.processes | {name: process}})
            write_record(self._root, self._record)

    def _limit_pool(self, state: StackState) -> None:
        """As many runs at a time as there are workers."""
        pool, limit = stack_parts.GPU_POOL, self._settings.gpu_workers
        if not limit_pool(state.prefect_api_url, pool, limit, before=self._record.limited):
            self._say(f"the pool {pool} keeps the limit that somebody set; it has {limit} workers")
            return
        with self._record_lock:
            self._record = self._record.model_copy(update={"limited": limit})
            write_record(self._root, self._record)

    def _forget(self, names: set[str]) -> None:
        kept = {name: process for name, process in self._record.processes.items() if name not in names}
        self._record = self._record.model_copy(update={"processes": kept})
        write_record(self._root, self._record)

    def _deploy(self, state: StackState) -> None:
        begin = time.monotonic()
        digest = deployments_digest(self._deployments)
        if self._record.deployed == digest and are_deployed(self._deployments, state):
            self._say("deployments are as the file says")
            return
        apply_deployments(self._deployments, state, self._stop)
        with self._record_lock:
            self._record = self._record.model_copy(update={"deployed": digest})
            write_record(self._root, self._record)
        self._say(f"deployments applied ({time.monotonic() - begin:.1f} s)")
