"""One MLflow server for the lineage's tests: every test records a graph of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.lineage import Lineage, TrainingRecord
from tests.integration.mlflow_server import mlflow_server
from tests.lineage_graph import Graph, digest, make_graph


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture
def lineage(server: str) -> Lineage:
    return Lineage(server)


@pytest.fixture
def client(server: str) -> MlflowClient:
    return MlflowClient(server)


@pytest.fixture
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> Graph:
    """A graph of this test alone."""
    return make_graph(digest(request.node.nodeid)[:8], tmp_path / "checkpoint")


@pytest.fixture
def training(lineage: Lineage, graph: Graph) -> TrainingRecord:
    """The graph's training, with the extraction and the validation before it; not registered."""
    graph.extraction(lineage)
    graph.validation(lineage)
    return graph.training(lineage)
