"""Validation: the checks on a dump, their report where people look, and the refusal of a dump that failed."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.errors import Eagle3Error
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import MissingObject, StoreCorrupt, StoreError, open_store
from tasks.artifacts import CannotCheck, fetch_again, verify_dump
from tasks.params import ValidateParams
from tasks.progress import StageProgress
from tasks.provenance import link_mlflow_run, prefect_run_url
from tasks.references import choose_reference
from tasks.shards import examined_shards
from tasks.targets import open_target

if TYPE_CHECKING:
    from eagle3.evidence.report import EvidenceReport


MAX_REPORT_BYTES = 16 * 2**20


class DumpRejected(Eagle3Error):
    """A dump whose evidence contradicts its claims."""


@dataclass(frozen=True)
class Examined:
    """A dump and what its tensors said."""

    ref: DumpRef
    report: "EvidenceReport"


def report_key(dump_sha256: str) -> str:
    """Where the report of a dump lies in the store: addressed by the manifest's digest."""
    return f"reports/{dump_sha256}.json"


def read_report(dump_sha256: str, settings: Settings) -> "EvidenceReport":
    """The last report on a dump. MissingObject where the store has none, StoreError, ReportError."""
    from eagle3.evidence.report import EvidenceReport

    key = report_key(dump_sha256)
    data = open_store(settings.store, settings).get_bytes(key, max_bytes=MAX_REPORT_BYTES)
    return EvidenceReport.parse(data, where=f"{settings.store}/{key}")


@task(name="examine dump", cache_policy=NO_CACHE)
def examine_dump(params: ValidateParams, settings: Settings) -> Examined:
    """Every check on the dump; the report is kept in the store whether it passed or not.

    A file that is damaged or missing where the dump is published is a report too: one from before it would still pass.
    """
    try:
        report = _examine(params, settings)
    except (StoreCorrupt, MissingObject) as error:
        report = _damage(params.dump, settings, error)
    store = open_store(settings.store, settings)
    store.put_bytes(report_key(params.dump.sha256), report.model_dump_json(indent=1).encode())
    return Examined(params.dump, report)


def _damage(dump: DumpRef, settings: Settings, error: StoreError) -> "EvidenceReport":
    """The failing report of a dump of which a file did not arrive; `error` again where all is well at a second look."""
    try:
        report = verify_dump(dump.uri, settings)
    except CannotCheck:
        raise error from None  # there is no manifest: nothing is known of the dump that was named
    if report.verdict != "fail" or report.dump_sha256 != dump.sha256:
        raise error
    return report


def _examine(params: ValidateParams, settings: Settings) -> "EvidenceReport":
    from eagle3.dump.reader import DumpReader
    from eagle3.evidence.alignment import FinalStateParts
    from eagle3.evidence.references import check_identity
    from eagle3.evidence.validate import validate_dump

    # As it is published now: a copy of before would say nothing of the objects that others will fetch.
    with fetch_again(params.dump, settings) as folder, StageProgress("validate", "samples") as progress:
        reader = DumpReader.open(folder, expect_sha256=params.dump.sha256)
        target = open_target(params.target, settings)
        check_identity(target, reader.manifest.target)
        chosen = choose_reference(params.reference, target, folder, reader.manifest)
        progress.begin("checking", total=len(reader))
        with examined_shards(reader, settings) as examined:
            return validate_dump(
                reader,
                FinalStateParts.of(target),
                reference=chosen.reference,
                why_no_reference=chosen.why_none,
                examined=examined,
                on_progress=lambda done, _total: progress.at(done),
            )


@task(name="publish report", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def publish_report(examined: Examined, settings: Settings) -> str:
    """The report on the run's page, and with its picture in MLflow."""
    from eagle3.evidence.plots import evidence_png
    from infra.lineage import Lineage

    create_markdown_artifact(markdown=examined.report.markdown(), key="validation-report", description="Evidence")
    lineage = Lineage(settings.mlflow_uri())
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "evidence.png"
        picture.write_bytes(evidence_png(examined.report))
        run_id = lineage.record_validation(
            examined.ref, examined.report, plots=[picture], prefect_url=prefect_run_url()
        )
    link_mlflow_run(lineage, run_id, "validation")
    return run_id


def refuse_failed(examined: Examined) -> None:
    """Raise DumpRejected with the sentence of every failed check."""
    if examined.report.verdict == "fail":
        sentences = "\n".join(f"- {check.name}: {check.sentence}" for check in examined.report.failed())
        raise DumpRejected(f"the dump {examined.ref.uri} is refused, it is not what it says of itself:\n{sentences}")
