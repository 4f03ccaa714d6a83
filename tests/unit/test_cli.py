"""The command as a user meets it: what it prints, how it refuses, with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.errors import Eagle3Error
from flows.cli import app
from flows.options import pipeline_params
from infra.ports import free_ports
from infra.stack_state import StackRecord, write_record

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
KIMI = ["--model-class", "KimiK25ForConditionalGeneration", "--num-layers", "61"]
COMMANDS = [["demo"], ["up"], ["down"], ["status"], ["run"], ["layers"], ["lineage"], ["dump", "verify"], ["doctor"]]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"eagle3 {' '.join(command)}" in done.output


def test_layers_says_what_ids_capture() -> None:
    done = CliRunner().invoke(app, ["layers", *KIMI, "--ids", "2,30,58", "--engine-version", "0.5.12", "--json"])
    answer = json.loads(done.output)
    assert answer["points"] == ["layers.2", "layers.30", "layers.58"]
    assert answer["explanation"][0] == "layers.2: captured at the input of layer 3 = output of layer 2"


def test_layers_says_which_ids_capture_points() -> None:
    done = CliRunner().invoke(app, ["layers", *KIMI, "--points", "layers.2,layers.30,layers.58", "--json"])
    assert json.loads(done.output)["ids"] == [3, 31, 59]


@pytest.mark.parametrize(
    "arguments",
    [["layers", *KIMI], ["layers", *KIMI, "--ids", "2,x"], ["lineage", "no-alias"], ["nonsense"]],
    ids=["neither ids nor points", "ids that are no integers", "a drafter without alias", "an unknown command"],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_an_error_is_a_message_without_a_traceback() -> None:
    with pytest.raises(Eagle3Error, match="was not checked"):
        CliRunner().invoke(app, ["layers", *KIMI, "--ids", "2", "--engine-version", "0.9.0"], catch_exceptions=False)
    command = [sys.executable, "-c", "from flows.cli import main; main()", "layers", *KIMI, "--ids", "2"]
    done = subprocess.run([*command, "--engine-version", "0.9.0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: what layer ids mean in SGLang 0.9.0 was not checked")
    assert "Traceback" not in done.stderr


def test_kimi_is_planned_without_its_files() -> None:
    done = CliRunner().invoke(app, ["run", "--config", "configs/kimi-k2.5.yaml", "--dry-run", "--json"])
    plan = json.loads(done.output)
    command = " ".join(plan["command"])
    assert plan["ids"]["ids"] == [3, 31, 59]
    assert "--return-aux-hidden-state-layer-ids 3 31 59" in command
    assert "--tp-size 8" in command
    assert "--device cuda" in command
    assert plan["bytes_per_token"] == 4 * 7168 * 2
    assert plan["most_bytes"] == 57344 * 2048 * 30000
    assert not any(key.startswith("SGLANG_USE_CPU") for key in plan["environment"])


def test_a_target_on_this_machine_is_planned_from_its_own_config(tiny_llama: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"target: {{path: {tiny_llama}}}\ncapture: {{aux: [layers.1, layers.3]}}\nserving: {{device: cpu}}\n"
    )
    done = CliRunner().invoke(app, ["run", "--config", str(config), "--dry-run"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM, 8 layers, hidden 64" in done.output
    assert "sglang 0.5.23 LlamaForCausalLM [1, 3]" in done.output
    assert "EAGLE3_SGLANG_CPU=1" in done.output


def test_points_that_the_target_does_not_have_are_refused_before_anything_starts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(f"target: {{path: {tiny_llama}}}\ncapture: {{aux: [layers.1, layers.8]}}\n")
    with pytest.raises(Eagle3Error, match=r"no layers\.8: it has 8 decoder layers"):
        CliRunner().invoke(app, ["run", "--config", str(config), "--dry-run"], catch_exceptions=False)


@pytest.mark.parametrize("where", ["no stack", "a stack that is down"])
def test_a_run_without_a_server_says_how_to_start_one(tmp_path: Path, where: str) -> None:
    """And Prefect starts no server of its own."""
    address = "no Prefect server is known"
    if where != "no stack":
        (port,) = free_ports(1, "20000-32767")
        write_record(tmp_path, StackRecord(ports={"prefect": port, "mlflow": port, "s3": port}))
        address = f"http://127.0.0.1:{port}/api does not answer"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = kept | {"EAGLE3_HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert address in done.stderr
    assert "`eagle3 up`" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.db"))


def test_files_are_the_ones_that_the_user_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker lives in the project's folder, the user does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").touch()
    (tmp_path / "model").mkdir()
    config = tmp_path / "c.yaml"
    config.write_text("prompts: {file: my.jsonl}\ntarget: {path: model}\nalso: [my.jsonl, not/here.jsonl]\n")
    params = pipeline_params(config, num_train=7)
    assert params.prompts.file == str(tmp_path / "my.jsonl")
    assert params.prompts.num_train == 7
    assert params.target.path == str(tmp_path / "model")
    assert params.also == (str(tmp_path / "my.jsonl"), "not/here.jsonl")
    assert pipeline_params().target.path == "smollm2"
    assert pipeline_params().prompts.file == str(ROOT / "examples" / "word_problems.jsonl")


def test_doctor_asks_the_servers_that_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1, "20000-32767")
    monkeypatch.setenv("EAGLE3_MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("EAGLE3_STORE", (tmp_path / "store").as_uri())
    (tmp_path / "store").mkdir()
    done = CliRunner().invoke(app, ["doctor", "--json"])
    items = {item["name"]: item for item in json.loads(done.output)}
    assert items["mlflow (not the stack's)"]["ok"] is False
    assert "does not answer" in items["mlflow (not the stack's)"]["mend"]
    assert items["store (not the stack's)"]["ok"] is True
    assert "s3" not in items
    assert items["CUDA graphs"]["found"]


def test_status_of_a_stack_that_is_down_exits_with_1() -> None:
    done = CliRunner().invoke(app, ["status", "--json"])
    assert done.exit_code == 1
    assert {part["state"] for part in json.loads(done.output)} == {"stopped"}


def test_a_dump_folder_without_a_manifest_could_not_be_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dump", "verify", str(tmp_path / "nothing")])
    assert done.exit_code == 3
