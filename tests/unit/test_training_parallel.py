"""Several processes: as many samples a step as one process with the same micro-batches, and the same drafter."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.training.config import TrainingConfig
from eagle3.training.draws import full_shuffle, steps
from eagle3.training.loop import train
from eagle3.training.parallel import Processes
from eagle3.training.run import Progress
from eagle3.training.samples import TrainingError
from tests.drafters import make_config, make_learnable_dump

pytestmark = pytest.mark.unit

RECIPE = TrainingConfig(
    budget=8, bf16=False, log_every=1, gradient_accumulation=4, evaluate_every=3, save_every=3, learning_rate=1e-3
)


def run(out: Path, config: TrainingConfig, states: Path | None = None, kill_at: int | None = None) -> None:
    """Train and write the drafter and its losses; in each process."""
    torch.set_num_threads(1)
    dump = make_learnable_dump(num_train=13, num_heldout=5)

    def progress(now: Progress) -> None:
        if now.stage == "train" and now.step == kill_at:
            os._exit(9)

    result = train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, config, progress, states=states)
    losses = torch.tensor([record.loss for record in result.history], dtype=torch.float64)
    metrics = torch.tensor([[m.loss, m.rows] for m in result.history[-1].steps], dtype=torch.float64)
    save_file(
        result.drafter.state_dict() | {"losses": losses, "metrics": metrics}, out / f"{os.environ.get('RANK', '0')}.st"
    )


def torchrun(out: Path, config: TrainingConfig, number: int, *more: str) -> list[subprocess.CompletedProcess[str]]:
    """The processes that torchrun would start, with the environment that it gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.test_training_parallel", str(out), config.model_dump_json(), *more]
    started = [
        subprocess.Popen(
            command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2],
        )
        for rank in range(number)
    ]  # fmt: skip
    outputs = []
    for process in started:
        output, _ = process.communicate(timeout=240)
        outputs.append(subprocess.CompletedProcess(command, process.returncode, output))
    return outputs


def agree(one: Path, other: Path, tolerance: float) -> None:
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (tensor - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_over_gloo_equal_one(parallel: str, tmp_path: Path) -> None:
    """To 2e-5 of each tensor's norm after 8 steps: sums of float32 in another order, and Adam's division by them."""
    alone, two = tmp_path / "alone", tmp_path / "two"
    alone.mkdir()
    two.mkdir()
    config = RECIPE.model_copy(update={"parallel": parallel})
    run(alone, config)
    for done in torchrun(two, config, 2):
        assert done.returncode == 0, done.stdout[-3000:]
    agree(two / "0.st", two / "1.st", 0.0)
    agree(two / "0.st", alone / "0.st", 2e-5)
    first = make_learnable_dump(num_train=13, num_heldout=5)
    untrained = train(first.train, [], first.parts, make_config(), first.vocab, RECIPE.model_copy(update={"budget": 1}))
    moved = load_file(alone / "0.st")["fc.weight"] - untrained.drafter.fc.weight
    assert moved.norm() > 1e-3 * untrained.drafter.fc.weight.norm(), "a drafter that did not learn would agree as well"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_resume(parallel: str, tmp_path: Path) -> None:
    config, states = RECIPE.model_copy(update={"parallel": parallel}), tmp_path / "states"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    assert all(done.returncode == 0 for done in torchrun(whole, config, 2))
    assert torchrun(resumed, config, 2, str(states), "5")[0].returncode == 9
    assert (states / "step-00000003").is_dir()
    for done in torchrun(resumed, config, 2, str(states)):
        assert done.returncode == 0, done.stdout[-3000:]
    agree(resumed / "0.st", whole / "0.st", 0.0)


def test_the_number_of_processes_changes_no_sample_of_a_step() -> None:
    draw = full_shuffle([str(i) for i in range(22)], seed=3)
    places = list(range(1, 22))

    def first_steps(number: int) -> list[list[list[int]]]:
        shares = [Processes(rank, number).streams(4) for rank in range(number)]
        walks = [steps([draw(places, stream, 4) for stream in share], 2, None) for share in shares]
        return [[batch for walk in walks for batch in next(walk)[0]] for _ in range(7)]

    assert first_steps(1) == first_steps(2) == first_steps(4)
    with pytest.raises(TrainingError, match="4 micro-batches a step cannot be shared evenly by 3 processes"):
        Processes(0, 3).streams(4)


if __name__ == "__main__":
    folder, settings, *rest = sys.argv[1:]
    run(
        Path(folder),
        TrainingConfig.model_validate_json(settings),
        Path(rest[0]) if rest else None,
        int(rest[1]) if len(rest) > 1 else None,
    )
