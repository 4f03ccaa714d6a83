"""The whole chain on a tiny target: stack up, pipeline through the workers, registry, audit commands, stack down."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.stack import Command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_drafter_is_registered_with_the_alias(result: Any) -> None:
    assert result["model_name"] == "eagle3-tiny"
    assert result["model_version"] == "1"
    assert result["alias"] == "champion"
    assert result["extracted"]["num_samples"] == 12
    assert result["validated"]["verdict"] == "pass"


def test_text_with_the_drafter_is_the_targets_own_greedy_text(result: Any) -> None:
    served = {row["label"]: row for row in result["measured"]["served"]}
    right, wrong = served["drafter, right layers"], served["same weights, wrong layers"]
    assert right["same_text"] == right["num_prompts"] == 4
    assert wrong["same_text"] == wrong["num_prompts"] == 2
    assert right["points"] == ["layers.1", "layers.3", "layers.5"]
    assert wrong["points"] == ["embed", "layers.1", "layers.3"]
    assert right["acceptance"]["length"] >= 1.0


def test_the_servers_are_held_against_the_contract_and_the_mismatch_is_told_with_cause_and_cure(result: Any) -> None:
    served = {row["label"]: row for row in result["measured"]["served"]}
    right, wrong = served["drafter, right layers"], served["same weights, wrong layers"]
    assert right["findings"] == []
    assert right["delivered"] == ["layers.1", "layers.3", "layers.5"]
    assert "delivers embed, layers.1, layers.3 (ids [-1, 1, 3] in config.json)" in wrong["findings"][0]
    assert "eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 5]" in wrong["findings"][0]
    assert wrong["delivered"] == ["embed", "layers.1", "layers.3"]


def test_lineage_leads_from_the_alias_to_the_dump(command: Command, result: Any) -> None:
    tree = json.dumps(command.json("lineage", "eagle3-tiny@champion"))
    assert result["extracted"]["dump"]["uri"] in tree
    assert result["extracted"]["dump"]["sha256"] in tree
    assert "layers.5" in tree
    assert json.loads(tree)["evidence_current"] is True
    shown = command.run("lineage", "eagle3-tiny@1").stdout
    assert "was made by check set" in shown
    assert result["extracted"]["dump"]["uri"] in shown


def test_the_dump_in_s3_is_verified(command: Command, result: Any) -> None:
    report = command.json("dump", "verify", result["extracted"]["dump"]["uri"])
    assert {check["verdict"] for check in report["checks"]} == {"pass"}


def test_a_dump_that_is_not_there_could_not_be_checked(command: Command, result: Any) -> None:
    done = command.run("dump", "verify", "s3://eagle3/dumps/nothing-here", expect=3)
    assert "could not be checked" in done.stderr


def test_status_and_doctor_find_every_part(command: Command, result: Any) -> None:
    assert all(part["healthy"] for part in command.json("status"))
    assert all(item["ok"] for item in command.json("doctor"))


def test_a_second_up_finds_the_first(command: Command, result: Any) -> None:
    before = {part["name"]: part["pid"] for part in command.json("status")}
    command.run("up")
    assert {part["name"]: part["pid"] for part in command.json("status")} == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [('{"prompt": "a"}\n\n{"prompt": "b"}\n', "line 2"), ('{"prompt": \n', "line 1"), ('{"prompt": ""}\n', "line 1")],
    ids=["empty line", "invalid JSON", "empty prompt"],
)
def test_bad_prompts_end_the_run_with_file_and_line(
    command: Command, config: Path, tmp_path: Path, content: str, sentence: str
) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text(content)
    done = command.run("run", "--config", str(config), "--prompts", str(prompts), expect=1)
    assert "bad.jsonl" in done.stderr
    assert sentence in done.stderr


def test_an_unknown_target_ends_the_run_with_its_path(command: Command, config: Path, tmp_path: Path) -> None:
    other = {**yaml.safe_load(config.read_text()), "target": {"path": str(tmp_path / "no-such-target")}}
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(other))
    done = command.run("run", "--config", str(path), expect=1)
    assert "no-such-target" in done.stderr
