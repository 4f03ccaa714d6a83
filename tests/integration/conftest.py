"""Real SGLang servers on tiny targets. A server takes 15 to 25 s to start: these live as long as the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds, ids_of
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from tests.targets import LAYERS

POINTS = tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5))


def capture_ids(model_class: str) -> EngineIds:
    """SGLang's ids for layers 1, 3 and 5 of a tiny target."""
    return ids_of(POINTS, engine="sglang", version="0.5.23", model_class=model_class, num_layers=LAYERS)


@pytest.fixture(scope="session")
def sglang_settings() -> Settings:
    return Settings(sglang_device="cpu", sglang_start_timeout=240)


@pytest.fixture(scope="session")
def llama_staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tap of `llama_server` writes."""
    return tmp_path_factory.mktemp("llama-staging")


@pytest.fixture(scope="session")
def llama_server(
    tiny_llama: Path, llama_staging: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """The tiny Llama in float32, capturing layers 1, 3 and 5; no short prompt is split into chunks."""
    config = ServerConfig(
        target=tiny_llama,
        device="cpu",
        capture=CaptureServing(ids=capture_ids("LlamaForCausalLM"), staging=llama_staging),
        max_running_requests=8,
        max_total_tokens=8192,
    )
    log = tmp_path_factory.mktemp("logs") / "llama.log"
    with start_server(config, settings=sglang_settings, log_path=log) as server:
        yield server


@pytest.fixture(scope="session")
def deepseek_staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tap of `deepseek_server` writes."""
    return tmp_path_factory.mktemp("deepseek-staging")


@pytest.fixture(scope="session")
def deepseek_server(
    tiny_deepseek: Path, deepseek_staging: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """The tiny DeepSeek-V3 (MLA) in float32, capturing layers 1, 3 and 5."""
    config = ServerConfig(
        target=tiny_deepseek,
        device="cpu",
        capture=CaptureServing(ids=capture_ids("DeepseekV3ForCausalLM"), staging=deepseek_staging),
        max_running_requests=8,
        max_total_tokens=8192,
    )
    log = tmp_path_factory.mktemp("logs") / "deepseek.log"
    with start_server(config, settings=sglang_settings, log_path=log) as server:
        yield server
