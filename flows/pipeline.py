"""The pipeline: extract -> validate -> train -> benchmark -> register, each stage on the pool that it needs."""

import time
from typing import Any, TypeVar

from prefect import flow
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from pydantic import BaseModel

from eagle3.errors import Eagle3Error
from flows.common import say_what_next, worker_settings
from infra.settings import Settings
from tasks.handoff import leave_result, take_result
from tasks.input_checks import check_inputs
from tasks.params import PipelineParams
from tasks.registration import register_drafter
from tasks.results import BenchmarkResult, ExtractResult, PipelineResult, TrainResult, ValidateResult

Result = TypeVar("Result", bound=BaseModel)


class StageFailed(Eagle3Error):
    """A stage of the pipeline did not complete."""


@flow(
    name="pipeline",
    flow_run_name="pipeline-{params.name}",
    description="From prompts to a registered drafter: extract, validate, train, benchmark, register.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def pipeline(params: PipelineParams = PipelineParams()) -> PipelineResult:
    start, settings = time.monotonic(), worker_settings()
    check_inputs(params, settings)
    # One that is split waits for its parts in the pool where it holds no place of theirs.
    extraction = "extract/cpu" if params.partitions > 1 else "extract/blackwell"
    extracted = _stage(extraction, params.extraction(), ExtractResult, settings)
    validated = _stage("validate/cpu", params.validation(extracted.dump), ValidateResult, settings)
    trained = _stage("train/blackwell", params.train(extracted.dump), TrainResult, settings)
    measured = _stage(
        "benchmark/blackwell", params.benchmark(trained.checkpoint, trained.model_id), BenchmarkResult, settings
    )
    registered = register_drafter(
        params,
        extracted=extracted,
        validated=validated,
        trained=trained,
        measured=measured,
        started=start,
        settings=settings,
    )
    return leave_result(registered, settings)


def _stage(deployment: str, params: BaseModel, result: type[Result], settings: Settings) -> Result:
    """Run one stage on its pool and wait; a stage that fails stops the pipeline with the stage's own message."""
    parameters: dict[str, Any] = {"params": params.model_dump(mode="json")}
    run = run_deployment(deployment, parameters=parameters, timeout=None, poll_interval=1)
    if not isinstance(run, FlowRun):
        raise StageFailed(f"{deployment} could not be started: got {run!r}")
    if run.state is None or not run.state.is_completed():
        state = run.state
        raise StageFailed(
            f"{deployment} ({run.name}) ended as {state.name if state else '?'}: {state and state.message}"
        )
    get_run_logger().info("%s (%s) completed", deployment, run.name)
    return take_result(str(run.id), result, settings)
