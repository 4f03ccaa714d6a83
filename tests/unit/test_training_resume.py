"""A training that was killed and goes on equals one that was not, bit by bit; states on disk are whole and bounded."""

import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.training.config import TrainingConfig
from eagle3.training.loop import TrainResult, train
from eagle3.training.run import Progress
from eagle3.training.samples import TrainingError
from tests.drafters import LearnableDump, make_config, make_learnable_dump
from tests.small_disk import small_disk

pytestmark = pytest.mark.unit

RECIPE = TrainingConfig(
    budget=16, bf16=False, log_every=1, save_every=3, evaluate_every=4, warmup_steps=4, gradient_accumulation=2
)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def dump() -> LearnableDump:
    return make_learnable_dump(num_train=11, num_heldout=6)


def run(
    dump: LearnableDump, states: Path | None, kill_at: int | None = None, config: TrainingConfig = RECIPE
) -> TrainResult:
    def progress(now: Progress) -> None:
        if now.stage == "train" and now.step == kill_at:
            raise Killed

    return train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, config, progress, states=states)


@pytest.fixture(scope="module")
def whole(dump: LearnableDump) -> TrainResult:
    return run(dump, None)


def assert_equal(one: TrainResult, other: TrainResult) -> None:
    theirs = other.drafter.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.drafter.state_dict().items())
    untimed = [[replace(r, seconds=0.0, rows_per_second=0.0) for r in result.history] for result in (one, other)]
    assert untimed[0] == untimed[1]
    assert one.acceptance == other.acceptance
    clocks = ("seconds", "per_second", "resumed_at_step")
    figures = [{k: v for k, v in r.metrics.items() if not k.endswith(clocks)} for r in (one, other)]
    assert figures[0] == figures[1]


def test_killed_at_ten_random_steps_it_ends_with_the_same_bits(
    dump: LearnableDump, whole: TrainResult, tmp_path: Path
) -> None:
    """Ten trainings, each killed at a step of its own and resumed. Some die before their first state."""
    assert whole.metrics["best_step"] > 0
    generator = random.Random(5)
    for number, step in enumerate(generator.sample(range(1, 16), 10)):
        states = tmp_path / str(number)
        with pytest.raises(Killed):
            run(dump, states, kill_at=step)
        resumed = run(dump, states)
        assert resumed.metrics["resumed_at_step"] == (step - 1) // 3 * 3
        assert_equal(resumed, whole)


@pytest.mark.slow
def test_a_process_killed_with_kill_9_ten_times_in_one_training(
    dump: LearnableDump, whole: TrainResult, tmp_path: Path
) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nimport torch\ntorch.set_num_threads(1)\n"
        "from tests.unit.test_training_resume import RECIPE\n"
        "from eagle3.training.loop import train\nfrom tests.drafters import make_config, make_learnable_dump\n"
        "dump, at = make_learnable_dump(num_train=11, num_heldout=6), int(sys.argv[2])\n"
        "def progress(now):\n    if now.stage == 'train' and now.step == at:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, RECIPE, progress,\n"
        "    states=Path(sys.argv[1]))\n"
    )
    for step in sorted(random.Random(1).sample(range(2, 16), 10)):
        command = [sys.executable, "-c", script, str(tmp_path / "states"), str(step)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    resumed = run(dump, tmp_path / "states")
    assert resumed.metrics["resumed_at_step"] >= 9
    assert_equal(resumed, whole)


def test_only_the_newest_states_stay_and_a_damaged_one_is_passed_over(
    dump: LearnableDump, whole: TrainResult, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(dump, tmp_path, kill_at=14)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000012"]
    tensors = tmp_path / "step-00000012" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    resumed = run(dump, tmp_path)
    assert resumed.metrics["resumed_at_step"] == 9
    assert_equal(resumed, whole)


def test_a_state_of_another_training_is_refused(dump: LearnableDump, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(dump, tmp_path, kill_at=5)
    with pytest.raises(TrainingError, match="state of another training"):
        run(dump, tmp_path, config=RECIPE.model_copy(update={"learning_rate": 1e-4}))
    others = replace(dump, train=dump.train[1:])
    with pytest.raises(TrainingError, match="its settings, shape, vocabulary or samples were others"):
        run(others, tmp_path)


def test_where_no_state_can_be_read_it_is_said(dump: LearnableDump, tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir(parents=True)
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"no state under .* can be read: step-00000003: state.json"):
        run(dump, tmp_path)


def test_a_full_disk_is_named_and_the_states_before_stay(
    dump: LearnableDump, whole: TrainResult, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", 16) as disk:
        states = disk.folder / "states"

        def fill(now: Progress) -> None:
            if now.stage == "train" and now.step == 8:
                disk.fill(but=1 << 16)

        with pytest.raises(TrainingError, match=r"step 9: its state cannot be written .*free some space, and resume"):
            train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, RECIPE, fill, states=states)
        assert sorted(path.name for path in states.iterdir()) == ["step-00000003", "step-00000006"]
        disk.free()
        resumed = run(dump, states)
    assert resumed.metrics["resumed_at_step"] == 6
    assert_equal(resumed, whole)


def test_the_best_drafter_is_kept_and_patience_ends_the_training(dump: LearnableDump) -> None:
    config = RECIPE.model_copy(update={"budget": 400, "evaluate_every": 2, "patience": 3, "learning_rate": 0.05})
    result = run(dump, None, config=config)
    assert result.metrics["steps"] < 400
    assert result.metrics["best_step"] < result.metrics["steps"]
    lengths = [r.heldout_length for r in result.history if r.heldout_length is not None]
    assert result.acceptance is not None
    assert result.acceptance.length == max(*lengths, result.acceptance.length)
