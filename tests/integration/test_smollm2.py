"""The demo's model, made from the installed package: a real language model that answers sensibly."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.conventions import ids_of
from eagle3.conversations import GivenSettings, tokenize_given
from eagle3.prompts import Prompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import GenerateRequest
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from infra.sglang.staging import read_staged, staged_path
from infra.smollm2 import FOLDER_NAME, STAMP_NAME, ensure_smollm2

pytestmark = pytest.mark.integration

# Of a row's length: some values of this model reach 25,000, so an absolute bound would say nothing. Two float32 paths
# through it differed by at most 5e-6; one layer further on, rows differ by a tenth.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the first plan on a machine, which says so, and where, beside its answer."""
    home = tmp_path_factory.mktemp("home")
    leftover = home / "models" / f".{FOLDER_NAME}-part-killed"
    leftover.mkdir(parents=True)
    folder = home / "models" / FOLDER_NAME
    command = [sys.executable, "-c", "from flows.cli import main; main()", "plan", "--json"]
    environment = os.environ | {"EAGLE3_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["target"] == str(folder)
    sentences = done.stderr.splitlines()
    assert sentences[0] == f"making the demo's model once, in {folder}: 270 MB, about half a minute"
    assert sentences[-1].startswith(f"SmolLM2-135M-Instruct is ready in {folder}: 273 MB in ")
    assert sorted(p.name for p in folder.parent.iterdir()) == [f".{FOLDER_NAME}.lock", FOLDER_NAME]
    return folder


def test_the_folder_is_an_ordinary_target(made: Path) -> None:
    target = Target.open(made)
    assert (target.model_class, target.num_layers, target.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (target.vocab_size, target.num_attention_heads, target.num_key_value_heads) == (49152, 9, 3)
    assert (target.rope_theta, target.rms_norm_eps, target.context_length) == (100000.0, 1e-5, 8192)
    assert (target.dtype, target.tied_head) == ("bfloat16", True)
    assert target.head().equal(target.embedding())
    assert len(target.last_layer()) == 9
    assert not any("gguf" in key or "quant" in key for key in target.config)
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == 2


def test_its_greedy_answers_are_sensible(made: Path) -> None:
    target = Target.open(made)
    model, tokenizer = target.load_model(torch.float32), target.tokenizer()

    def answer(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)
        assert out[0, -1] == tokenizer.eos_token_id, "it must know when to stop"
        return tokenizer.decode(out[0, len(ids) : -1])

    assert answer("What is the capital of France?") == "The capital of France is Paris."
    assert "3 + 4 = 7" in answer("Tom has 3 apples and buys 4 more. How many apples does Tom have?")

    states = target.hidden_states(model, tokenizer("The capital of France").input_ids)
    assert len(states) == 32
    assert states[CapturePoint("norm")].isfinite().all()


def test_an_answer_given_back_becomes_the_tokens_that_it_was_written_with(made: Path) -> None:
    """So a given conversation under its own template is what the target would have read and said."""
    tokenizer = Target.open(made).tokenizer()
    said = [
        "What is the capital of France?",
        "<think>France 😀?</think>The capital of France is Paris.",
        "2 + 2?",
        "4.",
    ]
    messages = tuple({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said))
    conversation = Prompt("c", messages)

    def learned(**settings: Any) -> list[list[int]]:
        [sample] = tokenize_given([conversation], tokenizer, GivenSettings(**settings), context_length=8192)
        assert sample.given is not None
        ids = [*sample.input_ids, *sample.given.output_ids]
        assert len(sample.input_ids) == sample.given.spans[0][0]
        return [ids[start:end] for start, end in sample.given.spans]

    def written(text: str) -> list[int]:
        return [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    assert learned() == [written(said[1]), written(said[3])]
    assert learned(turns="last") == [written(said[3])]
    assert (
        learned(thinking="mask")
        == learned(thinking="remove")
        == [
            written("The capital of France is Paris."),
            written(said[3]),
        ]
    )
    asked = tokenizer.apply_chat_template([messages[0]], add_generation_prompt=True, return_dict=False)
    [sample] = tokenize_given([conversation], tokenizer, GivenSettings(), context_length=8192)
    assert list(sample.input_ids) == asked


def test_its_tokenizer_splits_digits_one_by_one(made: Path) -> None:
    tokenizer = Target.open(made).tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("x =  1234").input_ids) == ["x", "Ġ=", "ĠĠ", "1", "2", "3", "4"]
    assert tokenizer.model_max_length == 8192


def test_a_later_call_returns_at_once(made: Path) -> None:
    told: list[str] = []
    started = time.monotonic()
    assert ensure_smollm2(made.parents[1], told.append) == made
    assert time.monotonic() - started < 1
    assert told == []


@pytest.mark.slow
def test_the_rows_that_the_server_captures_equal_transformers(
    made: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    """The whole way on a real model, in float32: a batch of three answers, layers 2, 15, 27 and the final state."""
    target, points = Target.open(made), tuple(CapturePoint(f"layers.{i}") for i in (2, 15, 27))
    tokenizer = target.tokenizer()
    questions = ("What is the capital of France?", "Tom has 3 apples and buys 4 more. How many has he?", "Count to 9.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    requests = [
        GenerateRequest(rid=f"smol-{i}", input_ids=tuple(ids), max_new_tokens=24, tap=True)
        for i, ids in enumerate(prompts)
    ]
    ids = ids_of(points, engine="sglang", version="0.5.23", model_class=target.model_class, num_layers=30)
    config = ServerConfig(
        target=made, device="cpu", dtype="float32", capture=CaptureServing(ids=ids, staging=tmp_path / "staging")
    )
    with start_server(config, settings=sglang_settings, log_path=tmp_path / "server.log") as server:
        answers = server.client.generate_many(requests, streams=len(requests))
    model = target.load_model(torch.float32)
    for request, answer in zip(requests, answers, strict=True):
        rows = read_staged(staged_path(tmp_path / "staging", request.rid), num_slots=3, hidden_size=target.hidden_size)
        assert rows.token_ids == [*request.input_ids, *answer.output_ids]
        expected = target.hidden_states(model, rows.token_ids[:-1])
        captured = dict(zip(points, rows.aux, strict=True)) | {CapturePoint("norm"): rows.final}
        for point, state in captured.items():
            assert state.dtype == torch.float32
            assert distances(state, expected[point]).max() < TOLERANCE, f"{request.rid} {point}"
        before = expected[CapturePoint("layers.14")]
        assert distances(captured[points[1]], before).median() > 100 * TOLERANCE, "a layer off would be seen"


def distances(state: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to its length."""
    return (state - expected).norm(dim=-1) / expected.norm(dim=-1)


def test_a_damaged_folder_is_made_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion itself ran above; here its result is put back, to see that the damaged folder is replaced."""
    spare = made.parents[1] / "spare"
    shutil.copytree(made, spare, ignore=shutil.ignore_patterns(STAMP_NAME))
    monkeypatch.setattr(
        "infra.smollm2._convert", lambda _gguf, out, _tell: shutil.copytree(spare, out, dirs_exist_ok=True)
    )
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert ensure_smollm2(made.parents[1]) == made
    assert Target.open(made).final_norm().shape == (576,)
    shutil.rmtree(spare)
