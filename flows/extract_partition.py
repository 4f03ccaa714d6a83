"""One partition of an extraction: a part of the prompts -> shards beside those of the others; `extract` merges them."""

from prefect import flow

from flows.common import say_what_next, worker_settings
from tasks.extraction import capture_partition
from tasks.params import PartitionParams


@flow(
    name="extract_partition",
    flow_run_name="extract-{params.extraction.name}-p{params.number:03}",
    description="Captures one part of an extraction that was split; the extraction starts it, and merges the parts.",
    on_failure=[say_what_next],
    on_crashed=[say_what_next],
)
def extract_partition(params: PartitionParams) -> None:
    capture_partition(params, worker_settings())
