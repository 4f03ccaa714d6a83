"""The local stack: Prefect server, a worker for each pool, MLflow, S3; all on loopback, all data in one home folder.

`up` starts what does not run yet, `status` looks, `down` ends every process, `connect` makes a process a client of it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra import processes, stack_parts
from infra.settings import Settings
from infra.stack_runs import crash_lost_runs, crash_orphans
from infra.stack_start import UpResult, start_stack
from infra.stack_state import (
    Progress,
    StackError,
    StackRecord,
    StackState,
    make_state,
    prepare_home,
    read_record,
    stack_lock,
    wanted_servers,
    with_told,
    write_record,
)

__all__ = ["PartStatus", "StackError", "StackState", "UpResult", "connect", "down", "status", "up"]

_PROJECT = Path(__file__).resolve().parents[1]


class PartStatus(BaseModel):
    """One part of the stack now, and what to do where it does not work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    state: Literal["running", "stopped", "dead", "silent"]
    healthy: bool
    url: str | None
    pid: int | None
    log: Path
    mend: str


def _say_nothing(_: str) -> None:
    pass


def up(settings: Settings, *, on_progress: Progress = _say_nothing, deployments: Path | None = None) -> UpResult:
    """Start the parts that do not run, make the bucket, apply the deployments file (default: the project's).

    Ports are chosen at the first call and kept, so that links stay valid. A part that runs and answers is left alone.
    Where a part fails, those that this call started are ended. `on_progress` is called with a line of text, also from
    other threads. While workers run, settings that are not made are those of the call that started them.

    Raises StackError (a part's last log lines are in it), NoFreePort, NoLocalS3, StoreError.
    """
    deployments = (deployments or _PROJECT / "deployments.yaml").resolve()
    if not deployments.is_file():
        raise StackError(f"the deployments file {deployments} does not exist. Run from a checkout of the project.")
    prepare_home(settings.root)
    with stack_lock(settings.root, on_progress):
        return start_stack(settings, deployments, on_progress)


def down(settings: Settings, *, on_progress: Progress = _say_nothing) -> int:
    """End every process of the stack: workers, their flow runs and whatever those started, then the servers.

    Returns how many processes were ended. Data and ports stay.
    """
    root = settings.root
    if not root.is_dir():
        return 0
    with stack_lock(root, on_progress):
        # The servers last: a flow run that is ended still reports to them.
        on_progress("ending workers and their flow runs")
        ended = stack_parts.end_parts(root, lambda part: part.startswith(stack_parts.WORKER))
        try:
            record = read_record(root)
        except StackError:  # an unreadable record does not keep processes alive
            record = StackRecord()
        if "prefect" in record.processes:
            api_url = f"{record.url('prefect')}/api"
            crash_lost_runs(api_url, stack_parts.POOLS, "ended by `eagle3 down`")
            crash_orphans(api_url, stack_parts.POOLS)
        on_progress("ending servers")
        ended += stack_parts.end_parts(root, lambda _: True)
        if record.processes:
            write_record(root, record.model_copy(update={"processes": {}}))
    return ended


def status(settings: Settings) -> list[PartStatus]:
    """Every part, by its process and by its own answer. Nothing is changed."""
    record = read_record(settings.root)
    parts = _parts(with_told(settings, record), record)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda part: _look(part, record, settings.root), parts))


def connect(settings: Settings) -> Settings:
    """Settings of a client of the stack in `settings.home`, which may be down: the message is then that it is down.

    What the environment or `settings` name already is kept; the rest (the store too) is as `up` was told. The variables
    that Prefect, MLflow and child processes read are set in this process: call it before Prefect is first imported.
    Without a stack `settings` come back as they are.
    """
    record = read_record(settings.root)
    if "prefect" not in record.ports:
        return settings
    settings = with_told(settings, record)
    state = make_state(settings, record, _PROJECT)
    for name, value in state.environment().items():
        if name.lower() == "no_proxy":
            os.environ[name] = value  # what was there, and this machine
        else:
            os.environ.setdefault(name, value)
    found: dict[str, object] = {"home": state.home, "store": state.store, "mlflow_tracking_uri": state.mlflow_url}
    if state.s3_endpoint is not None:
        found |= {"s3_endpoint": state.s3_endpoint}
    if state.s3_keys is not None:
        found |= {"s3_access_key": state.s3_keys.access_key, "s3_secret_key": state.s3_keys.secret_key}
    return settings.model_copy(update=found)


def _parts(settings: Settings, record: StackRecord) -> list[stack_parts.Part]:
    """The parts that `up` would start, with the ports that are known; 0 stands for one that is not chosen yet."""
    ports = {name: record.ports.get(name, 0) for name in wanted_servers(settings, record)}
    state = make_state(settings, record.model_copy(update={"ports": record.ports | ports}), _PROJECT)
    return stack_parts.servers(settings, state, ports) + stack_parts.workers(settings, state)


def _look(part: stack_parts.Part, record: StackRecord, root: Path) -> PartStatus:
    known = record.processes.get(part.name)
    process = processes.find(known, processes.mark_of(part.name, root))
    state: Literal["running", "stopped", "dead", "silent"] = "running"
    mend = ""
    if known is None:
        state, mend = "stopped", "`eagle3 up` starts it"
    elif process is None:
        state, mend = "dead", f"it ended by itself or was killed (log: {part.log}); `eagle3 up` starts it again"
    elif not part.ready(known.started):
        state, mend = "silent", f"it runs but does not answer (log: {part.log}); `eagle3 up` starts it anew"
    return PartStatus(
        name=part.name,
        state=state,
        healthy=state == "running",
        url=part.url if known is not None else None,
        pid=None if process is None else process.pid,
        log=part.log,
        mend=mend,
    )
