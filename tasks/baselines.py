"""A new dump beside what passed before for the same target: told, never refused, for norms alone prove nothing."""

from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from infra.settings import Settings
from infra.store import MissingObject, open_store
from tasks.artifacts import read_manifest
from tasks.validation import Examined

if TYPE_CHECKING:
    from eagle3.evidence.compare import Comparison


@task(name="compare with baseline", cache_policy=NO_CACHE)
def compare_with_baseline(examined: Examined, settings: Settings) -> "Comparison | None":
    """The dump's statistics against those of the target's last dump that passed; None where there is none yet.

    What differs stands on the run's page. A dump that passed and does not differ grossly is the next one's baseline.
    """
    from eagle3.evidence.baseline import MAX_BASELINE_BYTES, Baseline, BaselineError, baseline_key

    report, log = examined.report, get_run_logger()
    if report.verdict == "fail":
        return None
    manifest = read_manifest(examined.ref.uri, open_store(examined.ref.uri, settings))
    store, key = open_store(settings.store, settings), baseline_key(manifest)
    try:
        before = Baseline.parse(store.get_bytes(key, max_bytes=MAX_BASELINE_BYTES), where=f"{settings.store}/{key}")
    except MissingObject:
        before = None
    except BaselineError as error:
        log.warning("%s", error)
        before = None
    comparison = before.compare(report, "this dump") if before else None
    if comparison and comparison.verdict != "pass":
        for sentence in comparison.sentences():
            log.warning("%s", sentence)
        create_markdown_artifact(
            markdown=comparison.markdown(), key="baseline-comparison", description="Against the last dump that passed"
        )
    if not comparison or comparison.verdict != "fail":
        store.put_bytes(key, Baseline.of(report, manifest, before).canonical())
    return comparison
