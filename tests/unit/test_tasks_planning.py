"""What a dry run says before anything starts."""

from pathlib import Path

import pytest
from rich.console import Console

from flows.show import print_plan
from infra.settings import Settings
from tasks.params import PipelineParams
from tasks.planning import plan_pipeline

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def shown(params: PipelineParams, home: Path) -> str:
    console = Console(record=True, width=300)
    print_plan(plan_pipeline(params, Settings(home=home)), console)
    return console.export_text()


def test_a_plan_tells_how_long_is_trained(tmp_path: Path) -> None:
    params = PipelineParams.load(CONFIGS / "kimi-k2.5.yaml")
    training = params.training
    passes = training.budget * training.batch_size / 30000
    text = shown(params, tmp_path)
    assert f"training     {training.budget:g} steps, about {passes:.1f} passes over the samples" in text
    seconds = training.model_copy(update={"budget": 90.0, "budget_unit": "cpu_seconds"})
    text = shown(params.model_copy(update={"training": seconds}), tmp_path)
    assert f"training     90 CPU-seconds, {training.batch_size} samples a step" in text


def test_partitions_take_a_part_of_the_time_and_all_of_the_gpu_hours(tmp_path: Path) -> None:
    params = PipelineParams.load(CONFIGS / "kimi-k2.5.yaml")
    settings = Settings(home=tmp_path, sglang_device="cuda")
    one, four = (plan_pipeline(params.model_copy(update={"partitions": count}), settings).estimate for count in (1, 4))
    assert four.seconds == pytest.approx(one.seconds / 4)
    assert (four.num_gpus, four.bytes, four.rows) == (4 * one.num_gpus, one.bytes, one.rows)
    assert four.gpu_hours == pytest.approx(one.gpu_hours)
    assert "4 partitions run at once, each with a worker, a server and an upload of its own" in four.assumptions
