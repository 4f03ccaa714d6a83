"""What the lineage refuses: unknown names, missing links, contradictions, a server that is gone."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from eagle3.capture import CaptureSpec
from eagle3.refs import CheckpointRef
from infra.lineage import Lineage, LineageError, TrainingRecord
from tests.integration.mlflow_server import mlflow_server
from tests.lineage_graph import POINTS, SPEC, Graph, digest, make_graph

pytestmark = pytest.mark.integration


def test_an_unknown_model_is_answered_with_those_that_exist(
    lineage: Lineage, graph: Graph, training: TrainingRecord
) -> None:
    graph.register(lineage, training)
    with pytest.raises(LineageError, match=f"no registered model 'nobody'.*{graph.name}"):
        lineage.walk("nobody", "champion")


def test_an_unknown_alias_or_version_is_answered_with_those_that_exist(
    lineage: Lineage, graph: Graph, training: TrainingRecord
) -> None:
    graph.register(lineage, training)
    expected = rf"{graph.name} has no alias 'challenger'; it has the aliases @champion \(version 1\) and the versions 1"
    with pytest.raises(LineageError, match=expected):
        lineage.walk(graph.name, "challenger")
    with pytest.raises(LineageError, match="has no version '7'"):
        lineage.walk(graph.name, "7")


def test_the_alias_stays_where_it_is_until_the_whole_lineage_can_be_walked(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    record = graph.training(lineage)
    with pytest.raises(LineageError, match=f"the link from the dump {graph.ref.uri} to its extraction run is missing"):
        graph.register(lineage, record)
    assert client.get_registered_model(graph.name).aliases == {}
    graph.extraction(lineage)
    with pytest.raises(LineageError, match="to the validation that the contract rests on is missing"):
        graph.register(lineage, record)
    assert client.get_registered_model(graph.name).aliases == {}
    graph.validation(lineage)
    assert graph.register(lineage, record) == "1"
    assert client.get_registered_model(graph.name).aliases == {"champion": "1"}


def test_a_version_that_somebody_registered_by_hand_has_no_link_to_a_drafter(
    lineage: Lineage, client: MlflowClient, graph: Graph
) -> None:
    run_id = graph.extraction(lineage)
    client.create_registered_model(graph.name)
    client.create_model_version(graph.name, client.get_run(run_id).info.artifact_uri, run_id=run_id)
    with pytest.raises(LineageError, match=f"{graph.name} version 1: the link from the version to its logged model"):
        lineage.walk(graph.name, "1")


def test_a_deleted_run_or_drafter_is_a_missing_link(
    lineage: Lineage, client: MlflowClient, graph: Graph, training: TrainingRecord
) -> None:
    graph.register(lineage, training)
    client.delete_run(training.run_id)
    with pytest.raises(LineageError, match=f"from the drafter to its training run is missing: .*{training.run_id}"):
        lineage.walk(graph.name, "champion")
    client.restore_run(training.run_id)
    client.delete_logged_model(training.model_id)
    with pytest.raises(LineageError, match="from the version to its logged model is missing"):
        lineage.walk(graph.name, "champion")


@pytest.mark.parametrize("tag", ["dump.sha256", "contract.sha256", "weights.sha256"])
def test_a_tag_that_was_changed_by_hand_is_found(
    lineage: Lineage, client: MlflowClient, graph: Graph, training: TrainingRecord, tag: str
) -> None:
    version = graph.register(lineage, training)
    client.set_model_version_tag(graph.name, version, tag, digest("another"))
    with pytest.raises(LineageError, match=f"contradict each other.*{tag} is {digest('another')}"):
        lineage.walk(graph.name, version)


def test_a_contract_that_was_replaced_is_found(
    lineage: Lineage, client: MlflowClient, graph: Graph, training: TrainingRecord, tmp_path: Path
) -> None:
    version = graph.register(lineage, training)
    other = graph.contract.model_copy(update={"draft_vocab_size": 1})
    (tmp_path / "contract.json").write_bytes(other.canonical())
    client.log_model_artifact(training.model_id, str(tmp_path / "contract.json"))
    with pytest.raises(LineageError, match=rf"contract.sha256 is {graph.checkpoint.sha256}.*{other.digest()}"):
        lineage.walk(graph.name, version)


@pytest.mark.parametrize("capture", [SPEC.model_copy(update={"aux": POINTS[::-1]}), CaptureSpec(aux=POINTS[:2])])
def test_a_contract_with_other_slots_or_another_order_than_its_dump_is_found(
    lineage: Lineage, graph: Graph, tmp_path: Path, capture: CaptureSpec
) -> None:
    contract = graph.contract.model_copy(update={"capture": capture})
    (graph.folder / "contract.json").write_bytes(contract.canonical())
    checkpoint = CheckpointRef(uri=graph.checkpoint.uri, sha256=contract.digest())
    changed = replace(graph, contract=contract, checkpoint=checkpoint)
    changed.extraction(lineage)
    changed.validation(lineage)
    record = changed.training(lineage)
    points = ", ".join(capture.points)
    with pytest.raises(LineageError, match=f"the contract names the slots {points}, but the dump holds layers.2, "):
        changed.register(lineage, record)


def test_claims_about_another_dump_or_contract_are_refused(lineage: Lineage, graph: Graph, tmp_path: Path) -> None:
    other = make_graph("another", tmp_path / "another")
    with pytest.raises(LineageError, match="belongs to another dump"):
        lineage.record_extraction(graph.ref, other.manifest, prefect_url=None, metrics={})
    with pytest.raises(LineageError, match="the report speaks for the dump"):
        lineage.record_validation(graph.ref, other.report, [], prefect_url=None)
    given = {"params": {}, "history": [], "metrics": {}, "prefect_url": None}
    with pytest.raises(LineageError, match="trained on the dump"):
        lineage.record_training(graph.ref, graph.manifest, other.contract, other.checkpoint, other.folder, **given)
    with pytest.raises(LineageError, match="belongs to another checkpoint"):
        lineage.record_training(graph.ref, graph.manifest, graph.contract, other.checkpoint, graph.folder, **given)
    with pytest.raises(LineageError, match="is another contract"):
        lineage.record_training(graph.ref, graph.manifest, graph.contract, graph.checkpoint, other.folder, **given)
    (graph.folder / "config.json").unlink()
    with pytest.raises(LineageError, match=r"it has no config\.json"):
        lineage.record_training(graph.ref, graph.manifest, graph.contract, graph.checkpoint, graph.folder, **given)


def test_a_deleted_experiment_says_how_to_restore_it(
    server: str, client: MlflowClient, graph: Graph, tmp_path: Path
) -> None:
    graph.extraction(Lineage(server))
    other = make_graph("of-another-target", tmp_path / "other")
    experiment = client.get_experiment_by_name("eagle3/targets").experiment_id
    client.delete_experiment(experiment)
    try:
        with pytest.raises(LineageError, match=f"mlflow experiments restore --experiment-id {experiment}"):
            other.extraction(Lineage(server))
    finally:
        client.restore_experiment(experiment)


def test_a_server_that_dies_is_an_error_within_ten_seconds(graph: Graph, tmp_path: Path) -> None:
    with mlflow_server(tmp_path / "mlflow") as url:
        lineage = Lineage(url)
        graph.extraction(lineage)
    started = time.monotonic()
    with pytest.raises(LineageError, match=rf"could not record the training.*{url}.*eagle3 up"):
        graph.training(lineage)
    assert time.monotonic() - started < 10
