"""Submit a pipeline run and follow it on a terminal: every stage, how far it is, how long still.

Imports Prefect inside the functions: the API's address is set (infra.stack.connect) before Prefect is first imported.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
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
REGISTER = "register"  # the pipeline's own last step, no run of its own
PIPELINE = "pipeline/cpu"
_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
_PLAIN_EVERY_SECONDS = 15.0


class RunFailed(Eagle3Error):
    """A pipeline run that could not be started, did not complete, or cannot be seen any more."""


@dataclass
class StageView:
    """What is known of one stage now."""

    state: str = "waiting"
    percent: float = 0.0
    text: str = ""


Views = dict[str, StageView]

# Prefect's names of states in which a run waits for somebody else, and what a person wants to know then.
_WAITS = {
    "Late": "no worker has taken it yet; `eagle3 status` shows the workers",
    "AwaitingConcurrencySlot": "waits for another run to leave the pool",
}
Show = Callable[[Views], None]


def submit(params: PipelineParams) -> "FlowRun":
    """Hand a pipeline run to the worker of its pool; RunFailed where there is no server or no deployment."""
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    url = _api_url()
    try:
        return run_deployment(
            PIPELINE,
            parameters={"params": params.model_dump(mode="json")},
            timeout=0,
            as_subflow=False,
        )
    except ObjectNotFound:
        raise RunFailed(f"the deployment {PIPELINE} is not on the Prefect server; `eagle3 up` deploys it") from None
    except httpx.HTTPStatusError as error:
        raise RunFailed(f"the Prefect server at {url} refused to start a run: {error}") from error
    except httpx.HTTPError as error:
        raise RunFailed(
            f"the Prefect server at {url} does not answer ({type(error).__name__}). Start the stack with `eagle3 up`; "
            "`eagle3 status` shows its parts."
        ) from error


def _api_url() -> str:
    """The server's address. Without one Prefect would start a server of its own, unseen and without workers."""
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        raise RunFailed(
            "no Prefect server is known: start the local stack with `eagle3 up`, set PREFECT_API_URL, or go to the "
            "folder whose .eagle3 holds your stack (or set EAGLE3_HOME to it)"
        )
    return str(url)


def run_url(run: "FlowRun") -> str:
    """The run's page in the Prefect UI."""
    from prefect.utilities.urls import url_for

    return url_for(run) or str(run.id)


def follow(run_id: UUID, settings: Settings, console: Console) -> PipelineResult:
    """Show progress until the run ends; its result, or RunFailed with the stage's own message."""
    from prefect.client.orchestration import get_client

    from tasks.handoff import take_result

    with get_client(sync_client=True) as client:
        state = watch(client, run_id, console)
    if not state.is_completed():
        raise RunFailed(f"the pipeline ended as {state.name}: {state.message or 'see its log in the Prefect UI'}")
    return take_result(str(run_id), PipelineResult, settings)


def cancel(run_id: UUID) -> None:
    """Ask Prefect to cancel a run: its worker ends it, and Prefect the stages that it started."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, Cancelling(message="Ctrl-C at the terminal"))
    except httpx.HTTPError as error:
        raise RunFailed(f"run {run_id} could not be cancelled: {error}. Cancel it in the Prefect UI.") from error


def cancel_command(run_id: UUID) -> str:
    """The command line that cancels a run."""
    return f"PREFECT_API_URL={_api_url()} {Path(sys.executable).parent / 'prefect'} flow-run cancel {run_id}"


def watch(
    client: "SyncPrefectClient", run_id: UUID, console: Console, *, patience_seconds: float = _PATIENCE_SECONDS
) -> "State[Any]":
    """Show the run until it ends; its last state.

    A server that does not answer, or fails, for `patience_seconds` ends the watching with RunFailed, not the run.
    """
    from prefect.exceptions import ObjectNotFound

    run = _Run(client, run_id)
    silent_since: float | None = None
    with _bars(console) if console.is_terminal else _lines(console) as show:
        while True:
            try:
                state = run.look()
                silent_since = None
                show(run.views)
                if state is not None and state.is_final():
                    return state
            except ObjectNotFound:
                raise RunFailed(f"run {run_id} is not on the Prefect server any more") from None
            except httpx.HTTPError as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise RunFailed(f"the Prefect server refused to show run {run_id}: {error}") from error
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since >= patience_seconds:
                    raise RunFailed(
                        f"the Prefect server at {client.api_url} did not answer for {patience_seconds:.0f} s "
                        f"({type(error).__name__}). The run may go on: `eagle3 status` shows the stack's parts."
                    ) from error
            time.sleep(_POLL_SECONDS)


@dataclass
class _Run:
    """What is known of a pipeline run and its stages. Three requests a look, whatever the number of stages."""

    client: "SyncPrefectClient"
    run_id: UUID
    views: Views = field(default_factory=lambda: {stage: StageView() for stage in (*STAGES, REGISTER)})
    _names: dict[UUID, str] = field(default_factory=dict)

    def look(self) -> "State[Any] | None":
        """Update the views; the pipeline's own state. Raises what the client raises."""
        state = self.client.read_flow_run(self.run_id).state
        stages = self._read_stages()
        self._read_progress(stages)
        if state is not None:
            _update_register(self.views, state)
            if not stages:
                self.views[STAGES[0]].text = _WAITS.get(str(state.name), "")
        return state

    def _read_stages(self) -> dict[UUID, StageView]:
        from prefect.client.schemas import filters as f

        found: dict[UUID, StageView] = {}
        for child in self.client.read_flow_runs(
            flow_run_filter=f.FlowRunFilter(parent_flow_run_id=f.FlowRunFilterParentFlowRunId(any_=[self.run_id]))
        ):
            if child.flow_id not in self._names:
                self._names[child.flow_id] = self.client.read_flow(child.flow_id).name
            view = self.views.get(self._names[child.flow_id])
            if view is None or child.state is None:
                continue
            name = child.state.type.value.lower()
            view.state = {"completed": "done", "pending": "starting", "scheduled": "starting"}.get(name, name)
            view.text = _WAITS.get(str(child.state.name), "")
            found[child.id] = view
        return found

    def _read_progress(self, stages: dict[UUID, StageView]) -> None:
        from prefect.client.schemas import filters as f

        if not stages:
            return
        for artifact in self.client.read_artifacts(
            artifact_filter=f.ArtifactFilter(
                flow_run_id=f.ArtifactFilterFlowRunId(any_=list(stages)), type=f.ArtifactFilterType(any_=["progress"])
            )
        ):
            view = stages.get(artifact.flow_run_id) if artifact.flow_run_id else None
            if view is not None:
                view.percent = float(artifact.data or 0.0)
                view.text = artifact.description or ""


def _update_register(views: Views, state: "State[Any]") -> None:
    """Registering is what the pipeline does once its stages are done: its state is the pipeline's from then on."""
    view = views[REGISTER]
    if state.is_completed():
        view.state, view.percent = "done", 100.0
    elif views[STAGES[-1]].state == "done":
        view.state = state.type.value.lower()


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
        ids = {
            stage: bars.add_task(stage, total=100, start=False, stage=stage, note="waiting")
            for stage in (*STAGES, REGISTER)
        }

        def update(views: Views) -> None:
            for stage, view in views.items():
                if view.state != "waiting" and not bars.tasks[ids[stage]].started:
                    bars.start_task(ids[stage])
                bars.update(ids[stage], completed=view.percent, note=view.text or view.state)

        yield update


@contextmanager
def _lines(console: Console) -> Iterator[Show]:
    """For a log file or a pipe: a line where something changed, at most one in 15 seconds for each stage."""
    shown: dict[str, tuple[str, float]] = {}

    def update(views: Views) -> None:
        for stage, view in views.items():
            state, when = shown.get(stage, ("waiting", 0.0))
            late = time.monotonic() - when >= _PLAIN_EVERY_SECONDS
            if view.state != state or (late and (view.state == "running" or view.text in _WAITS.values())):
                shown[stage] = (view.state, time.monotonic())
                console.print(f"{stage:<10} {view.state:<10} {view.percent:>3.0f}%  {view.text}", markup=False)

    yield update
