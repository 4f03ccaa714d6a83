"""Ports, processes, the home folder and the record of the local stack; the stack itself runs in tests/integration."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra import processes, stack, stack_parts, stack_state
from infra.ports import NoFreePort, free_ports, is_free
from infra.processes import ProcessRecord
from infra.settings import Settings
from infra.stack import StackError
from infra.stack_state import (
    StackRecord,
    make_keys,
    make_state,
    read_keys,
    stack_lock,
    told_to_up,
    wanted_servers,
    write_record,
)

pytestmark = pytest.mark.unit

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write everywhere: file access as `nobody` (65534) for a while. Another user stays who it is."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"home": tmp_path / "home"})


class TestPorts:
    def test_free_ports_differ_and_lie_in_the_range(self) -> None:
        ports = free_ports(5, "20000-32767")
        assert len(set(ports)) == 5
        assert all(20000 <= port <= 32767 and is_free(port) for port in ports)

    def test_a_port_that_somebody_listens_on_is_not_given(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert not is_free(port)
            with pytest.raises(NoFreePort, match=rf"1 free ports .* {port}-{port}, 0 are free.*EAGLE3_PORTS"):
                free_ports(1, f"{port}-{port}")

    @pytest.mark.parametrize("wrong", ["0-10", "9-8", "70000-70001", "1-65536"])
    def test_a_range_that_is_none_is_named(self, wrong: str) -> None:
        with pytest.raises(NoFreePort, match="expected FIRST-LAST"):
            free_ports(1, wrong)


class TestProcesses:
    @pytest.fixture
    def mark(self, tmp_path: Path) -> Iterator[str]:
        mark = processes.mark_of("part", tmp_path)
        yield mark
        processes.end(lambda: processes.marked(mark.__eq__), grace=0)

    def start(self, tmp_path: Path, mark: str, command: list[str] | None = None) -> ProcessRecord:
        return processes.start(
            command or SLEEP, mark=mark, environment=dict(os.environ), folder=tmp_path / "work", log=tmp_path / "log"
        )

    def test_a_process_is_found_again_by_pid_start_and_mark(self, tmp_path: Path, mark: str) -> None:
        record = self.start(tmp_path, mark)
        found = processes.find(record, mark)
        assert found is not None
        assert found.pid == record.pid
        assert os.getsid(record.pid) == record.pid  # a Ctrl-C at our terminal does not reach it
        assert processes.find(record, mark + "x") is None
        assert processes.find(ProcessRecord(pid=record.pid, started=record.started - 60), mark) is None
        assert processes.find(None, mark) is None

    def test_a_recycled_pid_is_never_taken_for_ours(self, mark: str) -> None:
        own = psutil.Process()
        assert processes.find(ProcessRecord(pid=own.pid, started=own.create_time()), mark) is None

    def test_descendants_end_too_even_without_a_mark(self, tmp_path: Path, mark: str) -> None:
        child_file = tmp_path / "child"
        parent = (
            "import subprocess, sys, time, pathlib\n"
            f"child = subprocess.Popen({SLEEP!r}, env={{}}, start_new_session=True)\n"
            f"pathlib.Path({str(child_file)!r}).write_text(f'{{child.pid}} ')\n"
            "time.sleep(60)"
        )
        self.start(tmp_path, mark, [sys.executable, "-S", "-c", parent])
        wait_for(lambda: child_file.exists() and child_file.read_text().endswith(" "))
        child = psutil.Process(int(child_file.read_text()))
        assert processes.end(lambda: processes.marked(mark.__eq__), grace=5) == 2
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    def test_one_that_ignores_the_request_is_made_to_end(self, tmp_path: Path, mark: str) -> None:
        ready = tmp_path / "ready"
        stubborn = (
            "import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
        )
        record = self.start(tmp_path, mark, [sys.executable, "-S", "-c", stubborn])
        wait_for(ready.exists)
        start = time.monotonic()
        assert processes.end(lambda: processes.marked(mark.__eq__), grace=0.5) == 1
        assert 0.4 < time.monotonic() - start < 8
        assert processes.find(record, mark) is None

    def test_a_dead_process_is_not_found_and_its_log_is_kept(self, tmp_path: Path, mark: str) -> None:
        for word in ("first", "second"):
            record = self.start(tmp_path, mark, [sys.executable, "-S", "-c", f"print('{word}'); raise SystemExit(3)"])
            wait_for(lambda record=record: processes.find(record, mark) is None)
        assert processes.last_lines(tmp_path / "log") == "second"
        assert processes.last_lines(tmp_path / "log.1") == "first"

    def test_last_lines_say_where_there_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        assert "is empty" in processes.last_lines(tmp_path / "empty")
        assert "cannot be read" in processes.last_lines(tmp_path / "nowhere")
        (tmp_path / "long").write_text("".join(f"{i}\n" for i in range(100_000)))
        assert processes.last_lines(tmp_path / "long", 2) == "99998\n99999"


class TestHome:
    def test_a_home_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StackError, match=r"file/home cannot be used: Not a directory .*set EAGLE3_HOME"):
            stack.up(Settings(home=tmp_path / "file" / "home"))

    def test_a_home_that_may_not_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir(mode=0o500)
        with without_root(), pytest.raises(StackError, match="Permission denied"):
            stack.up(Settings(home=tmp_path / "home"))

    def test_a_full_disk_is_named(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stack_state, "_ENOUGH_DISK_BYTES", 2**62)
        with pytest.raises(StackError, match=r"MiB of free disk space, the stack needs"):
            stack.up(settings)

    def test_no_free_port_is_an_error_before_anything_starts(self, settings: Settings) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(NoFreePort, match="3 free ports"):
                stack.up(settings.model_copy(update={"ports": f"{port}-{port}"}))
        assert not (settings.root / "logs").exists()

    def test_a_missing_deployments_file_is_named(self, settings: Settings, tmp_path: Path) -> None:
        with pytest.raises(StackError, match=r"nowhere\.yaml does not exist"):
            stack.up(settings, deployments=tmp_path / "nowhere.yaml")

    def test_a_damaged_record_is_named_and_down_still_works(self, settings: Settings) -> None:
        settings.root.mkdir()
        (settings.root / "stack.json").write_text('{"version": 1, "ports": ')
        with pytest.raises(StackError, match=r"stack\.json cannot be read .*eagle3 down"):
            stack.status(settings)
        assert stack.down(settings) == 0

    def test_without_a_home_there_is_nothing_to_end_or_to_see(self, settings: Settings) -> None:
        assert stack.down(settings) == 0
        assert {(part.state, part.url) for part in stack.status(settings)} == {("stopped", None)}
        assert not settings.root.exists()

    def test_a_second_command_waits_for_the_first(self, settings: Settings) -> None:
        settings.root.mkdir()
        order: list[str] = []

        def second() -> None:
            with stack_lock(settings.root, order.append):
                order.append("second")

        with stack_lock(settings.root, order.append):
            thread = threading.Thread(target=second)
            thread.start()
            wait_for(lambda: len(order) == 1)
            order.append("first")
        thread.join()
        assert order == ["waiting for another `eagle3 up` or `eagle3 down` of this folder", "first", "second"]


class TestState:
    RECORD = StackRecord(ports={"prefect": 21000, "mlflow": 21001, "s3": 21002})

    def test_the_stack_runs_what_the_settings_do_not_name_elsewhere(self, settings: Settings) -> None:
        def wanted(**changes: str) -> list[str]:
            return list(wanted_servers(settings.model_copy(update=changes), self.RECORD))

        assert wanted() == ["prefect", "mlflow", "s3"]
        assert wanted(s3_endpoint="http://127.0.0.1:21002", mlflow_tracking_uri="http://127.0.0.1:21001") == wanted()
        assert wanted(s3_endpoint="https://s3.example") == ["prefect", "mlflow"]
        assert wanted(mlflow_tracking_uri="https://mlflow.example") == ["prefect", "s3"]
        assert wanted(store="file:///data") == ["prefect", "mlflow"]

    def test_keys_are_made_once_and_private(self, settings: Settings) -> None:
        make_keys(settings)
        keys = read_keys(settings)
        make_keys(settings)
        assert keys is not None
        assert read_keys(settings) == keys
        assert (settings.root / "s3-keys.json").stat().st_mode & 0o077 == 0
        given = settings.model_copy(update={"s3_access_key": keys.secret_key, "s3_secret_key": keys.access_key})
        found = read_keys(given)
        assert found is not None
        assert found.access_key == keys.secret_key

    def test_the_environment_of_a_client(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_keys(settings)
        monkeypatch.setenv("NO_PROXY", "example.org")
        environment = make_state(settings, self.RECORD, tmp_path).environment()
        assert environment["EAGLE3_HOME"] == str(settings.root)
        assert environment["PREFECT_API_URL"] == "http://127.0.0.1:21000/api"
        assert environment["EAGLE3_MLFLOW_TRACKING_URI"] == "http://127.0.0.1:21001"
        assert environment["EAGLE3_S3_ENDPOINT"] == "http://127.0.0.1:21002"
        assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
        values = Settings.model_validate(
            {name[7:].lower(): value for name, value in environment.items() if name[:7] == "EAGLE3_"}
        )
        assert values.s3_secret_key is not None
        elsewhere = settings.model_copy(update={"s3_endpoint": "https://s3.example"})
        assert "EAGLE3_S3_SECRET_KEY" not in make_state(elsewhere, self.RECORD, tmp_path).environment()

    def test_without_a_stack_connect_changes_nothing(self, settings: Settings) -> None:
        before = dict(os.environ)
        assert stack.connect(settings) is settings
        assert dict(os.environ) == before

    def test_a_stack_that_is_down_is_still_known(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that the message is that it is down, not that no S3 is configured."""
        monkeypatch.setattr(os, "environ", os.environ.copy())
        settings.root.mkdir()
        write_record(settings.root, self.RECORD)
        assert stack.connect(settings).s3_endpoint == "http://127.0.0.1:21002"

    def test_a_proxy_is_not_asked_for_servers_of_this_machine(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "environ", os.environ.copy() | {"NO_PROXY": ".corp.example"})
        settings.root.mkdir()
        write_record(settings.root, self.RECORD)
        stack.connect(settings)
        assert os.environ["NO_PROXY"] == ".corp.example,127.0.0.1,localhost"

    def test_a_client_has_the_places_that_up_was_told(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "environ", os.environ.copy())
        told = settings.model_copy(update={"store": "file:///data", "mlflow_tracking_uri": "https://mlflow.example"})
        record = StackRecord(ports={"prefect": 21000})
        record = record.model_copy(update={"told": told_to_up(told, record)})
        settings.root.mkdir()
        write_record(settings.root, record)
        connected = stack.connect(settings)
        assert (connected.store, connected.mlflow_tracking_uri) == ("file:///data", "https://mlflow.example")
        assert os.environ["EAGLE3_STORE"] == "file:///data"
        assert {part.name for part in stack.status(settings)} == {"prefect", "worker-blackwell", "worker-cpu"}
        named = settings.model_copy(update={"store": "s3://mine"})
        assert stack.connect(named).store == "s3://mine"

    def test_the_gpu_pool_has_as_many_workers_as_up_was_told(self, settings: Settings, tmp_path: Path) -> None:
        told = settings.model_copy(update={"gpu_workers": 3})
        record = self.RECORD.model_copy(update={"told": told_to_up(told, self.RECORD)})
        settings.root.mkdir()
        write_record(settings.root, record)
        names = {part.name for part in stack.status(settings) if part.name.startswith("worker-")}
        assert names == {"worker-blackwell", "worker-blackwell-2", "worker-blackwell-3", "worker-cpu"}
        state = make_state(told, record, tmp_path)
        one_at_a_time = {part.name: "--limit 1" in " ".join(part.command) for part in stack_parts.workers(told, state)}
        assert one_at_a_time == {name: "blackwell" in name for name in names}
        (alone,) = [part for part in stack_parts.workers(settings, state) if part.name == "worker-blackwell"]
        assert "--limit" not in alone.command  # the pool's limit counts, which a user may change

    def test_the_stacks_own_servers_are_not_remembered_as_other_places(self, settings: Settings) -> None:
        own = {"s3_endpoint": "http://127.0.0.1:21002", "mlflow_tracking_uri": "http://127.0.0.1:21001"}
        assert told_to_up(settings.model_copy(update=own), self.RECORD) == {}

    def test_workers_get_into_an_mlflow_server_that_asks_who_comes(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "let-me-in")
        monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "sqlite:///elsewhere.db")
        state = make_state(settings, self.RECORD, tmp_path)
        for worker in stack_parts.workers(settings, state):
            assert worker.environment["MLFLOW_TRACKING_TOKEN"] == "let-me-in"
            assert "MLFLOW_BACKEND_STORE_URI" not in worker.environment
        for server in stack_parts.servers(settings, state, self.RECORD.ports):
            assert "MLFLOW_TRACKING_TOKEN" not in server.environment


def test_the_servers_commands_start_without_our_packages_on_the_path(tmp_path: Path) -> None:
    """Parts run in the home folder: nothing may depend on the folder that `eagle3 up` was called in."""
    command = [sys.executable, "-c", "import infra.local_s3"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def wait_for(what, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
