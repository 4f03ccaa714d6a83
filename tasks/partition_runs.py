"""The flow runs of an extraction's partitions: started, followed, and named where one is lost."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters as f
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.states import Crashed
from prefect.utilities.urls import url_for
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from eagle3.errors import Eagle3Error
from infra.store import StoreError
from tasks.journal import Beat, Journal, JournalError
from tasks.params import ExtractParams, PartitionParams
from tasks.progress import StageProgress
from tasks.resume import Extraction

if TYPE_CHECKING:
    from logging import Logger, LoggerAdapter

DEPLOYMENT = "extract_partition/blackwell"
LOOK_SECONDS = 2.0
LOST_SECONDS = 180.0
"""How long the owner of a partition may be silent before its run is taken for lost, and set to Crashed."""
_BEAT_EVERY_SECONDS = 20.0
_PATIENCE_SECONDS = 900.0

# A Prefect server that is started anew: the runs go on meanwhile, and so does their extraction.
_while_silent = retry(
    retry=retry_if_exception_type(httpx.HTTPError),
    stop=stop_after_delay(_PATIENCE_SECONDS),
    wait=wait_fixed(5),
    reraise=True,
)


class PartitionFailed(Eagle3Error):
    """Partitions that cannot be started, or ended before they were whole."""


def complete(
    params: ExtractParams,
    extraction: Extraction,
    prompts: Mapping[int, int],
    missing: Mapping[int, int],
    progress: StageProgress,
) -> None:
    """Run every partition that lacks prompts, and wait for all of them.

    `prompts`, `missing`: how many each partition has, and lacks. Runs that another try of this extraction left at work,
    or waiting, are followed instead of started again. A failure does not end the others; PartitionFailed names it when
    all have ended. Prefect cancels the runs with the one that started them.
    """
    with get_client(sync_client=True) as client:
        _check_pool(client)
        runs = _Runs(client, params, extraction, dict(prompts), get_run_logger())
        runs.adopt()
        for number, count in missing.items():
            if count and not runs.follows(number):
                runs.start(number)
        progress.begin("partitions are captured", total=sum(prompts.values()))
        progress.at(runs.done())
        progress.begin("partitions are captured")  # what was whole before is not part of the pace
        while runs.are_at_work():
            time.sleep(LOOK_SECONDS)
            runs.look()
            progress.at(runs.done(), note=runs.sentence())
    if runs.failed:
        raise PartitionFailed(
            f"{len(runs.failed)} of {len(prompts)} partitions ended before they were whole:\n- "
            + "\n- ".join(runs.failed[number] for number in sorted(runs.failed))
            + "\nWhat is stored stays. Mend the cause and start the extraction again with the same parameters: only "
            "what is missing is captured"
        )


def run_page(run: str) -> str:
    """The page of a flow run in the Prefect UI; its id where no UI is known."""
    return url_for("flow-run", obj_id=run) or run


def partition_name(params: ExtractParams, number: int) -> str:
    return f"extract-{params.name}-p{number:03d}"


@dataclass
class _Runs:
    """The runs that are waited for, by the number of their partition."""

    client: SyncPrefectClient
    params: ExtractParams
    extraction: Extraction
    prompts: dict[int, int]
    logger: "Logger | LoggerAdapter[Any]"
    failed: dict[int, str] = field(default_factory=dict)
    _at_work: dict[int, FlowRun] = field(default_factory=dict)
    _adopted: set[int] = field(default_factory=set)
    _percent: dict[UUID, float] = field(default_factory=dict)
    _beats: dict[UUID, "_Pulse"] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return f"extraction-{self.extraction.tag}"

    def are_at_work(self) -> bool:
        return bool(self._at_work)

    def follows(self, number: int) -> bool:
        return number in self._at_work

    def adopt(self) -> None:
        """Find the runs of this extraction that have not ended."""
        open_states = f.FlowRunFilterStateType(not_any_=list(TERMINAL_STATES))
        for run in self.client.read_flow_runs(
            flow_run_filter=f.FlowRunFilter(
                tags=f.FlowRunFilterTags(all_=[self.tag]), state=f.FlowRunFilterState(type=open_states)
            )
        ):
            number = run.parameters["params"]["number"]
            if number in self._at_work:
                continue
            self._at_work[number] = run
            self._adopted.add(number)
            self.logger.info("partition %d: %s of an earlier try has not ended: it is followed", number, run.name)

    def start(self, number: int) -> None:
        """Hand a partition to the pool; from now on this run of it is followed."""
        part = PartitionParams(extraction=self.params, uri=self.extraction.uri, number=number)
        run = run_deployment(
            DEPLOYMENT,
            parameters={"params": part.model_dump(mode="json")},
            flow_run_name=partition_name(self.params, number),
            tags=["eagle3", "partition", self.tag],
            timeout=0,
        )
        if not isinstance(run, FlowRun):
            raise PartitionFailed(f"partition {number} could not be started: got {run!r}")
        self._at_work[number] = run
        self.logger.info("partition %d: %s started: %s", number, run.name, run_page(str(run.id)))

    @_while_silent
    def look(self) -> None:
        """Ask Prefect for all runs and their progress at once; take out those that have ended."""
        by_id = {run.id: number for number, run in self._at_work.items()}
        ids = list(by_id)
        for run in self.client.read_flow_runs(flow_run_filter=f.FlowRunFilter(id=f.FlowRunFilterId(any_=ids))):
            number = by_id[run.id]
            self._at_work[number] = run
            if run.state and run.state.is_final():
                self._ended(number, run)
            elif run.state and run.state.is_running():
                self._look_for_life(number, run)
        for artifact in self.client.read_artifacts(
            artifact_filter=f.ArtifactFilter(
                flow_run_id=f.ArtifactFilterFlowRunId(any_=ids), type=f.ArtifactFilterType(any_=["progress"])
            )
        ):
            if artifact.flow_run_id:
                self._percent[artifact.flow_run_id] = float(artifact.data or 0.0)

    def done(self) -> float:
        """How many prompts are captured, by what the runs at work show."""
        at_work = sum(
            count * self._percent.get(self._at_work[number].id, 0.0) / 100
            for number, count in self.prompts.items()
            if number in self._at_work
        )
        ended = self.prompts.keys() - self._at_work.keys() - self.failed.keys()
        return at_work + sum(self.prompts[number] for number in ended)

    def sentence(self) -> str:
        states = [run.state for run in self._at_work.values()]
        running = sum(state is not None and state.is_running() for state in states)
        whole = len(self.prompts) - len(states) - len(self.failed)
        told = [f"partitions: {whole} done", f"{running} at work", f"{len(states) - running} wait for a worker"]
        return ", ".join([*told, *([f"{len(self.failed)} failed"] if self.failed else [])])

    def _ended(self, number: int, run: FlowRun) -> None:
        state = run.state
        completed = state is not None and state.is_completed()
        if number in self._adopted and not completed:  # it may have been ended with the try that started it
            self._adopted.discard(number)
            self.start(number)
            return
        del self._at_work[number]
        if completed:
            self.logger.info("partition %d (%s) is done", number, run.name)
            return
        told = f"{state.name}: {state.message}" if state else "?"
        self.failed[number] = f"partition {number} ({run.name}, {run_page(str(run.id))}) ended as {told}"
        self.logger.error("%s. The others go on", self.failed[number])

    def _look_for_life(self, number: int, run: FlowRun) -> None:
        """A worker that ends with its machine leaves its run Running for ever: the journal tells that nobody works."""
        pulse = self._beats.setdefault(run.id, _Pulse())
        with suppress(StoreError, JournalError):
            if pulse.is_lost(Journal(self.extraction.store, number), str(run.id)):
                message = f"nothing was heard of it for {LOST_SECONDS:.0f} s: its worker or its machine is gone"
                self.client.set_flow_run_state(run.id, Crashed(message=message), force=True)


@dataclass
class _Pulse:
    """The heartbeat of a partition's owner, looked at now and then."""

    last: Beat | None = None
    changed: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)

    def is_lost(self, journal: Journal, run: str) -> bool:
        """Whether the owner, if it is this run, has been silent for too long."""
        now = time.monotonic()
        if now - self.looked < _BEAT_EVERY_SECONDS:
            return False
        self.looked = now
        claim = journal.last_claim()
        beat = journal.last_beat(claim) if claim and claim.run == run else None
        if beat is None or beat.released or beat != self.last:  # not begun yet, at its end, or alive
            self.last, self.changed = beat, now
            return False
        return now - self.changed > LOST_SECONDS


def _check_pool(client: SyncPrefectClient) -> None:
    """PartitionFailed where this run takes the place in the pool that its own partitions wait for."""
    try:
        pool = client.read_deployment_by_name(DEPLOYMENT).work_pool_name
    except ObjectNotFound:
        raise PartitionFailed(
            f"the deployment {DEPLOYMENT} is not on the Prefect server: `eagle3 up`, or `prefect deploy --all`"
        ) from None
    context = FlowRunContext.get()
    own = context.flow_run.work_pool_name if context and context.flow_run else None
    if own is not None and own == pool:
        raise PartitionFailed(
            f"this extraction runs in the pool {own}, where its own partitions wait for a place, maybe for ever: run "
            "the deployment extract/cpu, or set partitions to 1"
        )
