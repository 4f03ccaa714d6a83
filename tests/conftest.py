"""Fixtures that every test may use. Servers' fixtures stand in the conftest of their folder."""

import os

# Before anything heavy is imported: one thread, no hub, no telemetry.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from pathlib import Path

import pytest
import torch

from tests import targets

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_llama(tmp_path_factory.mktemp("targets") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_deepseek(tmp_path_factory.mktemp("targets") / "tiny-deepseek")
