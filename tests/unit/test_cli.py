"""The command as a user meets it: what it prints, how it refuses, with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3.errors import Eagle3Error
from flows.cli import app
from flows.demo import ForeignServer, refuse_foreign_server
from flows.options import pipeline_params
from infra.ports import free_ports
from infra.settings import WrongSetting
from infra.stack_state import StackRecord, write_record
from tasks.params import ParamsError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
KIMI = ["--model-class", "KimiK25ForConditionalGeneration", "--num-layers", "61"]
COMMANDS = [
    ["demo"],
    ["up"],
    ["down"],
    ["status"],
    ["run"],
    ["plan"],
    ["layers"],
    ["lineage"],
    ["probe"],
    *(["dump", c] for c in ("verify", "inspect", "attribute", "compare", "ls", "show", "copy", "prune")),
    ["doctor"],
]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_its_exit_codes(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"eagle3 {' '.join(command)}" in done.output
    assert "Exit codes: 0 " in done.output


@pytest.mark.parametrize(
    "arguments",
    [["lineage", "no-alias"], ["nonsense"]],
    ids=["a drafter without alias", "an unknown command"],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("variable", "value"), [("EAGLE3_PORTS", "abc"), ("EAGLE3_STORE", "/data"), ("EAGLE3_S3_TIMEOUT", "-1")]
)
def test_a_wrong_setting_is_named_by_its_variable(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    done = CliRunner().invoke(app, ["status"])
    assert isinstance(done.exception, WrongSetting)
    assert str(done.exception).startswith(f"{variable}: ")
    assert "pydantic.dev" not in str(done.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": Path("nope.jsonl"), "num_train": 5}, r"no prompts file nope\.jsonl"),
        ({"also": [Path("nope.jsonl")]}, r"no prompts file nope\.jsonl"),
        ({"name": "My Run"}, "name: expected lower-case letters, digits and dashes, at most 63; got 'My Run'"),
    ],
    ids=["prompts", "also", "name"],
)
def test_an_option_that_does_not_fit_is_named_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        pipeline_params(**options)


@pytest.mark.parametrize("what", ["nothing", "a folder", "bytes"])
def test_a_configuration_that_cannot_be_read_is_named_once(tmp_path: Path, what: str) -> None:
    config = tmp_path / "c.yaml"
    if what == "a folder":
        config.mkdir()
    elif what == "bytes":
        config.write_bytes(b"\xff\xfe")
    with pytest.raises(ParamsError, match=r"c\.yaml \(.+\): expected a YAML file such as configs") as refused:
        pipeline_params(config)
    assert str(refused.value).count("c.yaml") == 1
    assert "Errno" not in str(refused.value)


def test_down_says_where_it_looked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["down"])
    assert f"nothing ran in {tmp_path}" in done.output


def test_the_demo_refuses_to_submit_to_a_server_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    with pytest.raises(ForeignServer, match=r"https://prefect\.example/api.*unset the variable.*eagle3 run"):
        refuse_foreign_server("http://127.0.0.1:4200/api")
    refuse_foreign_server("https://prefect.example/api")


def test_doctor_asks_a_running_server_that_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1, "20000-32767")
    done = CliRunner().invoke(app, ["doctor", "--json", "--server", f"http://127.0.0.1:{port}"])
    item = next(item for item in json.loads(done.output) if item["name"] == "Server")
    assert not item["ok"]
    assert str(port) in item["mend"]


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
    assert plan["estimate"]["bytes_per_token"] == 4 * 7168 * 2
    assert plan["estimate"]["most_bytes"] == (57344 + 9) * (400 + 2048 - 1) * 30000
    assert not any(key.startswith("SGLANG_USE_CPU") for key in plan["environment"])


def test_a_target_on_this_machine_is_planned_from_its_own_config(tiny_llama: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"target: {{path: {tiny_llama}}}\ncapture: {{aux: [layers.1, layers.3]}}\nserving: {{device: cpu}}\n"
        "mismatch: null\n"
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
    config.write_text(f"target: {{path: {tiny_llama}}}\ncapture: {{aux: [layers.1, layers.8]}}\nmismatch: null\n")
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
    assert items["a server started here"]["found"]


def test_status_of_a_stack_that_is_down_exits_with_1() -> None:
    done = CliRunner().invoke(app, ["status", "--json"])
    assert done.exit_code == 1
    assert {part["state"] for part in json.loads(done.output)} == {"stopped"}


def test_a_dump_folder_without_a_manifest_could_not_be_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dump", "verify", str(tmp_path / "nothing")])
    assert done.exit_code == 3
