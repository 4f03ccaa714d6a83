"""The client against servers that answer what SGLang would not, and what it makes of a server's own words."""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eagle3.acceptance.definitions import AcceptanceError, RequestCounts
from eagle3.conventions import EngineIds
from infra.sglang import client as client_module
from infra.sglang.client import (
    GenerateRequest,
    ServerInfo,
    SglangClient,
    SglangError,
    capture_problems,
    decode_graphs_off,
)

pytestmark = pytest.mark.unit

IDS = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(1, 3, 5))
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "models/target",
    "disable_radix_cache": True,
    "enable_return_aux_hidden_states": True,
    "aux_hidden_state_capture": "eagle3",
    "return_aux_hidden_state_layer_ids": [1, 3, 5],
    "return_hidden_states_mode": "full",
    "pp_size": 1,
    "cuda_graph_backend_decode": None,
    "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "full"}},
    "launch_command": "--api-key sesame",
    "api_key": "sesame",
}


class Answers(BaseHTTPRequestHandler):
    """Answers every request with what the test left in `server.answer`, after `server.delay` seconds."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def answer(self) -> None:
        time.sleep(getattr(self.server, "delay", 0.0))
        status, body, headers = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def odd_server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: ThreadingHTTPServer, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    server.answer = (status, body, headers or {})  # type: ignore[attr-defined]
    with SglangClient(f"http://127.0.0.1:{server.server_port}") as client:
        return client.generate([5, 6], rid="r-01", max_new_tokens=2)


def answer(**meta: object) -> bytes:
    whole = {"id": "r-01", "finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": 2}
    whole |= {"e2e_latency": 0.1}
    return json.dumps({"text": "ab", "output_ids": [7, 8], "meta_info": whole | meta}).encode()


def test_counts_of_speculative_decoding_are_read_per_request(odd_server: ThreadingHTTPServer) -> None:
    assert ask(odd_server, answer()).counts == RequestCounts(verifications=0, correct=0, proposed=0)
    counted = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12}
    counts = ask(odd_server, answer(**counted, spec_correct_drafts_histogram=[1, 1, 2])).counts
    assert counts == RequestCounts(verifications=4, correct=5, proposed=12, histogram=(1, 1, 2))
    with pytest.raises(AcceptanceError, match=r"request r-01: .* contradict each other: the histogram"):
        ask(odd_server, answer(**counted, spec_correct_drafts_histogram=[4]))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "lacks"),
        (b'{"text": "", "output_ids": []}', "lacks 'meta_info'"),
        (answer(finish_reason={"type": "abort", "message": "Aborted by the user"}), "'abort'.*Aborted by the user"),
        (answer(id="r-02"), "answered for rid 'r-02'"),
        (answer(prompt_tokens="many"), "prompt_tokens"),
    ],
)
def test_an_answer_that_is_none_names_the_request(odd_server: ThreadingHTTPServer, body: bytes, reason: str) -> None:
    with pytest.raises(SglangError, match=f"(?s)request r-01.*{reason}"):
        ask(odd_server, body)


def test_a_refusal_is_told_in_the_servers_words(odd_server: ThreadingHTTPServer) -> None:
    body = b'{"error": {"message": "The input is too long"}}'
    with pytest.raises(SglangError, match=r"request r-01: .* answered 400: The input is too long"):
        ask(odd_server, body, status=400)


def test_a_redirect_is_not_followed(odd_server: ThreadingHTTPServer) -> None:
    with pytest.raises(SglangError, match="answered 307"):
        ask(odd_server, b"", status=307, headers={"Location": "http://127.0.0.1:9/"})


def test_an_answer_without_end_is_cut_off(odd_server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_RESPONSE_BYTES", 1000)
    with pytest.raises(SglangError, match="longer than 1000 bytes"):
        ask(odd_server, b" " * 5000)


def test_an_address_that_is_none_or_holds_a_password_is_refused() -> None:
    for url in ("127.0.0.1:30000", "file:///etc/passwd", "http://user:sesame@host"):
        with pytest.raises(SglangError, match="EAGLE3_SGLANG_API_KEY") as refused:
            SglangClient(url)
        assert "sesame" not in str(refused.value)


def test_a_server_that_is_not_there_is_said_so() -> None:
    with SglangClient("http://127.0.0.1:9") as client, pytest.raises(SglangError, match="cannot be reached"):
        client.server_info()


@pytest.mark.parametrize(("max_new_tokens", "comes"), [(1, False), (2000, True)])
def test_a_long_answer_is_waited_for_longer(
    odd_server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, max_new_tokens: int, comes: bool
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT", 0.1)
    monkeypatch.setattr(client_module, "TOKEN_TIMEOUT", 0.01)
    odd_server.delay = 0.5  # type: ignore[attr-defined]
    odd_server.answer = (200, answer(), {})  # type: ignore[attr-defined]
    request = GenerateRequest(rid="r-01", input_ids=(5,), max_new_tokens=max_new_tokens)
    with SglangClient(f"http://127.0.0.1:{odd_server.server_port}") as client:
        if comes:
            assert len(client.generate_many([request], streams=1)) == 1
        else:
            with pytest.raises(SglangError, match=r"no answer from .* within 0\.11 s"):
                client.generate_many([request], streams=1)


def test_rids_of_one_run_are_unique_and_of_one_width() -> None:
    def request(rid: str) -> GenerateRequest:
        return GenerateRequest(rid=rid, input_ids=(5,), max_new_tokens=1)

    with SglangClient("http://127.0.0.1:9") as client:
        with pytest.raises(SglangError, match="aborts by prefix"):
            client.generate_many([request("r-1"), request("r-10")], streams=2)
        with pytest.raises(SglangError, match="same rid"):
            client.generate_many([request("r-1"), request("r-1")], streams=2)
        with pytest.raises(SglangError, match="abort every request"):
            client.abort("")


def test_server_info_keeps_no_secret() -> None:
    info = ServerInfo.model_validate(INFO)
    assert "sesame" not in info.model_dump_json()
    assert not {"launch_command", "api_key"} & set(ServerInfo.model_fields)


def test_a_server_with_all_settings_right_has_no_capture_problem() -> None:
    assert capture_problems(ServerInfo.model_validate(INFO), IDS) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"disable_radix_cache": False}, "--disable-radix-cache"),
        ({"pp_size": 2}, "Pipeline parallel size is 2"),
        ({"enable_layernorm_sp": True}, "scattered over ranks"),
        ({"attn_cp_size": 2}, "scattered over ranks"),
        ({"enable_return_aux_hidden_states": False}, "Capture is off"),
        ({"aux_hidden_state_capture": "dflash"}, "expected 'eagle3'"),
        (
            {"return_aux_hidden_state_layer_ids": [2, 4, 6]},
            r"captures layer ids \[2, 4, 6\], the dump needs \[1, 3, 5\]",
        ),
        ({"return_aux_hidden_state_layer_ids": None}, "the model's default"),
        ({"return_hidden_states_mode": "last"}, "'last'"),
        ({"version": "0.5.12"}, "made for 0.5.23"),
        ({"speculative_algorithm": "EAGLE3"}, "without a drafter"),
    ],
)
def test_each_setting_that_spoils_a_capture_is_named(changed: dict[str, Any], sentence: str) -> None:
    problems = capture_problems(ServerInfo.model_validate(INFO | changed), IDS)
    assert len(problems) == 1
    assert re.search(sentence, problems[0])


def test_decode_graphs_count_as_off_whichever_flag_switched_them_off() -> None:
    assert decode_graphs_off(ServerInfo.model_validate(INFO))
    assert ServerInfo.model_validate(INFO).cuda_graph_backend_prefill == "full"
    on = INFO | {"cuda_graph_config": {"decode": {"backend": "full"}}}
    assert not decode_graphs_off(ServerInfo.model_validate(on))
    unknown = {key: value for key, value in INFO.items() if key != "cuda_graph_config"}
    assert not decode_graphs_off(ServerInfo.model_validate(unknown))
