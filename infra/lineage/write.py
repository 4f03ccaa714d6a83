"""Write the graph: one method per stage of the pipeline. A retry finds what was recorded before, by its digest."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.entities import Dataset as DatasetEntity
from pydantic import BaseModel, ConfigDict

from eagle3.contract import DrafterContract
from eagle3.digests import sha256_json
from eagle3.dump.manifest import MANIFEST_NAME, Manifest
from eagle3.refs import CheckpointRef, DumpRef
from infra.lineage import models, names, registry, values
from infra.lineage.connection import Connection
from infra.lineage.dataset import DumpDataset, PromptSet, names_dump
from infra.lineage.errors import LineageError
from infra.lineage.runs import datasets, find_recorded, new_run, runs_with_dump
from infra.lineage.tree import LineageTree
from infra.lineage.uses import DumpUse, dump_uses
from infra.lineage.walk import walk

if TYPE_CHECKING:  # for their types alone: their packages import torch
    from eagle3.acceptance.definitions import SpecSettings
    from eagle3.evidence.report import EvidenceReport


class TrainingRecord(BaseModel):
    """What was written for a training: its run, and the drafter as MLflow's logged model."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Training record")

    run_id: str
    model_id: str


class Lineage:
    """The lineage kept by the MLflow server at `tracking_uri`.

    Every method raises LineageError: the server cannot be reached, two digests contradict each other, a value looks
    like a secret or does not fit. Every method may be called again after a failure: what was recorded is returned.
    """

    def __init__(self, tracking_uri: str) -> None:
        self._connection = Connection(tracking_uri)
        self.urls = self._connection.urls

    def run_url(self, run_id: str) -> str:
        """The run's page in MLflow."""
        with self._connection.errors_of(f"find the run {run_id}"):
            return self.urls.run(self._connection.client.get_run(run_id).info.experiment_id, run_id)

    def record_extraction(
        self,
        ref: DumpRef,
        manifest: Manifest,
        *,
        prefect_url: str | None,
        metrics: Mapping[str, float],
        partitions: Sequence[str] = (),
    ) -> str:
        """The run that captured a dump: target in, dump out, the manifest as artifact. Returns the run's id.

        `partitions`: a line on each part that the dump was merged from.
        """
        dump = DumpDataset(ref, manifest).entity()
        values.refuse_secrets({"flags": manifest.engine.flags})
        key = sha256_json([ref.uri, ref.sha256])
        with self._connection.errors_of(f"record the extraction of {ref.uri}"):
            if (recorded := find_recorded(self._connection, names.EXTRACTION, key)) is not None:
                return recorded
            target_id = models.target(self._connection, manifest.target, manifest.tokenizer)
            tags = {names.DUMP_URI: ref.uri, names.DUMP_SHA256: ref.sha256, names.TARGET_NAME: manifest.target.name}
            with new_run(
                self._connection,
                names.EXTRACTION,
                f"extract {_leaf(ref.uri)}",
                key=key,
                tags=tags,
                prefect_url=prefect_url,
                note=f"Captured `{ref.uri}` from {manifest.target.name}.",
            ) as run:
                run.inputs(dataset=dump, context=names.OUTPUT, sha256=ref.sha256, model_id=target_id)
                parts = {"partitions.count": len(partitions), "partitions": list(partitions)} if partitions else {}
                run.params(_extraction_params(manifest) | parts)
                run.metrics([(0, metrics)], dataset=dump)
                run.text(MANIFEST_NAME, manifest.canonical().decode())
            return run.run_id

    def record_validation(
        self, ref: DumpRef, report: "EvidenceReport", plots: Sequence[Path], *, prefect_url: str | None
    ) -> str:
        """The run that checked a dump, with its report. Returns the run's id; one for the same dump and report."""
        if report.dump_sha256 != ref.sha256:
            raise LineageError(f"the report speaks for the dump {report.dump_sha256}, not for {ref.sha256} ({ref.uri})")
        digest = report.digest()
        key = sha256_json([ref.uri, ref.sha256, digest])
        with self._connection.errors_of(f"record the validation of {ref.uri}"):
            if (recorded := find_recorded(self._connection, names.VALIDATION, key)) is not None:
                return recorded
            dump = self._recorded_dump(ref)
            tags = {names.DUMP_URI: ref.uri, names.DUMP_SHA256: ref.sha256}
            with new_run(
                self._connection,
                names.VALIDATION,
                f"validate {_leaf(ref.uri)}",
                key=key,
                tags=tags | {names.VERDICT: report.verdict, names.REPORT: digest},
                prefect_url=prefect_url,
                note=f"Checked `{ref.uri}`: **{report.verdict}**. The report is the artifact report.md.",
            ) as run:
                run.inputs(dataset=dump, context=names.CHECKED, sha256=ref.sha256)
                run.params({f"check.{check.name}": f"{check.verdict}: {check.value}" for check in report.checks})
                run.metrics([(0, _report_metrics(report))], dataset=dump)
                run.text("report.md", report.markdown())
                run.text("report.json", report.model_dump_json())
                run.files(plots, "plots")
            return run.run_id

    def record_training(
        self,
        ref: DumpRef,
        manifest: Manifest,
        contract: DrafterContract,
        checkpoint: CheckpointRef,
        folder: Path,
        *,
        params: Mapping[str, Any],
        history: Iterable[Mapping[str, Any]],
        metrics: Mapping[str, Any],
        prefect_url: str | None,
        upload_weights: bool | None = None,
    ) -> TrainingRecord:
        """The training run and its drafter, a logged model that holds contract.json and config.json.

        `folder` is the checkpoint's local copy; `history` are rows of numbers, each with its `step`; `metrics` are the
        final figures. The weights are uploaded where `upload_weights` says so; unset: where they are not in S3.
        """
        dump = DumpDataset(ref, manifest).entity()
        _check_claims(ref, contract, checkpoint)
        files = models.checkpoint_files(
            folder,
            contract,
            weights=not checkpoint.uri.startswith("s3://") if upload_weights is None else upload_weights,
        )
        key = sha256_json([ref.uri, ref.sha256, checkpoint.uri, checkpoint.sha256])
        steps = [_split_step(row) for row in history]
        last_step = steps[-1][0] if steps else 0
        with self._connection.errors_of(f"record the training on {ref.uri}"):
            if (recorded := find_recorded(self._connection, names.TRAINING, key)) is not None:
                return TrainingRecord(run_id=recorded, model_id=models.output_of(self._connection, recorded))
            tags = models.drafter_tags(contract, checkpoint, ref)
            with new_run(
                self._connection,
                names.TRAINING,
                f"train {_leaf(checkpoint.uri)}",
                key=key,
                tags=tags,
                prefect_url=prefect_url,
                note=f"Trained `{checkpoint.uri}` on `{ref.uri}` for {contract.target.name}.",
            ) as run:
                run.inputs(dataset=dump, context=names.TRAINED_ON, sha256=ref.sha256)
                run.params(params)
                with models.new_drafter(run, plain=_leaf(checkpoint.uri), tags=tags, files=files) as model_id:
                    run.metrics(steps, dataset=dump, model_id=model_id)
                    run.metrics([(last_step, metrics)], dataset=dump, model_id=model_id)
                run.output(model_id, last_step)
            return TrainingRecord(run_id=run.run_id, model_id=model_id)

    def record_benchmark(
        self,
        model_id: str,
        figures: Mapping[str, Any],
        *,
        settings: "SpecSettings",
        prompts: PromptSet,
        params: Mapping[str, Any] | None = None,
        artifacts: Sequence[Path] = (),
        prefect_url: str | None,
    ) -> str:
        """Figures of a drafter on one prompt set. Returns the run's id; one for the same figures and settings.

        The figures mean nothing without `settings`; `params` is what else a reader should know (engine, device).
        """
        numbers = values.as_metrics(figures)
        facts = {f"{names.SETTING}{name}": value for name, value in settings.model_dump(mode="json").items()}
        facts |= params or {}
        figures_digest = sha256_json({name: repr(value) for name, value in numbers.items()})  # repr: NaN is no JSON
        key = sha256_json([model_id, prompts.name, prompts.sha256, values.as_texts(facts), figures_digest])
        with self._connection.errors_of(f"record the benchmark of {model_id}"):
            if (recorded := find_recorded(self._connection, names.BENCHMARK, key)) is not None:
                return recorded
            drafter = self._connection.client.get_logged_model(model_id)
            tags = {names.MODEL_ID: model_id, names.PROMPTS_NAME: prompts.name, names.PROMPTS_SHA256: prompts.sha256}
            with new_run(
                self._connection,
                names.BENCHMARK,
                f"benchmark {drafter.name} on {prompts.name}",
                key=key,
                tags=tags,
                prefect_url=prefect_url,
                note=f"Served {drafter.name} on {prompts.name}.",
            ) as run:
                dataset = prompts.entity()
                run.inputs(dataset=dataset, context=names.MEASURED_ON, sha256=prompts.sha256, model_id=model_id)
                run.params(facts)
                run.metrics([(0, numbers)], dataset=dataset, model_id=model_id)
                run.files(artifacts)
            return run.run_id

    def find_drafter(self, contract_sha256: str) -> str:
        """The logged model of the drafter with this contract; the newest where it was recorded more than once."""
        with self._connection.errors_of(f"find the drafter with contract {contract_sha256[:16]}"):
            return models.drafter_of(self._connection, contract_sha256)

    def register(
        self, name: str, training: TrainingRecord, *, tags: Mapping[str, Any], description: str, alias: str | None
    ) -> str:
        """A version of the registered model `name` for the trained drafter; one version per drafter.

        The alias moves last, and only onto a version whose whole lineage can be walked.
        """
        with self._connection.errors_of(f"register {name}"):
            version = registry.version_of(self._connection, name, training.model_id, tags, description)
        if alias is not None:
            self.walk(name, version)
            with self._connection.errors_of(f"move the alias {alias} of {name}"):
                self._connection.client.set_registered_model_alias(name, alias, version)
        return version

    def _recorded_dump(self, ref: DumpRef) -> DatasetEntity:
        """The dump as its extraction described it; a dump that was extracted elsewhere is its reference alone."""
        for run in runs_with_dump(self._connection, names.EXTRACTION, ref, names.OUTPUT):
            return next(dataset for dataset in datasets(run, names.OUTPUT) if names_dump(dataset, ref))
        return DumpDataset(ref).entity()

    def dump_uses(self) -> tuple[DumpUse, ...]:
        """Every dump that the lineage of a registered drafter names, with the version that names it."""
        with self._connection.errors_of("list the dumps that registered drafters rest on"):
            return dump_uses(self._connection)

    def walk(self, name: str, alias_or_version: str) -> LineageTree:
        """From a version back to the target; every link is looked up and every digest compared."""
        with self._connection.errors_of(f"walk the lineage of {name}"):
            return walk(self._connection, name, alias_or_version)


def _extraction_params(manifest: Manifest) -> dict[str, Any]:
    engine, given = manifest.engine, manifest.generation.given
    return {
        names.CAPTURE_POINTS: list(manifest.spec.aux),
        names.CAPTURE_FINAL: str(manifest.spec.final),
        "capture.sha256": manifest.spec.digest(),
        "engine.ids": str(engine.ids),
        "engine.name": engine.name,
        "engine.version": engine.version,
        "live.layers_to_capture": list(engine.live.layers_to_capture),
        "live.model_class": engine.live.model_class,
        "live.tap_version": engine.live.tap_version,
        "digest.spec": manifest.spec_digest,
        "digest.content": manifest.content_digest,
        "digest.manifest": manifest.digest(),
        "digest.prompts": manifest.prompts_sha256,
        "dump.dtype": manifest.dtype,
        "dump.num_samples": manifest.num_samples,
        "dump.num_tokens": manifest.num_tokens,
        "dump.num_cut": manifest.num_cut,
        "git_commit": manifest.git_commit,
        **{f"generation.{k}": v for k, v in manifest.generation.model_dump(mode="json", exclude={"given"}).items()},
        **{f"given.{k}": v for k, v in (given.model_dump(mode="json") if given else {}).items()},
        **{f"flag.{k}": v for k, v in manifest.engine.flags.items()},
    }


def _report_metrics(report: "EvidenceReport") -> dict[str, Any]:
    """How many checks ended how, and the norms by point; the report has the rest."""
    verdicts = [check.verdict for check in report.checks]
    counts = {f"checks/{verdict}": verdicts.count(verdict) for verdict in ("pass", "warn", "fail")}
    return counts | {f"mean_norm/{statistics.point}": statistics.mean_norm for statistics in report.statistics}


def _check_claims(ref: DumpRef, contract: DrafterContract, checkpoint: CheckpointRef) -> None:
    if contract.dump_sha256 != ref.sha256:
        raise LineageError(
            f"the contract says that the drafter was trained on the dump {contract.dump_sha256} ({contract.dump_uri}), "
            f"but the dump given is {ref.sha256} ({ref.uri})"
        )
    if contract.digest() != checkpoint.sha256:
        raise LineageError(
            f"{checkpoint.uri}: the reference names the contract {checkpoint.sha256}, this contract's digest is "
            f"{contract.digest()}: one of them belongs to another checkpoint"
        )


def _split_step(row: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    step = row.get("step")
    if not isinstance(step, int):
        raise LineageError(f"expected every row of the history to have its step as an integer, got {step!r}")
    return step, {name: value for name, value in row.items() if name != "step"}


def _leaf(uri: str) -> str:
    return uri.rstrip("/").rsplit("/", 1)[-1]
