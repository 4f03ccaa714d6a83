"""The parts of the local stack: how each is started and how it shows that it works."""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import psutil
from pydantic import SecretStr

from infra import local_s3
from infra.ports import LOOPBACK
from infra.processes import end, mark_of, marked
from infra.settings import Settings
from infra.stack_state import ServerName, StackError, StackState

WORKER = "worker-"  # how the names of the workers' parts start
GPU_POOL = "blackwell"
POOLS = (GPU_POOL, "cpu")
_ANSWER_TIMEOUT_S = 5.0
_WORKER_POLL_S = 2
_HEARTBEAT_S = 10
_SILENT_AFTER_S = 60.0  # a machine under load delays a heartbeat; a worker that hangs is seen after this
GRACE_S = 10.0
_MLFLOW_ACCESS = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    "MLFLOW_TRACKING_INSECURE_TLS",
)


@dataclass(frozen=True)
class Part:
    """One process of the stack. `ready` says whether a process that started at a given time (epoch) works."""

    name: str
    title: str
    command: list[str]
    environment: dict[str, str]
    folder: Path
    log: Path
    url: str | None
    ready: Callable[[float], bool]


def servers(settings: Settings, state: StackState, ports: dict[ServerName, int]) -> list[Part]:
    """The servers that have a port, as parts."""
    makers = {"s3": _s3, "prefect": _prefect, "mlflow": _mlflow}
    return [makers[name](settings, state, port) for name, port in ports.items()]


def workers(settings: Settings, state: StackState) -> list[Part]:
    """The process workers of the pools; a worker makes its pool. Of the GPU pool's, each takes one run at a time."""
    more = [_worker(settings, state, GPU_POOL, number) for number in range(2, settings.gpu_workers + 1)]
    return [*(_worker(settings, state, pool) for pool in POOLS), *more]


def has_processes(root: Path, pool: str) -> bool:
    """Whether a worker of the pool, or a flow run that one started, lives."""
    names = re.compile(rf"{re.escape(f'{WORKER}{pool}')}(-\d+)?@{re.escape(str(root))}")
    return bool(marked(lambda mark: names.fullmatch(mark) is not None))


def _s3(settings: Settings, state: StackState, port: int) -> Part:
    environment = base_environment()
    if state.s3_keys is not None:
        keys = (state.s3_keys.access_key.get_secret_value(), state.s3_keys.secret_key.get_secret_value())
        environment |= local_s3.server_environment(port, settings.root / "s3", *keys)
    url = f"http://{LOOPBACK}:{port}"
    return Part(
        name="s3",
        title="S3 server (ministack)",
        command=local_s3.COMMAND,
        environment=environment,
        folder=settings.root / "s3",
        log=_log(settings, "s3"),
        url=url,
        ready=lambda _: answers(url + local_s3.HEALTH_PATH),
    )


def _prefect(settings: Settings, state: StackState, port: int) -> Part:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]
    return Part(
        name="prefect",
        title="Prefect server",
        command=command,
        environment=base_environment()
        | {
            "PREFECT_HOME": str(settings.root / "prefect"),
            "PREFECT_SERVER_UI_API_URL": state.prefect_api_url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            # SQLite lets one writer in at a time; two workers and their runs wait for it rather than fail.
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        },
        folder=settings.root / "prefect",
        log=_log(settings, "prefect"),
        url=f"http://{LOOPBACK}:{port}",
        ready=lambda _: answers(f"{state.prefect_api_url}/health"),
    )


def _mlflow(settings: Settings, state: StackState, port: int) -> Part:
    environment = base_environment() | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    artifacts = str(settings.root / "mlflow" / "artifacts")
    if settings.store.startswith("s3://"):
        artifacts = f"{settings.store.rstrip('/')}/mlflow"
        environment["AWS_DEFAULT_REGION"] = settings.s3_region
        if state.s3_endpoint is not None:
            environment["MLFLOW_S3_ENDPOINT_URL"] = state.s3_endpoint
        if state.s3_keys is not None:
            environment["AWS_ACCESS_KEY_ID"] = state.s3_keys.access_key.get_secret_value()
            environment["AWS_SECRET_ACCESS_KEY"] = state.s3_keys.secret_key.get_secret_value()
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    # Relative to the part's folder: a path may hold what an SQLAlchemy URL may not.
    command += ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", artifacts]
    command += ["--uvicorn-opts", "--no-access-log"]
    url = f"http://{LOOPBACK}:{port}"
    return Part(
        name="mlflow",
        title="MLflow server",
        command=command,
        environment=environment,
        folder=settings.root / "mlflow",
        log=_log(settings, "mlflow"),
        url=url,
        ready=lambda _: answers(f"{url}/health"),
    )


def _worker(settings: Settings, state: StackState, pool: str, number: int = 1) -> Part:
    which = pool if number == 1 else f"{pool}-{number}"
    name = f"local-{which}"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name]
    command += ["--install-policy", "never"]
    if pool == GPU_POOL and settings.gpu_workers > 1:
        command += ["--limit", "1"]  # else one of them could take all the runs
    return Part(
        name=f"{WORKER}{which}",
        title=f"worker of pool {pool}" if number == 1 else f"worker {number} of pool {pool}",
        command=command,
        environment=base_environment()
        | _mlflow_access()
        | _given(settings)
        | state.environment()
        | {
            "PREFECT_WORKER_QUERY_SECONDS": str(_WORKER_POLL_S),
            "PREFECT_WORKER_HEARTBEAT_SECONDS": str(_HEARTBEAT_S),
            # OpenMP's threads spin while they wait. On a busy machine training took 4 times the CPU for it (2 threads,
            # 30 steps: 82 s of CPU spinning, 19 s sleeping; no slower where it is idle).
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "PYTHONUNBUFFERED": "1",
        },
        folder=settings.root / "prefect",
        log=_log(settings, f"{WORKER}{which}"),
        url=None,
        ready=lambda started: _worker_is_heard(state.prefect_api_url, pool, name, started),
    )


def base_environment() -> dict[str, str]:
    """This process's environment without the Prefect and MLflow that it may be a client of."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))} | {
        "DO_NOT_TRACK": "1"
    }


def _mlflow_access() -> dict[str, str]:
    """The variables by which MLflow's own client gets into a server that asks who comes."""
    return {name: os.environ[name] for name in _MLFLOW_ACCESS if name in os.environ}


def _given(settings: Settings) -> dict[str, str]:
    """The settings that were given, by whatever way, as the variables that give them to a flow run."""
    given: dict[str, str] = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        elif isinstance(value, Path):
            value = value.expanduser().absolute()  # the worker lives in another folder
        if value is not None:
            given[f"EAGLE3_{name.upper()}"] = str(value)
    return given


def answers(url: str) -> bool:
    """Whether a server of this machine answers with success."""
    try:
        return httpx.get(url, timeout=_ANSWER_TIMEOUT_S, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _worker_is_heard(api_url: str, pool: str, name: str, started: float) -> bool:
    """Whether the Prefect server has heard from the worker lately, and since it started."""
    try:
        url = f"{api_url}/work_pools/{pool}/workers/filter"
        answer = httpx.post(url, json={}, timeout=_ANSWER_TIMEOUT_S, trust_env=False)
        if not answer.is_success:
            return False  # the worker has not made the pool yet
        for worker in answer.json():
            heard = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
            if worker["name"] == name and heard >= max(started, time.time() - _SILENT_AFTER_S):
                return True
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        pass
    return False


def _log(settings: Settings, name: str) -> Path:
    return settings.root / "logs" / f"{name}.log"


def processes_of_part(root: Path, name: str) -> list[psutil.Process]:
    """Every process of a part, the flow runs of a worker included."""
    return marked(mark_of(name, root).__eq__)


def end_parts(root: Path, wanted: Callable[[str], bool]) -> int:
    """End the processes of the parts whose names are wanted, with everything that they started; how many there were."""
    home = str(root)

    def is_wanted(mark: str) -> bool:
        part, _, where = mark.partition("@")
        return where == home and wanted(part)

    try:
        return end(lambda: marked(is_wanted), grace=GRACE_S)
    except TimeoutError as error:
        raise StackError(f"the stack of {root} could not be ended: {error}. Look at them with `ps -f PID`.") from error
