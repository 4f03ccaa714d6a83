"""Starting, asking and ending the real SGLang server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from eagle3.prompts import PromptError, TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import (
    Generated,
    SglangError,
    capture_problems,
    decode_graphs_off,
)
from infra.sglang.launch import DraftServing, LaunchError, ServerConfig
from infra.sglang.server import ServerStartError, SglangServer, attach, start_server
from tasks.capture_session import CaptureRefused, check_weights
from tasks.inputs import check_lengths
from tests.integration.conftest import capture_ids
from tests.integration.server_support import NEW_TOKENS, PROMPTS, greedy, requests

pytestmark = pytest.mark.integration

KEY = "sesame-0123456789"


def processes_of(server: SglangServer) -> list[psutil.Process]:
    assert server.pid
    guard = psutil.Process(server.pid)
    return [guard, *guard.children(recursive=True)]


def wait_until_gone(processes: Sequence[psutil.Process], seconds: float = 30) -> None:
    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while left := [process for process in processes if lives(process)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def children_now() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def copy_target(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


# --- asking -------------------------------------------------------------------------------------------------------


def test_the_server_answers_as_transformers_does_alone_and_in_a_batch(
    llama_server: SglangServer, tiny_llama: Path
) -> None:
    expected = greedy(tiny_llama, PROMPTS)
    client = llama_server.client
    alone = [client.answer(request) for request in requests("alone", PROMPTS)]
    done: list[Generated] = []
    batch = client.generate_many(requests("batch", PROMPTS), streams=4, on_done=done.append)
    assert [answer.output_ids for answer in alone] == expected
    assert [answer.output_ids for answer in batch] == expected
    assert [answer.rid for answer in batch] == [request.rid for request in requests("batch", PROMPTS)]
    assert sorted(answer.rid for answer in done) == sorted(answer.rid for answer in batch)
    assert {answer.finish_reason for answer in batch} == {"length"}
    assert [answer.prompt_tokens for answer in batch] == [len(prompt) for prompt in PROMPTS]
    assert batch[0].completion_tokens == NEW_TOKENS
    assert batch[0].counts.verifications == 0


def test_a_deepseek_target_answers_as_transformers_does(deepseek_server: SglangServer, tiny_deepseek: Path) -> None:
    answers = deepseek_server.client.generate_many(requests("deepseek", PROMPTS), streams=4)
    assert [answer.output_ids for answer in answers] == greedy(tiny_deepseek, PROMPTS)
    info = deepseek_server.client.server_info()
    assert capture_problems(info, capture_ids("DeepseekV3ForCausalLM")) == []


def test_the_server_says_what_it_is_and_keeps_its_secrets(llama_server: SglangServer, tiny_llama: Path) -> None:
    info = llama_server.client.server_info()
    assert (info.version, info.model_path, info.dtype) == ("0.5.23", str(tiny_llama), "float32")
    assert info.disable_radix_cache
    assert info.return_aux_hidden_state_layer_ids == (1, 3, 5)
    assert "launch" not in info.model_dump_json()
    assert llama_server.client.model_info().architectures == ("LlamaForCausalLM",)
    assert decode_graphs_off(info)


def test_a_capture_from_it_would_be_complete_for_its_own_ids_only(llama_server: SglangServer) -> None:
    info = llama_server.client.server_info()
    ids = capture_ids("LlamaForCausalLM")
    assert capture_problems(info, ids) == []
    others = ids.model_copy(update={"ids": (2, 4, 6)})
    assert len(capture_problems(info, others)) == 1


def test_a_prompt_longer_than_the_context_is_refused_by_name(llama_server: SglangServer) -> None:
    too_long = requests("fits", [[5, 6]]) + requests("long", [[5] * 5000])
    with pytest.raises(SglangError, match=r"request long-000: .*5000"):
        llama_server.client.generate_many(too_long, streams=2)


def test_the_longest_request_that_we_send_is_answered_whole_and_one_token_more_is_cut(
    llama_server: SglangServer,
) -> None:
    """What `check_lengths` computes from the server's own word; SGLang cuts without an error."""
    client, info = llama_server.client, llama_server.client.server_info()
    assert info.max_req_input_len == 2042  # the context of 2048, less 6
    prompt = [5] * 2030
    check_lengths(info, [TokenizedPrompt("fits", tuple(prompt))], 16)
    assert len(client.generate(prompt, rid="fits", max_new_tokens=16, ignore_eos=True).output_ids) == 16
    with pytest.raises(PromptError, match="prompt long has 2030 tokens and its answer up to 17"):
        check_lengths(info, [TokenizedPrompt("long", tuple(prompt))], 17)
    assert len(client.generate(prompt, rid="long", max_new_tokens=17, ignore_eos=True).output_ids) == 16
    with pytest.raises(SglangError, match="2042 tokens"):
        client.generate([5] * 2042, rid="much", max_new_tokens=1)
    assert len(client.generate([5] * 2041, rid="most", max_new_tokens=1).output_ids) == 1


def test_the_weights_that_answer_are_known_by_their_folder(
    llama_server: SglangServer, tiny_llama: Path, tiny_deepseek: Path
) -> None:
    client = llama_server.client
    info, model = client.server_info(), client.model_info()
    assert info.dtype == "float32"  # asked for as "auto"
    check_weights(info, model, Target.open(tiny_llama))
    with pytest.raises(CaptureRefused, match="nobody compared them"):
        check_weights(info, model, Target.open(tiny_deepseek))


def test_an_aborted_request_is_an_error_that_names_it(llama_server: SglangServer) -> None:
    client = llama_server.client
    over = threading.Event()

    def abort() -> None:
        while not over.wait(0.5):
            client.abort("abort-1")

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        with pytest.raises(SglangError, match=r"abort-1.*abort"):
            client.generate([5, 6, 7], rid="abort-1", max_new_tokens=1900, ignore_eos=True)
    finally:
        over.set()
        aborting.join()
    assert len(client.generate([5, 6, 7], rid="after-1", max_new_tokens=4, ignore_eos=True).output_ids) == 4


def test_one_failure_ends_the_requests_that_are_running(llama_server: SglangServer) -> None:
    slow = requests("slow", [[5, 6, 7]] * 3, new_tokens=800)
    started = time.monotonic()
    with pytest.raises(SglangError, match="fail-000"):
        llama_server.client.generate_many([*slow, *requests("fail", [[5] * 5000])], streams=4)
    ended = time.monotonic() - started
    started = time.monotonic()
    llama_server.client.answer(slow[0].model_copy(update={"rid": "whole-1"}))
    assert ended < time.monotonic() - started  # sooner than one of the three would have been ready


def test_an_answer_that_takes_too_long_is_an_error_that_names_it(llama_server: SglangServer) -> None:
    client = llama_server.client
    with pytest.raises(SglangError, match=r"request late-1: no answer .* within 0.2 s"):
        client.generate([5, 6, 7], rid="late-1", max_new_tokens=1900, ignore_eos=True, timeout=0.2)
    client.abort("late-1")


def test_the_cache_can_be_flushed(llama_server: SglangServer) -> None:
    deadline = time.monotonic() + 30
    while True:  # what the tests before left may still be running, and then SGLang refuses
        try:
            return llama_server.client.flush_cache()
        except SglangError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


# --- starting, attaching, ending ------------------------------------------------------------------------------------


def test_an_attached_server_is_left_running(llama_server: SglangServer, sglang_settings: Settings) -> None:
    with attach(llama_server.url, settings=sglang_settings) as attached:
        assert attached.pid is None
        assert attached.client.server_info() == llama_server.client.server_info()
    assert llama_server.is_running()
    assert llama_server.client.is_healthy()


def test_attaching_to_nothing_is_an_error(sglang_settings: Settings) -> None:
    with pytest.raises(SglangError, match="cannot be reached"):
        attach("http://127.0.0.1:9", settings=sglang_settings)


def test_a_server_with_a_key_keeps_it_and_leaves_no_process(
    tiny_llama: Path, sglang_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = sglang_settings.model_copy(update={"sglang_api_key": SecretStr(KEY)})
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the key's file would stay behind
    monkeypatch.setenv("EAGLE3_S3_SECRET_KEY", "not for the server")
    monkeypatch.setattr("tempfile.tempdir", None)
    waits: list[tuple[float, str]] = []
    log = tmp_path / "logs" / "server.log"
    config = ServerConfig(target=tiny_llama, device="cpu", max_total_tokens=2048)
    with start_server(
        config, settings=keyed, log_path=log, on_wait=lambda seconds, line: waits.append((seconds, line))
    ) as server:
        assert server.client.generate([5, 6], rid="r-1", max_new_tokens=2).completion_tokens >= 1
        for wrong in (None, SecretStr("another-0123456789")):
            with pytest.raises(SglangError, match="401"):
                attach(server.url, settings=sglang_settings.model_copy(update={"sglang_api_key": wrong}))
        processes = processes_of(server)
        assert len(processes) >= 4  # guard, server, scheduler, detokenizer
        seen = [f"{process.cmdline()} {process.environ()}" for process in processes]
        assert not any(KEY in text or "not for the server" in text for text in seen)
        assert server.client.server_info().disable_radix_cache is False
    wait_until_gone(processes, seconds=1)  # they are gone already when the context is left
    assert not list(tmp_path.glob("eagle3-sglang-*"))
    text = log.read_text()
    assert KEY not in text
    assert "'api_key': '********'" in text
    assert log.stat().st_mode & 0o077 == 0
    assert waits == sorted(waits)
    assert any(line for _, line in waits)


def test_a_server_does_not_survive_a_starter_that_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    starter = """
import sys, time
from pathlib import Path
from infra.settings import Settings
from infra.sglang.launch import ServerConfig
from infra.sglang.server import start_server
target, log = map(Path, sys.argv[1:])
config = ServerConfig(target=target, device="cpu", max_total_tokens=2048)
server = start_server(config, settings=Settings(sglang_start_timeout=240), log_path=log)
print(server.pid, flush=True)
time.sleep(300)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", starter, str(tiny_llama), str(tmp_path / "server.log")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout
    try:
        guard = psutil.Process(int(process.stdout.readline()))
        processes = [guard, *guard.children(recursive=True)]
        assert len(processes) >= 4
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    wait_until_gone(processes)


def no_weights(folder: Path) -> ServerConfig:
    (folder / "model.safetensors").unlink()
    return ServerConfig(target=folder, device="cpu")


def unknown_flag(folder: Path) -> ServerConfig:
    return ServerConfig(target=folder, device="cpu", extra_args=("--no-such-flag",))


@pytest.mark.parametrize(
    ("spoil", "last_words"),
    [
        (no_weights, "Cannot find any model weights"),
        (unknown_flag, "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_server_that_dies_at_start_shows_its_last_words(
    spoil: Callable[[Path], ServerConfig],
    last_words: str,
    tiny_llama: Path,
    sglang_settings: Settings,
    tmp_path: Path,
) -> None:
    config = spoil(copy_target(tiny_llama, tmp_path / "target"))
    before = children_now()
    with pytest.raises(ServerStartError, match=f"(?s)ended with exit code .*{last_words}"):
        start_server(config, settings=sglang_settings, log_path=tmp_path / "server.log")
    assert children_now() <= before


def test_a_server_that_does_not_answer_in_time_is_ended(
    tiny_llama: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    hurried = sglang_settings.model_copy(update={"sglang_start_timeout": 1.0})
    before = children_now()
    with pytest.raises(ServerStartError, match=r"did not answer within 1 s .*\n"):
        start_server(ServerConfig(target=tiny_llama, device="cpu"), settings=hurried, log_path=tmp_path / "server.log")
    assert children_now() <= before


def test_an_exception_while_waiting_ends_the_server(
    tiny_llama: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    def interrupt(seconds: float, line: str) -> None:
        raise KeyboardInterrupt

    before = children_now()
    with pytest.raises(KeyboardInterrupt):
        start_server(
            ServerConfig(target=tiny_llama, device="cpu"),
            settings=sglang_settings,
            log_path=tmp_path / "server.log",
            on_wait=interrupt,
        )
    assert children_now() <= before


def test_what_cannot_be_started_is_refused_before_anything_is(
    tiny_llama: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"

    def refused(reason: str, port: int | None = None, **config: object) -> None:
        whole = ServerConfig.model_validate({"target": tiny_llama, "device": "cpu"} | config)
        with pytest.raises(LaunchError, match=reason):
            start_server(whole, settings=sglang_settings, log_path=log, port=port)

    refused("the target .*nowhere is not a folder", target=tmp_path / "nowhere")
    refused("has no config.json", target=tmp_path)
    refused("the drafter .* is not a folder", draft=DraftServing(path=tmp_path / "nowhere"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused("is in use", port=taken.getsockname()[1])
    assert not log.exists()
