"""The two ways to capture give the same dump, and a dump that is not what it says is refused by the flows."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle3.conversations import GivenSettings
from eagle3.dump.answers import read_answers
from eagle3.dump.probe import read_dump_probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.probe_checks import delivered
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from infra.stack import connect
from tasks.artifacts import fetch_dump
from tests.dumps import flip_bit, reseal
from tests.e2e.stack import PROJECT, Command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EXTRACTION = ("name", "target", "prompts", "capture", "answers", "serving")

RUN_FLOW = """
import json, sys
from infra.settings import Settings
from infra.stack import connect
connect(Settings())
module, name, params = sys.argv[1:]
flow = getattr(__import__(f"flows.{module}", fromlist=[name]), name)
print("RESULT " + flow(params=json.loads(params)).model_dump_json())
"""


def run_flow(command: Command, name: str, params: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run a flow in a process of its own, as `python flows/extract.py` would, against the stack of this folder."""
    return subprocess.run(
        [sys.executable, "-c", RUN_FLOW, name, name, json.dumps(params)],
        cwd=PROJECT,
        env=command.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def stack_settings(command: Command, result: Any, monkeypatch_module: pytest.MonkeyPatch) -> Settings:
    monkeypatch_module.setattr(os, "environ", os.environ.copy())  # connect() sets variables of this process
    return connect(Settings(home=command.home))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def while_answering(stack_settings: Settings, result: Any) -> DumpReader:
    return DumpReader.open(fetch_dump(DumpRef(**result["extracted"]["dump"]), stack_settings))


def test_answer_then_prefill_captures_the_same_rows_as_while_answering(
    command: Command, config: Path, stack_settings: Settings, while_answering: DumpReader
) -> None:
    params = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key in EXTRACTION}
    params["answers"] = {"max_new_tokens": 24, "source": "answer_then_prefill"}
    extracted = result_of(run_flow(command, "extract", params))
    prefilled = DumpReader.open(fetch_dump(DumpRef(**extracted["dump"]), stack_settings))

    assert while_answering.manifest.generation.source == "while_answering"
    assert prefilled.manifest.generation.source == "answer_then_prefill"
    by_id = {sample.id: sample for sample in while_answering}
    assert len(by_id) == len(prefilled) == 12
    for sample in prefilled:
        other = by_id[sample.id]
        assert torch.equal(sample.full_ids(), other.full_ids())
        assert torch.equal(sample.loss_mask, other.loss_mask)
        for point, state in sample.states.items():
            torch.testing.assert_close(state, other.states[point], rtol=1e-4, atol=1e-4)
    for dump in (while_answering, prefilled):
        probe = read_dump_probe(dump.folder, dump.manifest)
        assert probe is not None
        assert all(slot.fits for slot in delivered(probe))


@pytest.mark.slow  # its parts: tests/integration/test_given.py
def test_given_conversations_are_read_and_their_dump_is_validated(
    command: Command, config: Path, tmp_path: Path, stack_settings: Settings
) -> None:
    lines = []
    for n in range(14):
        said = [
            f"Tom has {n} apples.",
            f"<think>It is {n}.</think>The sum is {n}.",
            "And buys 4 more?",
            f"{n}, Tom! " * n,
        ]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text or "."} for i, text in enumerate(said)]
        lines.append(json.dumps({"id": f"c{n:02d}", "split": "heldout" if n < 4 else "train", "messages": messages}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    params = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key in EXTRACTION}
    params["name"] = "given"
    params["prompts"] |= {"file": str(tmp_path / "talks.jsonl"), "num_train": None, "num_heldout": 4}
    params["answers"] = {"source": "given", "given": {"thinking": "mask", "max_tokens": 120, "too_long": "cut"}}
    extracted = result_of(run_flow(command, "extract", params))
    dump = DumpReader.open(fetch_dump(DumpRef(**extracted["dump"]), stack_settings))

    assert dump.manifest.generation.source == "given"
    assert dump.manifest.generation.given == GivenSettings(thinking="mask", max_tokens=120, too_long="cut")
    assert 0 < dump.manifest.num_cut < len(dump) == 10
    for shard in range(len(dump.manifest.shards)):
        kept = read_answers(dump.folder, dump.manifest.shards[shard])
        for index, answers in zip(dump.samples_of(shard), kept, strict=True):
            sample = dump.read(index)
            assert answers.cut == (sample.record.left_out > 0)
            said = [list(answer.token_ids) for answer in answers.answers]
            assert said == [sample.full_ids()[a:b].tolist() for a, b in sample.record.answer_spans]
            assert "think" not in "".join(answer.text for answer in answers.answers)
    checked = result_of(run_flow(command, "validate", {"dump": extracted["dump"], "target": params["target"]}))
    assert checked["verdict"] != "fail", checked


def test_an_attached_server_gives_the_same_rows_and_stays_up(
    command: Command,
    config: Path,
    tiny_llama: Path,
    tmp_path: Path,
    stack_settings: Settings,
    while_answering: DumpReader,
) -> None:
    staging = tmp_path / "tap of the server"
    ids = while_answering.manifest.engine.ids
    serving = ServerConfig(target=tiny_llama, device="cpu", capture=CaptureServing(ids=ids, staging=staging))
    params = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key in EXTRACTION}
    with start_server(serving, settings=stack_settings, log_path=tmp_path / "server.log") as server:
        params["serving"] |= {"attach": server.url, "attach_staging": str(staging)}
        extracted = result_of(run_flow(command, "extract", params))
        assert server.client.is_healthy()
        refused = run_flow(command, "extract", params | {"capture": {"aux": ["layers.0", "layers.3", "layers.5"]}})
        assert "this server would not deliver every state" in refused.stdout + refused.stderr
        assert not list(staging.glob("*.safetensors*"))
    attached = DumpReader.open(fetch_dump(DumpRef(**extracted["dump"]), stack_settings))
    assert attached.manifest.engine.ids == ids
    by_id = {sample.id: sample for sample in while_answering}
    assert len(attached) == len(by_id)
    for sample in attached:
        for point, state in sample.states.items():
            torch.testing.assert_close(state, by_id[sample.id].states[point], rtol=1e-4, atol=1e-4)


def test_a_damaged_dump_fails_validation_and_is_not_trained_on(
    command: Command, config: Path, tmp_path: Path, while_answering: DumpReader
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in while_answering.folder.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    # A dump of its own, by its digest too: the report that fails must not be that of the pipeline's dump.
    manifest = reseal(damaged, created_at=datetime.now(UTC))
    dump = {"uri": damaged.as_uri(), "sha256": manifest.digest()}
    target = yaml.safe_load(config.read_text())["target"]
    result_of(run_flow(command, "validate", {"dump": dump, "target": target}))
    flip_bit(damaged / manifest.shards[0].name)

    validated = run_flow(command, "validate", {"dump": dump, "target": target})
    assert validated.returncode != 0
    assert manifest.shards[0].name in validated.stdout + validated.stderr
    assert "sha256" in validated.stdout + validated.stderr

    trained = run_flow(command, "train", {"dump": dump, "target": target})
    assert trained.returncode != 0
    assert "did not pass its checks (integrity)" in trained.stdout + trained.stderr


def test_a_dump_that_nobody_validated_is_not_trained_on(command: Command, config: Path, result: Any) -> None:
    dump = {"uri": result["extracted"]["dump"]["uri"], "sha256": "0" * 64}
    target = yaml.safe_load(config.read_text())["target"]
    trained = run_flow(command, "train", {"dump": dump, "target": target})
    assert trained.returncode != 0
    assert "has no evidence report" in trained.stdout + trained.stderr
