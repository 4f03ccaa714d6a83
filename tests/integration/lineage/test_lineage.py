"""The lineage on a real MLflow server: written, walked back link by link, written again."""

import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import mlflow.data
import pytest
from mlflow import MlflowClient
from rich.console import Console

from infra.lineage import Lineage, LineageError, TrainingRecord, render
from infra.lineage.values import PARAM_LIMIT
from tests.lineage_graph import POINTS, PREFECT, SETTINGS, Graph, digest, make_graph

pytestmark = pytest.mark.integration

EXPERIMENTS = ("targets", "extraction", "validation", "training", "benchmark")


def counts(client: MlflowClient) -> dict[str, int]:
    """Runs, models and versions that the server has."""
    ids = [e.experiment_id for name in EXPERIMENTS if (e := client.get_experiment_by_name(f"eagle3/{name}"))]
    return {
        "runs": len(client.search_runs(ids)) if ids else 0,
        "models": len(client.search_logged_models(ids)) if ids else 0,
        "versions": len(client.search_model_versions()),
    }


def test_every_link_from_the_version_back_to_the_target_is_found(
    lineage: Lineage, client: MlflowClient, graph: Graph, server: str
) -> None:
    extraction, validation, training = (
        graph.extraction(lineage),
        graph.validation(lineage),
        graph.training(lineage),
    )
    benchmark = graph.benchmark(lineage, training.model_id)
    version = graph.register(lineage, training)

    tree = lineage.walk(graph.name, "champion")

    assert tree == lineage.walk(graph.name, version)
    assert (tree.version.name, tree.version.version, tree.version.aliases) == (graph.name, version, ("champion",))
    assert tree.version.tags["dump.sha256"] == graph.ref.sha256
    assert json.loads(tree.version.tags["capture.points"]) == list(POINTS)
    assert (tree.drafter.model_id, tree.drafter.checkpoint_uri) == (training.model_id, graph.checkpoint.uri)
    assert tree.drafter.contract == graph.contract
    assert (tree.dump.uri, tree.dump.sha256) == (graph.ref.uri, graph.ref.sha256)
    assert tree.dump.capture == graph.manifest.spec
    assert tree.dump.engine_ids == graph.manifest.engine.ids
    assert tree.dump.live.layers_to_capture == (3, 31, 59)
    (target,) = client.get_run(extraction).inputs.model_inputs
    assert (tree.target.model_id, tree.target.identity) == (target.model_id, graph.manifest.target)
    assert [run.run_id for run in (tree.training, tree.extraction)] == [training.run_id, extraction]
    assert [(run.run_id, run.verdict) for run in tree.validations] == [(validation, "warn")]
    assert [(run.run_id, run.prompts) for run in tree.benchmarks] == [(benchmark, graph.prompts.name)]
    assert tree.benchmarks[0].settings == {k: str(v) for k, v in SETTINGS.model_dump().items()}
    assert tree.benchmarks[0].metrics["acceptance_length"] == 1.853
    assert tree.benchmarks[0].metrics["unconditional/2"] == 0.1
    stages = {
        "extract": tree.extraction,
        "validate": tree.validations[0],
        "train": tree.training,
        "benchmark": tree.benchmarks[0],
    }
    for stage, node in stages.items():
        assert node.prefect_url == PREFECT.format(stage)
        experiment_id = client.get_run(node.run_id).info.experiment_id
        page = f"{server}/#/experiments/{experiment_id}/runs/{node.run_id}?workflowType=machine_learning"
        assert node.url == lineage.run_url(node.run_id) == page

    # MLflow's own links say the same
    registered = client.get_model_version(graph.name, version)
    assert (registered.source, registered.run_id) == (f"models:/{training.model_id}", training.run_id)
    run = client.get_run(training.run_id)
    assert [model.model_id for model in run.outputs.model_outputs] == [training.model_id]
    assert client.get_logged_model(target.model_id).model_type == "target"
    assert client.get_logged_model(training.model_id).status == "READY"
    files = {file.path for file in client.list_logged_model_artifacts(training.model_id)}
    assert files == {"contract.json", "config.json"}  # the weights lie in S3
    assert client.get_metric_history(training.run_id, "loss")[-1].step == 19
    losses = [m for m in client.get_logged_model(training.model_id).metrics if m.key == "loss"]
    assert losses
    assert all(m.dataset_digest == graph.ref.sha256[:32] for m in losses)


def test_the_rendered_tree_names_the_points_the_ids_with_their_convention_and_every_page(
    lineage: Lineage, graph: Graph, training: TrainingRecord
) -> None:
    graph.benchmark(lineage, training.model_id)
    graph.register(lineage, training)
    tree = lineage.walk(graph.name, "champion")
    output = StringIO()
    Console(file=output, width=200).print(render(tree))
    text = output.getvalue()
    for part in (
        f"{graph.name} version 1 @champion",
        "layers.2, layers.30, layers.58, norm",
        "sglang 0.5.23 KimiK25ForConditionalGeneration [3, 31, 59]",
        graph.ref.uri,
        "acceptance_length 1.853",
        tree.version.url,
        tree.training.url,
        tree.target.url,
        PREFECT.format("train"),
    ):
        assert part in text
    assert json.loads(json.dumps(tree.model_dump(mode="json")))["dump"]["uri"] == graph.ref.uri


def test_the_ui_gets_the_dump_as_an_s3_dataset_and_it_reads_back(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    graph.extraction(lineage)
    run_ids = graph.validation(lineage), graph.training(lineage).run_id
    for run_id in run_ids:
        entry = client.get_run(run_id).inputs.dataset_inputs[0]
        assert entry.dataset.source_type == "s3"
        assert json.loads(entry.dataset.source)["uri"] == graph.ref.uri  # where MLflow's page takes it from
        assert entry.dataset.digest == graph.ref.sha256[:32]
        names = [row["name"] for row in json.loads(entry.dataset.schema)["mlflow_colspec"]]
        assert names == ["layers.2", "layers.30", "layers.58", "norm"]
        assert mlflow.data.get_source(entry.dataset).load() == graph.ref


def test_recording_everything_again_returns_the_same_objects(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    def record_all() -> tuple[object, ...]:
        runs = graph.extraction(lineage), graph.validation(lineage)
        training = graph.training(lineage)
        return *runs, training, graph.benchmark(lineage, training.model_id), graph.register(lineage, training)

    first, before = record_all(), counts(client)
    assert record_all() == first
    assert counts(client) == before


def test_another_figure_of_the_same_drafter_is_another_benchmark(
    lineage: Lineage, graph: Graph, training: TrainingRecord
) -> None:
    runs = [graph.benchmark(lineage, training.model_id, length) for length in (1.8, 1.9)]
    graph.register(lineage, training)
    assert [run.run_id for run in lineage.walk(graph.name, "champion").benchmarks] == runs


def test_parallel_recordings_do_not_mix(server: str, client: MlflowClient, tmp_path: Path) -> None:
    graphs = [make_graph(f"parallel-{i}", tmp_path / str(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda graph: graph.extraction(Lineage(server)), graphs))
        records = list(pool.map(lambda graph: graph.training(Lineage(server)), graphs))
    assert len(set(runs)) == len({record.model_id for record in records}) == 4
    for graph, run_id in zip(graphs, runs, strict=True):
        run = client.get_run(run_id)
        assert [d.dataset.name for d in run.inputs.dataset_inputs] == [graph.ref.uri]
        assert run.data.params["digest.manifest"] == graph.ref.sha256
        assert run.info.status == "FINISHED"


def test_an_extraction_in_partitions_is_one_run_that_names_every_part(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    parts = [f"16 samples on host-{n}: {PREFECT.format('part')}/{'x' * 80}" for n in range(128)]  # more than one batch
    run_id = lineage.record_extraction(graph.ref, graph.manifest, prefect_url=None, metrics={}, partitions=parts)
    assert client.get_run(run_id).data.params["partitions.count"] == "128"
    long = json.loads(Path(client.download_artifacts(run_id, "long_values.json")).read_text())
    assert json.loads(long["partitions"]) == parts
    assert graph.extraction(lineage) == run_id  # the same dump: no second record


def test_a_copy_of_a_dump_elsewhere_keeps_its_own_uri(lineage: Lineage, client: MlflowClient, graph: Graph) -> None:
    copy = graph.ref.model_copy(update={"uri": "s3://elsewhere/copy"})
    first = graph.extraction(lineage)
    second = lineage.record_extraction(copy, graph.manifest, prefect_url=None, metrics={})
    sources = [json.loads(client.get_run(r).inputs.dataset_inputs[0].dataset.source)["uri"] for r in (first, second)]
    assert sources == [graph.ref.uri, copy.uri]


def test_a_dump_in_a_folder_takes_its_weights_along(lineage: Lineage, client: MlflowClient, graph: Graph) -> None:
    local = graph.checkpoint.model_copy(update={"uri": "file:///checkpoints/x"})
    record = lineage.record_training(
        graph.ref,
        graph.manifest,
        graph.contract,
        local,
        graph.folder,
        params={},
        history=[],
        metrics={},
        prefect_url=None,
    )
    files = {file.path: file.file_size for file in client.list_logged_model_artifacts(record.model_id)}
    assert files["model.safetensors"] == (graph.folder / "model.safetensors").stat().st_size


def test_long_values_go_whole_into_an_artifact(
    lineage: Lineage, client: MlflowClient, graph: Graph, tmp_path: Path
) -> None:
    long = "ü" * (PARAM_LIMIT + 1)
    run_id = graph.training(lineage, params={"recipe": long, "exact": "y" * PARAM_LIMIT}).run_id
    params = client.get_run(run_id).data.params
    assert params["exact"] == "y" * PARAM_LIMIT
    assert params["recipe"].startswith(f"{len(long)} characters")
    assert "long_values.json" in params["recipe"]
    kept = json.loads(Path(client.download_artifacts(run_id, "long_values.json", str(tmp_path))).read_text())
    assert kept == {"recipe": long}


def test_a_long_flag_of_the_server_is_kept_too(lineage: Lineage, client: MlflowClient, tmp_path: Path) -> None:
    flags = {"json_model_override_args": "z" * 9000}
    run_id = make_graph("long-flag", tmp_path / "c", flags=flags).extraction(lineage)
    kept = json.loads(Path(client.download_artifacts(run_id, "long_values.json", str(tmp_path))).read_text())
    assert kept == {"flag.json_model_override_args": flags["json_model_override_args"]}


@pytest.mark.parametrize("flags", [{"api_key": "sk-123"}, {"model": "http://user:hunter2@host/model"}])
def test_a_secret_among_the_flags_is_refused_and_nothing_is_written(
    lineage: Lineage, client: MlflowClient, tmp_path: Path, flags: dict[str, str]
) -> None:
    graph, before = make_graph(f"secret-{digest(flags)[:8]}", tmp_path / "c", flags=flags), counts(client)
    with pytest.raises(LineageError) as error:
        graph.extraction(lineage)
    assert next(iter(flags)) in str(error.value)
    assert "sk-123" not in str(error.value)
    assert "hunter2" not in str(error.value)
    assert counts(client) == before


def test_a_failed_recording_does_not_count_and_a_retry_succeeds(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    graph.extraction(lineage)
    graph.validation(lineage)
    with pytest.raises(LineageError, match="'loss' must be a number, got str 'low'"):
        graph.training(lineage, history=[{"step": 0, "loss": "low"}])
    experiment = client.get_experiment_by_name("eagle3/training").experiment_id
    failed = client.search_runs([experiment], f"tags.`dump.sha256` = '{graph.ref.sha256}'")
    assert [run.info.status for run in failed] == ["FAILED"]
    training = graph.training(lineage)
    assert training.run_id != failed[0].info.run_id
    graph.register(lineage, training)
    assert lineage.walk(graph.name, "champion").training.run_id == training.run_id
