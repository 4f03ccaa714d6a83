"""The local stack, started once: every part, a flow through a worker, killed and hung parts, nothing left at the end.

The tests run in order and share the stack.
"""

import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from infra import stack, stack_parts
from infra.processes import MARK, marked
from infra.settings import Settings
from infra.sglang.doctor import DoctorItem
from infra.stack import StackError, StackState
from infra.stack_runs import while_locked
from infra.store import open_store
from tasks.doctor import examine_machine

pytestmark = pytest.mark.integration

PARTS = {"prefect", "mlflow", "s3", "worker-blackwell", "worker-cpu"}
RUN_TIMEOUT_S = 120.0

FLOWS = '''
import os, subprocess, sys, time
from pathlib import Path
from prefect import flow

@flow
def hello(name: str) -> None:
    import mlflow
    from infra.settings import Settings
    from infra.store import open_store
    settings = Settings()
    mlflow.set_tracking_uri(settings.mlflow_tracking_uri)
    with mlflow.start_run(run_name=name):
        mlflow.log_text("proxied", "note.txt")
    open_store(settings.store, settings).put_bytes(f"hello/{name}", str(settings.sglang_device).encode())

@flow
def long() -> None:
    """As a stage that serves: a process in a session of its own, without our variables."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("EAGLE3_")}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env, start_new_session=True)
    Path(os.environ["EAGLE3_HOME"], "child.tmp").write_text(str(child.pid))
    Path(os.environ["EAGLE3_HOME"], "child.tmp").rename(Path(os.environ["EAGLE3_HOME"], "child"))
    time.sleep(600)

@flow
def parent() -> None:
    """As a pipeline: it waits for a stage, which waits for its turn."""
    from prefect.deployments import run_deployment
    run_deployment("long/blackwell", timeout=None, poll_interval=1)
'''
DEPLOYMENTS = """
name: test
pull:
  - prefect.deployments.steps.set_working_directory:
      directory: "{{ $EAGLE3_PROJECT }}"
deployments:
  - name: cpu
    entrypoint: stack_flows/flows.py:hello
    work_pool: {name: cpu}
  - name: cpu
    entrypoint: stack_flows/flows.py:parent
    work_pool: {name: cpu}
  - name: blackwell
    entrypoint: stack_flows/flows.py:long
    work_pool: {name: blackwell}
"""


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    (project / "stack_flows").mkdir()
    (project / "stack_flows" / "__init__.py").touch()
    (project / "stack_flows" / "flows.py").write_text(FLOWS)
    (project / "deployments.yaml").write_text(DEPLOYMENTS)
    return project / "deployments.yaml"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    home = tmp_path_factory.mktemp("stack") / "a home"
    result = Settings.model_validate({"home": home, "store": "s3://test-stack/lab", "sglang_device": "cpu"})
    try:
        yield result
    finally:
        stack.down(result)
        assert processes_of(result) == []


@pytest.fixture(scope="module")
def state(settings: Settings, deployments: Path) -> StackState:
    lines: list[str] = []
    start = time.monotonic()
    up = stack.up(settings, deployments=deployments, on_progress=lines.append)
    print(f"up: {time.monotonic() - start:.1f} s", *lines, sep="\n")
    assert (up.found, up.started) == (frozenset(), PARTS)
    return up.state


def processes_of(settings: Settings) -> list[psutil.Process]:
    return marked(lambda mark: mark.endswith(f"@{settings.root}"))


def pids(settings: Settings) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status(settings)}


@while_locked
def api(state: StackState, method: str, path: str, body: Any = None) -> Any:
    answer = httpx.request(method, f"{state.prefect_api_url}/{path}", json=body, timeout=30, trust_env=False)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def start_run(state: StackState, deployment: str, parameters: dict[str, Any], at: str | None = None) -> str:
    found = api(state, "GET", f"deployments/name/{deployment}")
    run = {"parameters": parameters}
    if at is not None:
        run["state"] = {"type": "SCHEDULED", "name": "Scheduled", "state_details": {"scheduled_time": at}}
    return str(api(state, "POST", f"deployments/{found['id']}/create_flow_run", run)["id"])


def wait_for(what: Any, timeout: float = RUN_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def client_settings(settings: Settings, state: StackState) -> Settings:
    """What `connect` gives, without touching this process's environment."""
    assert state.s3_keys is not None
    keys = {"s3_access_key": state.s3_keys.access_key, "s3_secret_key": state.s3_keys.secret_key}
    return settings.model_copy(update={"s3_endpoint": state.s3_endpoint, **keys})


def test_up_starts_every_part(settings: Settings, state: StackState) -> None:
    parts = {part.name: part for part in stack.status(settings)}
    assert set(parts) == PARTS
    assert all(part.healthy and part.state == "running" and part.mend == "" for part in parts.values())
    assert "<!DOCTYPE html>" in httpx.get(state.prefect_ui_url, follow_redirects=True).text
    assert "MLflow" in httpx.get(state.mlflow_url).text
    assert list(open_store(settings.store, client_settings(settings, state)).list()) == []


def test_it_listens_on_loopback_only_and_keeps_its_keys(settings: Settings, state: StackState) -> None:
    listening = {
        connection.laddr.ip
        for process in processes_of(settings)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    assert stat.S_IMODE(settings.root.stat().st_mode) == 0o700
    for name in ("s3-keys.json", "stack.json"):
        assert stat.S_IMODE((settings.root / name).stat().st_mode) == 0o600
    secret = state.environment()["EAGLE3_S3_SECRET_KEY"]
    assert len(secret) >= 40
    assert secret not in repr(state) + (settings.root / "stack.json").read_text()
    for log in (settings.root / "logs").iterdir():
        assert secret not in log.read_text()


def test_a_flow_runs_through_its_worker_and_reaches_store_and_mlflow(settings: Settings, state: StackState) -> None:
    run = start_run(state, "hello/cpu", {"name": "first"})
    wait_for(lambda: api(state, "GET", f"flow_runs/{run}")["state_type"] in {"COMPLETED", "FAILED", "CRASHED"})
    assert api(state, "GET", f"flow_runs/{run}")["state_type"] == "COMPLETED"
    store = open_store(settings.store, client_settings(settings, state))
    assert store.get_bytes("hello/first", max_bytes=10) == b"cpu"  # a setting that was given to `up`
    notes = [key for key, _ in store.list("mlflow/") if key.endswith("note.txt")]
    assert len(notes) == 1  # MLflow's artifacts go through its server into the bucket
    assert store.get_bytes(notes[0], max_bytes=10) == b"proxied"


def test_a_second_up_finds_the_first(settings: Settings, state: StackState, deployments: Path) -> None:
    before, start = pids(settings), time.monotonic()
    again = stack.up(settings, deployments=deployments)
    assert (again.state, again.found, again.started) == (state, PARTS, frozenset())
    assert time.monotonic() - start < 20
    assert pids(settings) == before


def test_two_ups_at_once_start_one_stack(settings: Settings, state: StackState, deployments: Path) -> None:
    kill(settings, "worker-cpu")
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        ups = [pool.submit(stack.up, settings, deployments=deployments, on_progress=lines.append) for _ in range(2)]
    assert [future.result().state for future in ups] == [state, state]
    assert sum("worker of pool cpu is up" in line for line in lines) == 1
    assert sum(process.environ()[MARK].startswith("worker-cpu@") for process in processes_of(settings)) == 1


def test_a_client_in_another_process_is_connected_by_the_home_alone(
    settings: Settings, state: StackState, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("EAGLE3_", "PREFECT_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what `connect` sets is gone after the test
    connected = stack.connect(Settings(home=settings.root))
    assert connected.store == settings.store
    assert (connected.mlflow_tracking_uri, connected.s3_endpoint) == (state.mlflow_url, state.s3_endpoint)
    assert open_store(connected.store, connected).exists("hello/first")
    assert os.environ["PREFECT_API_URL"] == state.prefect_api_url
    monkeypatch.setenv("EAGLE3_MLFLOW_TRACKING_URI", "http://mlflow.example")
    assert stack.connect(Settings(home=settings.root)).mlflow_tracking_uri == "http://mlflow.example"


def test_doctor_asks_servers_of_another_stack(settings: Settings, state: StackState, tmp_path: Path) -> None:
    other = client_settings(settings, state).model_copy(
        update={"home": tmp_path / "other", "mlflow_tracking_uri": state.mlflow_url}
    )

    def found(asked: Settings) -> dict[str, DoctorItem]:
        return {item.name.partition(" ")[0]: item for item in examine_machine(asked)}

    items = found(other)
    assert items["mlflow"].ok
    assert items["store"].ok
    wrong = found(other.model_copy(update={"store": "s3://no-such-bucket"}))["store"]
    assert not wrong.ok
    assert "bucket 'no-such-bucket' does not exist" in wrong.mend


def test_a_killed_part_is_seen_and_started_again(settings: Settings, state: StackState, deployments: Path) -> None:
    before = pids(settings)
    kill(settings, "mlflow")  # its own child lives on and holds the port
    kill(settings, "worker-blackwell")
    parts = {part.name: part for part in stack.status(settings)}
    assert {name for name, part in parts.items() if not part.healthy} == {"mlflow", "worker-blackwell"}
    assert parts["mlflow"].state == "dead"
    assert "`eagle3 up` starts it again" in parts["mlflow"].mend
    assert str(settings.root / "logs" / "mlflow.log") in parts["mlflow"].mend
    again = stack.up(settings, deployments=deployments)
    assert again.state == state  # the same ports
    assert again.started == {"mlflow", "worker-blackwell"}
    assert again.found == PARTS - again.started
    after = pids(settings)
    assert {name for name in PARTS if after[name] != before[name]} == {"mlflow", "worker-blackwell"}
    assert all(part.healthy for part in stack.status(settings))


def test_a_hung_part_is_seen(settings: Settings, state: StackState) -> None:
    pid = pids(settings)["s3"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        silent = {part.name: part for part in stack.status(settings)}["s3"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (silent.state, silent.healthy) == ("silent", False)
    assert "does not answer" in silent.mend


def test_a_worker_that_hangs_is_seen(settings: Settings, state: StackState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_parts, "_SILENT_AFTER_S", 0.5)
    pid = pids(settings)["worker-cpu"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(1)
        assert {part.name: part.state for part in stack.status(settings)}["worker-cpu"] == "silent"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_pool_of_the_whole_box_takes_one_run_at_a_time(
    settings: Settings, state: StackState, deployments: Path
) -> None:
    assert api(state, "GET", "work_pools/blackwell")["concurrency_limit"] == 1
    assert api(state, "GET", "work_pools/cpu")["concurrency_limit"] is None  # a pipeline waits there for its stage
    api(state, "PATCH", "work_pools/blackwell", {"concurrency_limit": 2})
    stack.up(settings, deployments=deployments)
    assert api(state, "GET", "work_pools/blackwell")["concurrency_limit"] == 2  # somebody's own choice stays
    api(state, "PATCH", "work_pools/blackwell", {"concurrency_limit": 1})


def test_another_store_while_it_runs_is_refused(settings: Settings, state: StackState, deployments: Path) -> None:
    other = settings.model_copy(update={"store": "s3://elsewhere"})
    with pytest.raises(StackError, match=r"EAGLE3_STORE is s3://elsewhere here, .* started with s3://test-stack/lab"):
        stack.up(other, deployments=deployments)
    unnamed = Settings.model_validate({"home": settings.root, "sglang_device": "cpu"})
    assert stack.up(unnamed, deployments=deployments).state == state


def test_deployments_that_prefect_refuses_are_an_error_and_what_ran_runs_on(
    settings: Settings, state: StackState, deployments: Path, tmp_path: Path
) -> None:
    before = pids(settings)
    wrong = tmp_path / "deployments.yaml"
    wrong.write_text(DEPLOYMENTS.replace("flows.py:hello", "flows.py:nothing"))
    with pytest.raises(StackError, match=r"deployments\.yaml could not be applied(.|\n)*The last lines"):
        stack.up(settings, deployments=wrong)
    assert pids(settings) == before


def test_down_ends_flow_runs_and_what_they_started(settings: Settings, state: StackState) -> None:
    run, child = start_long_run(settings, state)
    pipeline = start_run(state, "parent/cpu", {})
    wait_for(lambda: len(stages_of(state, pipeline)) == 1)
    (stage,) = stages_of(state, pipeline)
    assert stage["state_type"] == "SCHEDULED"  # the pool is taken
    waiting = start_run(state, "long/blackwell", {}, at="2099-01-01T00:00:00Z")  # a person's own: it waits on
    kill(settings, "worker-blackwell")  # the flow run has no parent any more
    start = time.monotonic()
    ended = stack.down(settings)
    print(f"down: {time.monotonic() - start:.1f} s, {ended} processes")
    assert not child.is_running()
    assert processes_of(settings) == []
    assert ended >= len(PARTS)
    assert {part.state for part in stack.status(settings)} == {"stopped"}
    assert stack.down(settings) == 0
    (settings.root / "runs.json").write_text(json.dumps([run, pipeline, stage["id"], waiting]))


def test_up_again_keeps_data_and_links_and_moves_from_a_port_that_was_taken(
    settings: Settings, state: StackState, deployments: Path
) -> None:
    port = int(state.mlflow_url.rpartition(":")[2])
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", port)):
        again = stack.up(settings, deployments=deployments, on_progress=lines.append).state
    assert any("took the port of mlflow" in line for line in lines)
    assert again.mlflow_url != state.mlflow_url
    assert (again.prefect_api_url, again.s3_endpoint) == (state.prefect_api_url, state.s3_endpoint)
    assert open_store(settings.store, client_settings(settings, again)).exists("hello/first")
    run, pipeline, stage, waiting = (
        api(again, "GET", f"flow_runs/{run}") for run in json.loads((settings.root / "runs.json").read_text())
    )
    assert (run["state_type"], run["state"]["message"]) == ("CRASHED", "ended by `eagle3 down`")
    assert pipeline["state_type"] == "CRASHED"
    assert (stage["state_type"], stage["state"]["message"]) == ("CRASHED", f"its parent run {pipeline['name']} is over")
    assert waiting["state_type"] == "SCHEDULED"


def test_after_a_crash_of_everything_up_says_which_runs_are_lost(
    settings: Settings, state: StackState, deployments: Path
) -> None:
    now = stack.up(settings, deployments=deployments).state
    run, _ = start_long_run(settings, now)
    for process in processes_of(settings):
        if process.environ()[MARK].startswith(
            "worker-"
        ):  # as when the machine loses power; the servers stay, for speed
            process.kill()
    lines: list[str] = []
    stack.up(settings, deployments=deployments, on_progress=lines.append)
    assert any("1 flow runs of before" in line for line in lines)
    assert api(now, "GET", f"flow_runs/{run}")["state_type"] == "CRASHED"


def test_a_part_that_dies_at_start_is_an_error_with_its_last_lines_and_nothing_is_left(
    tmp_path: Path, deployments: Path
) -> None:
    settings = Settings.model_validate({"home": tmp_path / "home", "store": (tmp_path / "store").as_uri()})
    (settings.root / "mlflow").mkdir(parents=True)
    (settings.root / "mlflow" / "mlflow.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StackError, match=r"MLflow server ended while it started(.|\n)*not a database"):
        stack.up(settings, deployments=deployments)
    assert processes_of(settings) == []
    states = {part.name: part.state for part in stack.status(settings)}
    assert states == dict.fromkeys(PARTS - {"s3"}, "stopped")  # a folder store needs no S3 server


def start_long_run(settings: Settings, state: StackState) -> tuple[str, psutil.Process]:
    """A run of the flow `long`, and the process that it started."""
    (settings.root / "child").unlink(missing_ok=True)
    run = start_run(state, "long/blackwell", {})
    wait_for((settings.root / "child").exists)
    return run, psutil.Process(int((settings.root / "child").read_text()))


def stages_of(state: StackState, pipeline: str) -> list[Any]:
    query = {"flow_runs": {"parent_flow_run_id": {"any_": [pipeline]}}}
    found: list[Any] = api(state, "POST", "flow_runs/filter", query)
    return found


def kill(settings: Settings, part: str) -> None:
    pid = pids(settings)[part]
    assert pid is not None
    process = psutil.Process(pid)
    process.kill()
    process.wait(timeout=10)
