"""Following a run: a server that is away for a moment or for good, the steps that are shown; and the crash hook."""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Completed, Crashed, Failed, Running
from rich.console import Console

from flows import follow
from flows.common import say_what_next

pytestmark = pytest.mark.unit

RUN, FLOW, CHILD, CHILD_FLOW = (uuid.uuid4() for _ in range(4))
Answer = tuple[int, Any]


@contextmanager
def api(answer: Callable[[str, int], Answer]) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks HTTP: `answer` says what a path is answered at the nth request; all paths are noted."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(self.path)
            status, body = answer(self.path, len(asked))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 (the name is http.server's)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/api", asked
        server.shutdown()
        thread.join()


def state(kind: str) -> dict[str, Any]:
    return {"type": kind, "name": kind.capitalize(), "id": str(uuid.uuid4())}


def pipeline(kind: str) -> dict[str, Any]:
    return {"id": str(RUN), "flow_id": str(FLOW), "name": "pipeline-x", "state_type": kind, "state": state(kind)}


def answered(path: str, kind: str) -> Answer:
    """A pipeline with one stage, a finished benchmark."""
    if path.endswith("/flow_runs/filter"):
        return 200, [
            {"id": str(CHILD), "flow_id": str(CHILD_FLOW), "state_type": "COMPLETED", "state": state("COMPLETED")}
        ]
    if path.endswith(f"/flows/{CHILD_FLOW}"):
        return 200, {"id": str(CHILD_FLOW), "name": "benchmark"}
    if path.endswith("/artifacts/filter"):
        return 200, [{"id": str(uuid.uuid4()), "flow_run_id": str(CHILD), "type": "progress", "data": 100.0}]
    if path.endswith("/admin/version"):
        return 200, "3.9.1"
    if path.endswith(f"/flow_runs/{RUN}"):
        return 200, pipeline(kind)
    return 404, {"detail": "Not Found"}


def console() -> Console:
    return Console(width=200, force_terminal=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_SECONDS", 0.01)


def test_a_server_that_fails_for_a_moment_does_not_end_the_watching(capsys: pytest.CaptureFixture[str]) -> None:
    """Failed polls, then a running pipeline, then a finished one."""

    def answer(path: str, count: int) -> Answer:
        if path.endswith(f"/flow_runs/{RUN}") and count < 6:
            return 500, {"exception_message": "database is locked"}
        return answered(path, "RUNNING" if count < 20 else "COMPLETED")

    with api(answer) as (url, asked), get_client_at(url) as client:
        assert follow.watch(client, RUN, console(), patience_seconds=60).is_completed()
        assert sum("/flows/" in path for path in asked) == 1  # a stage's name is asked once
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["register", "running"] for line in lines)
    assert any(line.split()[:3] == ["register", "done", "100%"] for line in lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Late", "no worker has taken it yet"), ("AwaitingConcurrencySlot", "waits for another run to leave the pool")],
)
def test_a_run_that_waits_for_somebody_else_says_for_whom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(follow, "_PLAIN_EVERY_SECONDS", 0.0)

    def answer(path: str, count: int) -> Answer:
        if count >= 10:
            return answered(path, "COMPLETED")
        if path.endswith(f"/flow_runs/{RUN}"):
            return 200, pipeline("SCHEDULED") | {"state": state("SCHEDULED") | {"name": name}}
        return (200, []) if path.endswith("/filter") else answered(path, "RUNNING")

    with api(answer) as (url, _), get_client_at(url) as client:
        follow.watch(client, RUN, console(), patience_seconds=60)
    assert any(line.startswith("extract") and words in line for line in capsys.readouterr().out.splitlines())


def test_a_server_that_stays_away_ends_the_watching_with_its_address() -> None:
    with api(lambda *_: (500, {})) as (url, asked), get_client_at(url) as client:
        with pytest.raises(follow.RunFailed, match=rf"{url}.* did not answer for 0 s .*eagle3 status"):
            follow.watch(client, RUN, console(), patience_seconds=0.1)
        assert len([path for path in asked if str(RUN) in path]) > 1


def test_a_run_that_was_deleted_is_named_at_once() -> None:
    with (
        api(lambda path, _: (404, {"detail": "Flow run not found"})) as (url, _),
        get_client_at(url) as client,
        pytest.raises(follow.RunFailed, match=f"run {RUN} is not on the Prefect server any more"),
    ):
        follow.watch(client, RUN, console(), patience_seconds=60)


@pytest.mark.parametrize(
    ("benchmark", "ended", "shown"),
    [
        ("running", Running(), "waiting"),
        ("done", Running(), "running"),
        ("done", Completed(), "done"),
        ("done", Failed(), "failed"),
        ("failed", Failed(), "waiting"),
    ],
)
def test_registering_is_what_the_pipeline_does_after_its_stages(benchmark: str, ended: Any, shown: str) -> None:
    views = {stage: follow.StageView("done") for stage in follow.STAGES} | {follow.REGISTER: follow.StageView()}
    views["benchmark"].state = benchmark
    follow._update_register(views, ended)
    assert views[follow.REGISTER].state == shown


def test_the_crash_hook_works_outside_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """The worker calls it in its own process, without a run's context."""

    @flow(name="train")
    def train() -> None: ...

    run = FlowRun(id=RUN, flow_id=FLOW, name="train-x")
    logger = logging.getLogger("prefect.flow_runs")
    logger.addHandler(caplog.handler)
    try:
        with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):  # there is no server here to send it to
            say_what_next(train, run, Crashed(message="ended by signal 9."))
    finally:
        logger.removeHandler(caplog.handler)
    assert "train train-x ended as Crashed: ended by signal 9. Mend the cause" in caplog.text


def get_client_at(url: str) -> SyncPrefectClient:
    return SyncPrefectClient(url)
