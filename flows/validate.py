"""Validation: a dump's claims against its tensors. A failed check fails the run with the report's sentence."""

import time

from prefect import flow

from flows.common import say_what_next, worker_settings
from tasks.baselines import compare_with_baseline
from tasks.handoff import leave_result
from tasks.params import ValidateParams
from tasks.results import ValidateResult
from tasks.validation import examine_dump, publish_report, refuse_failed


@flow(
    name="validate",
    flow_run_name="validate-{params.dump.sha256:.8}",
    description="Checks what a dump says of itself against its tensors; a failed check stops the pipeline.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def validate(params: ValidateParams) -> ValidateResult:
    start, settings = time.monotonic(), worker_settings()
    examined = examine_dump(params, settings)
    run_id = publish_report(examined, settings)
    refuse_failed(examined)
    compare_with_baseline(examined, settings)
    return leave_result(
        ValidateResult(
            dump=params.dump,
            verdict=examined.report.verdict,
            report_sha256=examined.report.digest(),
            mlflow_run_id=run_id,
            num_checks=len(examined.report.checks),
            seconds=time.monotonic() - start,
        ),
        settings,
    )
