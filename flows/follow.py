"""Submit a pipeline run and follow it on a terminal: every stage, how far it is, how long still.

Imports Prefect inside the functions: the API's address is set (infra.stack.connect) before Prefect is first imported.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eagle3.errors import Eagle3Error
from infra.settings import Settings
from tasks.params import PipelineParams
from tasks.results import PipelineResult

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

STAGES = ("extract", "validate", "train", "benchmark")
PIPELINE = "pipeline/cpu"
_POLL_SECONDS = 1.0
_PLAIN_EVERY_SECONDS = 15.0


class RunFailed(Eagle3Error):
    """A pipeline run that did not complete."""


@dataclass
class StageView:
    """What is known of one stage now."""

    state: str = "waiting"
    percent: float = 0.0
    text: str = ""


Show = Callable[[dict[str, StageView]], None]


def submit(params: PipelineParams) -> "FlowRun":
    """Hand a pipeline run to the worker of its pool."""
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    try:
        run = run_deployment(
            PIPELINE,
            parameters={"params": params.model_dump(mode="json")},
            timeout=0,
            as_subflow=False,
        )
    except ObjectNotFound:
        raise RunFailed(f"the deployment {PIPELINE} is not on the Prefect server; `eagle3 up` deploys it") from None
    return run


def run_url(run: "FlowRun") -> str:
    """The run's page in the Prefect UI."""
    from prefect.utilities.urls import url_for

    return url_for(run) or str(run.id)


def follow(run_id: UUID, settings: Settings, console: Console) -> PipelineResult:
    """Show progress until the run ends; its result, or RunFailed with the stage's own message."""
    from prefect.client.orchestration import get_client

    from tasks.handoff import take_result

    with get_client(sync_client=True) as client:
        state = _watch(client, run_id, console)
    if not state.is_completed():
        raise RunFailed(f"the pipeline ended as {state.name}: {state.message or 'see its log in the Prefect UI'}")
    return take_result(str(run_id), PipelineResult, settings)


def cancel(run_id: UUID) -> None:
    """Ask Prefect to cancel a run; the worker ends its process."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Cancelling())


def _watch(client: "SyncPrefectClient", run_id: UUID, console: Console) -> "State[Any]":
    show = _bars(console) if console.is_terminal else _lines(console)
    views = {stage: StageView() for stage in STAGES}
    with show as update:
        while True:
            state = client.read_flow_run(run_id).state
            _refresh(client, run_id, views)
            update(views)
            if state is not None and state.is_final():
                return state
            time.sleep(_POLL_SECONDS)


@contextmanager
def _bars(console: Console) -> Iterator[Show]:
    """A bar for each stage."""
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.fields[stage]:<10}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        ids = {stage: bars.add_task(stage, total=100, start=False, stage=stage, note="waiting") for stage in STAGES}

        def update(views: dict[str, StageView]) -> None:
            for stage, view in views.items():
                if view.state != "waiting" and not bars.tasks[ids[stage]].started:
                    bars.start_task(ids[stage])
                bars.update(ids[stage], completed=view.percent, note=view.text or view.state)

        yield update


@contextmanager
def _lines(console: Console) -> Iterator[Show]:
    """For a log file or a pipe: a line where something changed, at most one in 15 seconds for each stage."""
    shown: dict[str, tuple[str, float]] = {}

    def update(views: dict[str, StageView]) -> None:
        for stage, view in views.items():
            state, when = shown.get(stage, ("waiting", 0.0))
            due = time.monotonic() - when >= _PLAIN_EVERY_SECONDS and view.state == "running"
            if view.state != state or due:
                shown[stage] = (view.state, time.monotonic())
                console.print(f"{stage:<10} {view.state:<10} {view.percent:>3.0f}%  {view.text}", markup=False)

    yield update


def _refresh(client: "SyncPrefectClient", run_id: UUID, views: dict[str, StageView]) -> None:
    """Read the stages' runs and their progress artifacts."""
    from prefect.client.schemas import filters as f

    children = client.read_flow_runs(
        flow_run_filter=f.FlowRunFilter(parent_flow_run_id=f.FlowRunFilterParentFlowRunId(any_=[run_id]))
    )
    flows = {child.flow_id: client.read_flow(child.flow_id).name for child in children}
    for child in children:
        view = views.get(flows[child.flow_id])
        if view is None or child.state is None:
            continue
        name = child.state.type.value.lower()
        view.state = {"completed": "done", "pending": "starting", "scheduled": "starting"}.get(name, name)
        artifacts = client.read_artifacts(
            artifact_filter=f.ArtifactFilter(
                flow_run_id=f.ArtifactFilterFlowRunId(any_=[child.id]), type=f.ArtifactFilterType(any_=["progress"])
            )
        )
        for artifact in artifacts:
            view.percent = float(artifact.data or 0.0)
            view.text = artifact.description or ""
