"""Training: a validated dump -> a drafter's checkpoint with its contract."""

import time

from prefect import flow

from flows.common import say_what_next, worker_settings
from tasks.handoff import leave_result
from tasks.params import TrainParams
from tasks.results import TrainResult
from tasks.training import record_training, require_report, train_drafter


@flow(
    name="train",
    flow_run_name="train-{params.name}",
    description="Trains an EAGLE-3 drafter on a dump whose evidence report passed.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def train(params: TrainParams) -> TrainResult:
    start, settings = time.monotonic(), worker_settings()
    report = require_report(params.dump, settings)
    trained = train_drafter(params, report, settings)
    record = record_training(params, trained, settings)
    return leave_result(
        TrainResult(
            checkpoint=trained.ref,
            mlflow_run_id=record.run_id,
            model_id=record.model_id,
            simulated_length=trained.simulated_length,
            steps=trained.steps,
            seconds=time.monotonic() - start,
        ),
        settings,
    )
