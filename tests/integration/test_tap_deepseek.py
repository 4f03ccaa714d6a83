"""The DeepSeek family: the same layers under ids that start at 1 and ids that do not; what befalls neighbours.

No chunked prefill: the CPU stand-ins do not cover latent attention over a cached prefix, and the launcher refuses it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3.conventions import EngineIds, points_of
from eagle3.conventions.sglang import boundaries, live_points
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import read_live
from tests.integration.conftest import POINTS
from tests.integration.tap_support import (
    Reference,
    assert_states,
    body,
    check_retraction,
    check_survivors,
    load_reference,
    post,
    prompt,
    staged,
)
from tests.targets import LAYERS

pytestmark = pytest.mark.integration

MODEL_CLASS = "DeepseekV3ForCausalLM"


def engine_ids(*ids: int) -> EngineIds:
    return EngineIds(engine="sglang", version="0.5.23", model_class=MODEL_CLASS, ids=ids)


@pytest.fixture(scope="module")
def hidden_states(tiny_deepseek: Path) -> Reference:
    return load_reference(tiny_deepseek)


@pytest.fixture(scope="module")
def boundary_staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek-boundaries")


@pytest.fixture(scope="module")
def boundary_server(
    tiny_deepseek: Path, boundary_staging: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """Ids [2, 4, 6]: the list does not start at 1, so SGLang 0.5.23 reads it as boundaries."""
    config = ServerConfig(
        target=tiny_deepseek,
        device="cpu",
        capture=CaptureServing(ids=engine_ids(2, 4, 6), staging=boundary_staging),
        max_running_requests=8,
        max_total_tokens=2600,
        # Admit requests as if their answers were short: the cache runs full and requests are retracted.
        extra_args=("--schedule-conservativeness", "0.1"),
    )
    log = tmp_path_factory.mktemp("logs") / "deepseek-boundaries.log"
    with start_server(config, settings=sglang_settings, log_path=log) as running:
        yield running


def check(server: SglangServer, staging: Path, ids: EngineIds, hidden_states: Reference) -> None:
    """Prediction, the live model's record and the tensors say the same."""
    assert server.client.server_info().return_aux_hidden_state_layer_ids == ids.ids
    live = read_live(staging)
    assert live.model_class == MODEL_CLASS
    assert live.layers_to_capture == boundaries(ids.version, MODEL_CLASS, LAYERS, ids.ids)
    assert live_points(live.layers_to_capture, live.num_layers) == points_of(ids, LAYERS) == POINTS
    requests = [body(f"ds-{i}", prompt(20 + 45 * i), 4 + 5 * i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda request: post(server, request), requests))
    for request, answer in zip(requests, answers, strict=True):
        assert_states(staged(staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)


def test_other_ids_are_boundaries(
    boundary_server: SglangServer, boundary_staging: Path, hidden_states: Reference
) -> None:
    """[2, 4, 6] are the same layers here; on a Llama they would be layers 2, 4 and 6."""
    check(boundary_server, boundary_staging, engine_ids(2, 4, 6), hidden_states)
    llama = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(2, 4, 6))
    assert points_of(llama, LAYERS) == ("layers.2", "layers.4", "layers.6")


def test_neighbours_of_requests_that_are_aborted_or_left_keep_every_row(
    boundary_server: SglangServer, boundary_staging: Path, hidden_states: Reference
) -> None:
    check_survivors(boundary_server, boundary_staging, hidden_states)


def test_retracted_requests_keep_every_row(
    boundary_server: SglangServer, boundary_staging: Path, hidden_states: Reference
) -> None:
    check_retraction(boundary_server, boundary_staging, hidden_states, 8)


def test_ids_that_start_at_1_mean_outputs(
    deepseek_server: SglangServer, deepseek_staging: Path, hidden_states: Reference
) -> None:
    """SGLang 0.5.23 adds one."""
    check(deepseek_server, deepseek_staging, engine_ids(1, 3, 5), hidden_states)
