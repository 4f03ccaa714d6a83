"""Extraction: prompts -> answers and captured states -> a dump in the store; in partitions where that is asked."""

import time

from prefect import flow

from flows.common import say_what_next, worker_settings
from tasks.extraction import capture_dump, record_extraction
from tasks.handoff import leave_result
from tasks.params import ExtractParams
from tasks.partitions import capture_partitioned
from tasks.results import ExtractResult


@flow(
    name="extract",
    flow_run_name="extract-{params.name}",
    description="Answers prompts with the target on SGLang and captures its hidden states into a dump.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def extract(params: ExtractParams = ExtractParams()) -> ExtractResult:
    start, settings = time.monotonic(), worker_settings()
    capture = capture_partitioned if params.partitions > 1 else capture_dump
    captured = capture(params, settings)
    run_id = record_extraction(captured, settings)
    return leave_result(
        ExtractResult(
            dump=captured.ref,
            mlflow_run_id=run_id,
            num_samples=captured.manifest.num_samples,
            num_tokens=captured.manifest.num_tokens,
            num_bytes=sum(shard.bytes for shard in captured.manifest.shards),
            seconds=time.monotonic() - start,
        ),
        settings,
    )
