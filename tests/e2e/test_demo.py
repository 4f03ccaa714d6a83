"""`eagle3 demo --exit` on the real small model: the README's first command, about ten minutes."""

import re
from pathlib import Path

import pytest

from tests.e2e.stack import Command

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_drafter_commits_more_than_one_and_a_half_tokens_a_verification(demo_shown: str) -> None:
    assert _length(demo_shown, "drafter, right layers") >= 1.5


def test_the_same_weights_on_wrong_layers_commit_clearly_fewer(demo_shown: str) -> None:
    assert _length(demo_shown, "same weights, wrong layers") < _length(demo_shown, "drafter, right layers") - 0.2


def test_the_text_is_plain_greedy_decodings_whatever_is_served(demo_shown: str) -> None:
    counts = re.findall(r"(\d+) of (\d+) *│$", demo_shown, re.MULTILINE)
    assert len(counts) == 2
    assert all(same == all_ for same, all_ in counts)


def test_the_last_words_name_the_cause_and_the_value_that_mends_it(demo_shown: str) -> None:
    words = " ".join(demo_shown.split())
    assert "The server delivers embed, layers.2, layers.15 (ids [-1, 2, 15] in config.json)" in words
    assert "the drafter was trained on layers.2, layers.15, layers.27" in words
    assert "eagle_config.eagle_aux_hidden_state_layer_ids [2, 15, 27]" in words
    assert "slot 1 is embed, slot 2 is layers.2, slot 3 is layers.15" in words


def test_the_addresses_of_this_very_run_are_shown(demo_shown: str) -> None:
    assert re.search(r"Prefect run: +http://127\.0\.0\.1:\d+/", demo_shown)
    assert re.search(r"MLflow model version: +http://127\.0\.0\.1:\d+/#/models/eagle3-smollm2/versions/1", demo_shown)


def test_nothing_is_left_running(demo_command: Command, demo_shown: str) -> None:
    assert {part["state"] for part in demo_command.json("status", expect=1)} == {"stopped"}


def test_the_demos_configuration_is_planned_without_starting_anything(demo_command: Command, demo_shown: str) -> None:
    plan = demo_command.json("run", "--config", str(Path("configs/smollm2.yaml")), "--dry-run")
    assert plan["ids"]["ids"] == [2, 15, 27]
    assert plan["shape"]["num_layers"] == 30
    assert plan["num_prompts"] == 126


def _length(shown: str, row: str) -> float:
    found = re.search(rf"│ {re.escape(row)} +│[^│]*│[^│]*│ +(\d+\.\d+)", shown)
    assert found, f"no row {row!r} in:\n{shown}"
    return float(found.group(1))
