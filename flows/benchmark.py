"""Benchmark: the same held-out prompts on SGLang without the drafter, with it, and with it on wrong layers."""

import time

from prefect import flow

from flows.common import say_what_next, worker_settings
from tasks.benchmark import record_benchmark, serve_and_measure
from tasks.handoff import leave_result
from tasks.params import BenchmarkParams
from tasks.results import BenchmarkResult


@flow(
    name="benchmark",
    flow_run_name="benchmark-{params.checkpoint.sha256:.8}",
    description="Serves held-out prompts without and with the drafter: acceptance by position, text identity, speed.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def benchmark(params: BenchmarkParams) -> BenchmarkResult:
    start, settings = time.monotonic(), worker_settings()
    measured = serve_and_measure(params, settings)
    run_id = record_benchmark(params, measured, settings)
    return leave_result(
        BenchmarkResult(
            checkpoint=params.checkpoint,
            served=measured.served,
            dtype=measured.engine["dtype"],
            mlflow_run_id=run_id,
            seconds=time.monotonic() - start,
        ),
        settings,
    )
