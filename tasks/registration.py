"""Registration: the drafter becomes a version of a registered model, with its lineage, and gets the alias."""

import time

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.errors import Eagle3Error
from infra.settings import Settings
from tasks.params import PipelineParams
from tasks.provenance import prefect_run_url
from tasks.results import BenchmarkResult, ExtractResult, PipelineResult, TrainResult, ValidateResult


class NotRegistered(Eagle3Error):
    """A drafter that must not get the alias."""


def register_drafter(
    params: PipelineParams,
    *,
    extracted: ExtractResult,
    validated: ValidateResult,
    trained: TrainResult,
    measured: BenchmarkResult,
    started: float,
    settings: Settings,
) -> PipelineResult:
    """Register a drafter that deserves it. A refusal is final; only the talk with MLflow is tried again."""
    acceptance = deserved(measured)
    return _register(
        params,
        acceptance,
        extracted=extracted,
        validated=validated,
        trained=trained,
        measured=measured,
        started=started,
        settings=settings,
    )


def deserved(measured: BenchmarkResult) -> AcceptanceFigure:
    """The drafter's acceptance; NotRegistered where there is none, or where its text is not the target's own."""
    right = measured.right()
    if right.acceptance is None:
        raise NotRegistered("the benchmark counted no verification of the drafter; nothing is registered")
    if measured.dtype == "float32" and right.same_text != right.num_prompts:
        raise NotRegistered(
            f"with the drafter {right.same_text} of {right.num_prompts} answers equal plain greedy decoding's; in "
            "float32 all of them must. The server verifies wrongly; nothing is registered."
        )
    return right.acceptance


@task(name="register", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def _register(
    params: PipelineParams,
    acceptance: AcceptanceFigure,
    *,
    extracted: ExtractResult,
    validated: ValidateResult,
    trained: TrainResult,
    measured: BenchmarkResult,
    started: float,
    settings: Settings,
) -> PipelineResult:
    """The model version, its alias, and the links where a person looks."""
    from infra.lineage import Lineage, TrainingRecord

    right = measured.right()
    lineage = Lineage(settings.mlflow_uri())
    name, alias = params.register_as.model_name, params.register_as.alias
    points = ", ".join(params.capture.aux)
    version = lineage.register(
        name,
        TrainingRecord(run_id=trained.mlflow_run_id, model_id=trained.model_id),
        tags={
            "acceptance_length": f"{acceptance.length:.3f}",
            "acceptance_settings": params.spec.model_dump_json(),
            "benchmark_run_id": measured.mlflow_run_id,
            "validation_run_id": validated.mlflow_run_id,
        },
        description=(
            f"EAGLE-3 drafter `{params.name}`, trained on {points} of {extracted.num_samples} samples "
            f"({extracted.dump.uri}). Acceptance length {acceptance.length:.2f} on {right.num_prompts} held-out "
            f"prompts ({params.spec.num_steps} steps, top-k {params.spec.top_k})."
        ),
        alias=alias,
    )
    links = {
        "Prefect run": prefect_run_url() or "",
        "MLflow model version": lineage.urls.version(name, version),
        "MLflow training run": lineage.run_url(trained.mlflow_run_id),
        "MLflow benchmark run": lineage.run_url(measured.mlflow_run_id),
    }
    for text, link in links.items():
        if link and not text.startswith("Prefect"):
            create_link_artifact(link=link, link_text=text, key=text.lower().replace(" ", "-"))
    create_markdown_artifact(key="lineage", markdown=_lineage_page(links, name, version, alias, extracted, trained))
    return PipelineResult(
        extracted=extracted,
        validated=validated,
        trained=trained,
        measured=measured,
        model_name=name,
        model_version=version,
        alias=alias,
        links=links,
        seconds=time.monotonic() - started,
    )


def _lineage_page(
    links: dict[str, str], name: str, version: str, alias: str, extracted: ExtractResult, trained: TrainResult
) -> str:
    rows = [
        ("version", f"[{name} {version}]({links['MLflow model version']}), alias `{alias}`"),
        ("drafter", f"`{trained.checkpoint.uri}` (contract `{trained.checkpoint.sha256[:16]}`)"),
        ("training", f"[MLflow run]({links['MLflow training run']})"),
        ("dump", f"`{extracted.dump.uri}` (manifest `{extracted.dump.sha256[:16]}`)"),
        ("benchmark", f"[MLflow run]({links['MLflow benchmark run']})"),
    ]
    table = "\n".join(f"| {what} | {where} |" for what, where in rows)
    return (
        f"# {name} {version}\n\n| link | where |\n|---|---|\n{table}\n\n`eagle3 lineage {name}@{version}` walks it.\n"
    )
