"""deployments.yaml: Prefect ignores a misspelt key of a deployment silently, so every key is checked here."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig

from tasks.partition_runs import DEPLOYMENT

pytestmark = pytest.mark.unit

FILE = Path(__file__).resolve().parents[2] / "deployments.yaml"


@pytest.fixture(scope="module")
def deployments() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]
    return found


def test_every_key_is_one_that_prefect_knows(deployments: list[dict[str, Any]]) -> None:
    known = set(DeploymentConfig.model_fields)
    assert known
    for deployment in deployments:
        assert set(deployment) <= known, deployment["entrypoint"]


def test_every_entrypoint_is_a_flow_named_as_its_file(deployments: list[dict[str, Any]]) -> None:
    for deployment in deployments:
        path, _, name = deployment["entrypoint"].partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, name).name == Path(path).stem == name


def test_the_pipeline_calls_deployments_that_exist(deployments: list[dict[str, Any]]) -> None:
    names = {f"{d['entrypoint'].partition(':')[2]}/{d['name']}" for d in deployments}
    extraction = {"extract/blackwell", "extract/cpu", DEPLOYMENT}
    assert names == extraction | {"validate/cpu", "train/blackwell", "benchmark/blackwell", "pipeline/cpu"}


def test_a_split_extraction_takes_no_place_of_its_partitions(deployments: list[dict[str, Any]]) -> None:
    pools = {f"{d['entrypoint'].partition(':')[2]}/{d['name']}": d["work_pool"]["name"] for d in deployments}
    assert (pools["extract/cpu"], pools[DEPLOYMENT]) == ("cpu", "blackwell")


def test_retraining_is_scheduled_but_off(deployments: list[dict[str, Any]]) -> None:
    (pipeline,) = [d for d in deployments if d["entrypoint"].endswith(":pipeline")]
    (schedule,) = pipeline["schedules"]
    assert schedule["active"] is False
    assert schedule["cron"]
