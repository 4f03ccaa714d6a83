"""What is refused before anything starts."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from eagle3.capture import CaptureError, CapturePoint, CaptureSpec
from eagle3.conversations import GivenSettings
from eagle3.digests import sha256_file
from eagle3.errors import Eagle3Error
from eagle3.prompts import GivenAnswers, PromptError, TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.info import ServerInfo
from infra.sglang.launch import ServerConfig, launch_plan
from infra.store import StoreError, open_store
from tasks.input_checks import check_inputs
from tasks.inputs import (
    PromptFile,
    bytes_per_token,
    check_lengths,
    further_prompts,
    most_bytes,
    named_apart,
    prompt_parts,
    resolve_ids,
    touch_store,
)
from tasks.params import AnswerParams, PipelineParams, PromptParams, ServingParams
from tasks.planning import plan_pipeline
from tasks.room import NoRoom, refuse_lacking, staging_room
from tests.targets import CONTEXT

pytestmark = pytest.mark.unit

AUX = tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5))


def test_a_final_state_that_sglang_does_not_deliver_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    capture = CaptureSpec(aux=AUX, final=CapturePoint("layers.7"))
    with pytest.raises(CaptureError, match="SGLang delivers the state after the final norm"):
        resolve_ids(capture, version="0.5.23", model_class="LlamaForCausalLM", num_layers=8)
    params = PipelineParams.model_validate(
        {"target": {"path": str(tiny_llama)}, "capture": capture.model_dump(), "mismatch": None}
    )
    with pytest.raises(CaptureError, match="set it to norm"):
        plan_pipeline(params, Settings(home=tmp_path))


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"no layers\.8"):
        resolve_ids(CaptureSpec(aux=("layers.8",)), version="0.5.23", model_class="LlamaForCausalLM", num_layers=8)


def test_a_held_out_prompt_that_does_not_fit_is_refused_before_the_extraction(tiny_llama: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"Tom has {n} apples.", "split": "train"} for n in range(3)]
    lines.append({"prompt": "apples " * CONTEXT, "split": "heldout", "id": "long"})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PromptError, match="prompt long has"):
        prompt_parts(PromptParams(file=str(file), num_heldout=1), AnswerParams(), Target.open(tiny_llama))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"serving": {"device": "cpu", "max_total_tokens": 30}}, "enlarge the KV cache"),
        ({"mismatch": {"points": ["embed", "layers.1", "layers.8"]}}, r"mismatch\.points: .* no layers\.8"),
        ({"drafter": {"head_dim": 9}}, "head_dim 9 is odd"),
        ({"also": ["not/here.jsonl"]}, "no prompts file"),
    ],
    ids=["nothing", "cache", "mismatch", "drafter", "also"],
)
def test_the_start_of_a_pipeline_and_its_plan_refuse_the_same(
    tiny_llama: Path, tmp_path: Path, changed: dict[str, Any], message: str | None
) -> None:
    values = {
        "target": {"path": str(tiny_llama)},
        "prompts": {"file": str(write_prompts(tmp_path / "p" / "prompts.jsonl", 12)), "num_heldout": 4},
        "capture": {"aux": AUX},
        "answers": {"max_new_tokens": 20},
        "serving": {"device": "cpu"},
        "mismatch": None,
    }
    params = PipelineParams.model_validate(values | changed)
    settings = Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())
    with disable_run_logger():
        for start in (check_inputs.fn, plan_pipeline):
            with pytest.raises(Eagle3Error, match=message) if message else nullcontext():
                start(params, settings)


def test_later_turns_are_counted_for_each_part(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [["One?", "Two?", "Three?"], ["Four?", "Five?"], ["Six?"]]
    splits = ["train", "heldout", "train"]
    lines = [{"turns": turn, "split": split} for turn, split in zip(turns, splits, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = prompt_parts(PromptParams(file=str(file), num_heldout=1), AnswerParams(), Target.open(tiny_llama))
    assert [(len(part.prompts), part.ignored_turns) for part in parts] == [(2, 2), (1, 1)]


def write_prompts(file: Path, count: int) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": f"{file.parent.name} {n}"}) + "\n" for n in range(count)))
    return file


def test_prompts_are_known_by_what_was_chosen_and_not_by_their_file(tiny_llama: Path, tmp_path: Path) -> None:
    target, file = Target.open(tiny_llama), write_prompts(tmp_path / "prompts.jsonl", 12)
    train, heldout = prompt_parts(PromptParams(file=str(file), num_heldout=4), AnswerParams(), target)
    assert len({train.sha256, heldout.sha256, heldout.first(2).sha256, sha256_file(file)}) == 4
    assert heldout.first(2) == PromptFile(f"{heldout.name}, first 2", heldout.prompts[:2])
    assert heldout.first(9) is heldout
    few = further_prompts(str(file), 3, AnswerParams(), target)
    assert few.sha256 != further_prompts(str(file), 4, AnswerParams(), target).sha256
    write_prompts(file, 13)
    assert further_prompts(str(file), 3, AnswerParams(), target).sha256 == few.sha256


def test_two_files_of_one_name_keep_their_figures_apart(tiny_llama: Path, tmp_path: Path) -> None:
    target = Target.open(tiny_llama)
    named = ("a/test.jsonl", "b/test.jsonl", "b/other.jsonl")
    files = [further_prompts(str(write_prompts(tmp_path / n, 3)), 3, AnswerParams(), target) for n in named]
    names = [file.name for file in named_apart(files)]
    assert names == [f"test.jsonl ({files[0].sha256[:8]})", f"test.jsonl ({files[1].sha256[:8]})", "other.jsonl"]
    assert len(set(names)) == 3
    with pytest.raises(PromptError, match=r"test\.jsonl .* named 2 times"):
        named_apart([files[0], files[0]])


def write_conversations(file: Path) -> Path:
    talks = [("Tom has 3 apples.", "Hello Tom!", "And buys 4 more?", f"The sum is {n}.") for n in range(3)]
    lines = [
        {
            "id": f"c{n}",
            "split": "heldout" if n == 2 else "train",
            "messages": [{"role": ("user", "assistant")[i % 2], "content": f"{t} {n}"} for i, t in enumerate(talk)],
        }
        for n, talk in enumerate(talks)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_of_given_conversations_the_held_out_ones_are_asked_as_they_open(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = PromptParams(file=str(write_conversations(tmp_path / "c.jsonl")), num_heldout=1)
    target = Target.open(tiny_llama)
    train, heldout = prompt_parts(prompts, AnswerParams(source="given"), target)
    assert [(p.id, p.given is not None) for p in (*train.prompts, *heldout.prompts)] == [
        ("c0", True),
        ("c1", True),
        ("c2", False),
    ]
    asked = target.tokenizer().decode(heldout.prompts[0].input_ids)
    assert asked == "user: Tom has 3 apples. 2\nassistant: "
    last, _ = prompt_parts(prompts, AnswerParams(source="given", given=GivenSettings(turns="last")), target)
    assert train.sha256 != last.sha256  # the loss is a part of what is asked
    with pytest.raises(PromptError, match="the target writes the answer itself"):
        prompt_parts(prompts, AnswerParams(), target)


def given(tokens: int, answers: int) -> TokenizedPrompt:
    spans = ((tokens, tokens + answers),)
    return TokenizedPrompt(
        "talk", tuple(range(tokens)), None, GivenAnswers(tuple(range(answers)), spans, ("a",), "given")
    )


def test_a_given_conversation_is_read_once_but_for_its_last_token() -> None:
    prompts = [given(3, 10), given(1, 2)]
    assert most_bytes(prompts, 1000, 4) == (12 + 2) * (4 + 9)
    check_lengths(server(13), prompts, 1000)
    with pytest.raises(PromptError, match="conversation talk has 12 tokens, but the server takes prompts under 12"):
        check_lengths(server(12), prompts, 2)


def test_a_plan_counts_what_is_read_of_given_conversations(tiny_llama: Path, tmp_path: Path) -> None:
    params = PipelineParams.model_validate(
        {
            "target": {"path": str(tiny_llama)},
            "prompts": {"file": str(write_conversations(tmp_path / "c.jsonl")), "num_heldout": 1},
            "capture": {"aux": AUX},
            "answers": {"source": "given"},
            "mismatch": None,
        }
    )
    train, _ = prompt_parts(params.prompts, params.answers, Target.open(tiny_llama))
    figures = plan_pipeline(params, Settings(home=tmp_path, store=f"file://{tmp_path}/store")).estimate
    per_token = bytes_per_token(params.capture, 64, "float32")
    assert figures.most_bytes == most_bytes(train.prompts, params.answers.max_new_tokens, per_token)


def server(limit: int | None) -> ServerInfo:
    return ServerInfo(version="0.5.23", model_path="x", disable_radix_cache=True, max_req_input_len=limit)


def test_a_prompt_that_the_servers_cache_cannot_hold_is_refused_before_it_is_sent() -> None:
    """SGLang 0.5.23: a request has at most limit + 5 tokens, of which one is never used; a prompt has under limit."""
    prompts = [TokenizedPrompt("short", (1, 2)), TokenizedPrompt("long", tuple(range(60)))]
    check_lengths(server(None), prompts, 1000)
    check_lengths(server(96), prompts, 40)
    with pytest.raises(PromptError, match=r"prompt long has 60 tokens .* up to 41, but the server takes .* under 96"):
        check_lengths(server(96), prompts, 41)
    with pytest.raises(PromptError, match="prompt long"):
        check_lengths(server(60), prompts, 2)
    check_lengths(server(100), prompts, 40, read_again=True)
    with pytest.raises(PromptError, match="prompt long"):
        check_lengths(server(99), prompts, 40, read_again=True)


def test_the_form_tells_the_cache_that_a_cpu_server_really_gets(tmp_path: Path) -> None:
    plan = launch_plan(ServerConfig(target=tmp_path, device="cpu"), 30000, Settings(home=tmp_path))
    size = plan.command[plan.command.index("--max-total-tokens") + 1]
    assert f"on a CPU {size}" in str(ServingParams.model_fields["max_total_tokens"].description)


def test_the_bound_of_a_dump_counts_every_row(tmp_path: Path) -> None:
    per_token = bytes_per_token(CaptureSpec(aux=AUX), 64, "float32")
    assert per_token == 4 * 64 * 4
    prompts = [TokenizedPrompt("a", (1, 2, 3)), TokenizedPrompt("b", (1,))]
    assert most_bytes(prompts, 10, per_token) == (3 + 9 + 1 + 9) * (per_token + 9)


def test_a_disk_that_is_too_small_is_refused_by_how_much_it_lacks(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    refuse_lacking([staging_room(tmp_path, free // 2)])
    with pytest.raises(NoRoom, match=r"GB are free: 5\d(\.\d+)? GB lack: free them, or set EAGLE3_HOME"):
        refuse_lacking([staging_room(tmp_path, free + 50 * 10**9 + 10**9)])


def test_a_store_that_takes_no_object_is_found_at_once(tmp_path: Path) -> None:
    touch_store(open_store((tmp_path / "store").as_uri(), Settings()))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"checks/writable\.txt"):
        touch_store(open_store((tmp_path / "file").as_uri(), Settings()))
