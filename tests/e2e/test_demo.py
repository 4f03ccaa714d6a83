"""`eagle3 demo --exit` on the real small model: the README's first command, about ten minutes."""

import re
from pathlib import Path

import pytest

from tests.e2e.stack import Command

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("demo-home"))


@pytest.fixture(scope="module")
def shown(command: Command) -> str:
    return command.run("demo", "--exit", timeout=1800).stdout


def test_the_drafter_commits_more_than_one_and_a_half_tokens_a_verification(shown: str) -> None:
    assert _length(shown, "drafter, right layers") >= 1.5


def test_the_same_weights_on_wrong_layers_commit_clearly_fewer(shown: str) -> None:
    assert _length(shown, "same weights, wrong layers") < _length(shown, "drafter, right layers") - 0.2


def test_the_text_is_plain_greedy_decodings_whatever_is_served(shown: str) -> None:
    counts = re.findall(r"(\d+) of (\d+) *│$", shown, re.MULTILINE)
    assert len(counts) == 2
    assert all(same == all_ for same, all_ in counts)


def test_the_addresses_of_this_very_run_are_shown(shown: str) -> None:
    assert re.search(r"Prefect run: +http://127\.0\.0\.1:\d+/", shown)
    assert re.search(r"MLflow model version: +http://127\.0\.0\.1:\d+/#/models/eagle3-smollm2/versions/1", shown)


def test_nothing_is_left_running(command: Command, shown: str) -> None:
    assert {part["state"] for part in command.json("status", expect=1)} == {"stopped"}


def test_the_demos_configuration_is_planned_without_starting_anything(command: Command, shown: str) -> None:
    plan = command.json("run", "--config", str(Path("configs/smollm2.yaml")), "--dry-run")
    assert plan["ids"]["ids"] == [2, 15, 27]
    assert plan["shape"]["num_layers"] == 30
    assert plan["num_prompts"] == 126


def _length(shown: str, row: str) -> float:
    found = re.search(rf"│ {re.escape(row)} +│[^│]*│[^│]*│ +(\d+\.\d+)", shown)
    assert found, f"no row {row!r} in:\n{shown}"
    return float(found.group(1))
