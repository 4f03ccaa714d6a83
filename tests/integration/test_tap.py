"""The tap on a real server: the tiny Llama, prefill in chunks of 64 tokens, a cache that runs full."""

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.capture import all_points
from eagle3.conventions import points_of
from eagle3.conventions.sglang import live_points
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import read_live, read_staged, staged_path, why_missing
from tests.dumps import states_of
from tests.integration.conftest import POINTS, capture_ids
from tests.integration.tap_support import (
    TOLERANCE,
    Reference,
    assert_states,
    body,
    check_retraction,
    check_survivors,
    events_of,
    last_event,
    load,
    load_reference,
    post,
    prompt,
    published,
    staged,
    streaming,
    wait_for,
)
from tests.targets import HIDDEN, LAYERS

pytestmark = pytest.mark.integration

MAX_RUNNING = 8
CHUNK = 64
CACHE = 2600  # tokens


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tap") / "staging"


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, staging: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    config = ServerConfig(
        target=tiny_llama,
        device="cpu",
        capture=CaptureServing(ids=capture_ids("LlamaForCausalLM"), staging=staging),
        max_running_requests=MAX_RUNNING,
        max_total_tokens=CACHE,
        chunked_prefill_size=CHUNK,
        # Admit requests as if their answers were short: the cache runs full and requests are retracted.
        extra_args=("--schedule-conservativeness", "0.1"),
    )
    log = tmp_path_factory.mktemp("logs") / "tap.log"
    with start_server(config, settings=sglang_settings, log_path=log) as running:
        yield running


@pytest.fixture(scope="module")
def hidden_states(tiny_llama: Path) -> Reference:
    return load_reference(tiny_llama)


@pytest.fixture(autouse=True)
def _nothing_half_written(server: SglangServer, staging: Path) -> Iterator[None]:
    yield
    assert server.is_running()
    assert not list(staging.glob("*.tmp"))


def test_live_record_is_there_before_the_first_request_and_agrees_with_the_convention(
    server: SglangServer, staging: Path
) -> None:
    live = read_live(staging)
    ids = capture_ids("LlamaForCausalLM")
    assert ids.ids == (1, 3, 5)
    assert live.layers_to_capture == (2, 4, 6)
    assert live_points(live.layers_to_capture, live.num_layers) == points_of(ids, LAYERS) == POINTS
    assert (live.model_class, live.inner_class) == ("LlamaForCausalLM", "LlamaForCausalLM")
    assert (live.dtype, live.device, live.num_layers) == ("float32", "cpu", LAYERS)
    assert (live.decode_graphs, live.prefill_graphs) == (False, False)
    assert live.capture.layers_to_capture == (2, 4, 6)
    assert server.client.server_info().chunked_prefill_size == CHUNK


def test_rows_equal_transformers_for_prompts_and_answers_of_unlike_lengths_in_a_batch(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    sizes = ((5, 1), (17, 3), (40, 20), (64, 9), (65, 33), (130, 2), (200, 12), (700, 7))
    asking = [body(f"mixed-{i:02d}", prompt(length), answer) for i, (length, answer) in enumerate(sizes)]
    silent = [body(f"silent-{i}", prompt(50 + i), 10, tap=tap) for i, tap in enumerate((None, False, "true"))]
    seen = {}

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        answer = post(server, request)
        seen[request["rid"]] = staged_path(staging, request["rid"]).exists()
        return answer

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, asking + silent))
    for request, answer in zip(asking, answers[: len(asking)], strict=True):
        rid = request["rid"]
        assert seen[rid], f"{rid}: the answer came before the file"
        assert_states(staged(staging, rid), request["input_ids"], answer["output_ids"], hidden_states)
        assert [event["event"] for event in events_of(staging, rid)] == ["published"]
    for request in silent:
        assert not seen[request["rid"]]
        assert not events_of(staging, request["rid"])


def test_a_probe_in_chunks_keeps_every_row_of_every_boundary(
    server: SglangServer, staging: Path, tiny_llama: Path
) -> None:
    ids = prompt(2 * CHUNK + 20, seed=4)
    post(server, body("probe-chunks", ids, 1, tap="probe"))
    path = staged_path(staging, "probe-chunks")
    rows = read_staged(path, num_slots=len(POINTS), hidden_size=HIDDEN, num_layers=LAYERS)
    assert rows.boundaries is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    expected = states_of(model, torch.tensor(ids))
    for place, point in enumerate(all_points(LAYERS)):
        torch.testing.assert_close(rows.boundaries[:, place], expected[point], rtol=0, atol=TOLERANCE)


def test_retracted_requests_keep_every_row(server: SglangServer, staging: Path, hidden_states: Reference) -> None:
    check_retraction(server, staging, hidden_states, MAX_RUNNING)


def test_neighbours_of_requests_that_are_aborted_or_left_keep_every_row(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    check_survivors(server, staging, hidden_states)


def test_what_stands_behind_a_stop_token_is_cut_off(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    ids = prompt(12)
    free = post(server, body("free-run", ids, 30, tap=None))["output_ids"]
    stop = next(i for i in range(4, 30) if free[i] not in free[:i])
    sampling = {"stop_token_ids": [free[stop]], "ignore_eos": False}
    answer = post(server, body("stopped-1", ids, 30, sampling=sampling))
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    rows = staged(staging, "stopped-1")
    assert rows.finish_reason == "stop"
    assert rows.last_token_id == free[stop]
    assert_states(rows, ids, free[: stop + 1], hidden_states)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "hello world"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_openai_endpoints_can_ask_too(server: SglangServer, staging: Path, path: str, more: dict[str, Any]) -> None:
    rid = f"openai-{'chat' if 'chat' in path else 'text'}"
    request = {"model": "tiny", "rid": rid, "max_tokens": 5, "temperature": 0, "custom_params": {"tap": True}, **more}
    usage = post(server, request, path)["usage"]
    rows = staged(staging, rid)
    assert (rows.prompt_tokens, rows.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_aborted_while_running(server: SglangServer, staging: Path) -> None:
    with streaming(server, body("running-1", prompt(30), 1900)):
        post(server, {"rid": "running-1"}, "/abort_request")
        event = last_event(staging, "running-1")
    assert event["event"] == "aborted"
    assert event["rows"] >= 30
    assert "running-1" not in published(staging)
    assert "aborted" in why_missing(staging, "running-1")


def test_aborted_in_the_queue(server: SglangServer, staging: Path) -> None:
    holder, queued = body("holder-1", prompt(20), 1500, tap=None), body("queued-1", prompt(30), 1500)  # 2600 hold one
    with ThreadPoolExecutor(1) as pool, streaming(server, holder):
        waiting = pool.submit(post, server, queued)
        while load(server, "num_waiting_reqs") == 0:
            assert not waiting.done()
        post(server, {"rid": "queued-1"}, "/abort_request")
        assert waiting.result()["meta_info"]["finish_reason"]["type"] == "abort"
    event = last_event(staging, "queued-1")
    assert (event["event"], event["rows"]) == ("aborted", 0)
    assert "queued-1" not in published(staging)


def test_aborted_in_chunked_prefill_beside_a_request_that_keeps_every_row(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    length = 1900
    for attempt in range(8):  # an abort may come before the first chunk, or after the last
        rid, neighbour = f"chunked-{attempt}", body(f"beside-{attempt}", prompt(30, seed=attempt), 500)
        with ThreadPoolExecutor(2) as pool:
            staying = pool.submit(post, server, neighbour)
            wait_for(lambda: load(server, "num_running_reqs") == 1)
            aborted = pool.submit(post, server, body(rid, prompt(length), 1))
            time.sleep(0.1 + 0.1 * attempt)
            post(server, {"rid": rid}, "/abort_request")
            aborted.result()
            was_running = not staying.done()
            answer = staying.result()
        assert_states(staged(staging, neighbour["rid"]), neighbour["input_ids"], answer["output_ids"], hidden_states)
        event = last_event(staging, rid)
        if was_running and event["event"] == "aborted" and 0 < event["rows"] < length:
            assert event["rows"] % CHUNK == 0
            assert rid not in published(staging)
            return
    pytest.fail("no abort hit a request between two chunks of its prefill")


def test_client_that_goes_away(server: SglangServer, staging: Path) -> None:
    with streaming(server, body("gone-1", prompt(25), 1900)):
        pass
    assert last_event(staging, "gone-1")["event"] == "aborted"
    assert "gone-1" not in published(staging)


def test_an_abort_by_prefix_ends_each_request_with_its_own_word(server: SglangServer, staging: Path) -> None:
    with streaming(server, body("p-1", prompt(20), 900)), streaming(server, body("p-10", prompt(21), 900)):
        post(server, {"rid": "p-1"}, "/abort_request")
        assert [last_event(staging, rid)["event"] for rid in ("p-1", "p-10")] == ["aborted", "aborted"]


@pytest.mark.parametrize(
    "rid", ["../evil", "a/b", "/etc/evil", ".hidden", "..", "x" * 129, "a b", "ä", "new\nline", "n\0l"]
)
def test_a_rid_that_is_no_file_name_is_refused_and_answered(server: SglangServer, staging: Path, rid: str) -> None:
    before = {path.name for path in staging.parent.iterdir()}, published(staging)
    answer = post(server, body(rid, prompt(9), 3))
    assert len(answer["output_ids"]) == 3
    assert last_event(staging, rid)["event"] == "refused"
    assert "does not serve as a file name" in why_missing(staging, rid)
    assert ({path.name for path in staging.parent.iterdir()}, published(staging)) == before


def test_several_answers_for_one_request_are_refused(server: SglangServer, staging: Path) -> None:
    before = published(staging)
    answers = post(server, body("several-1", prompt(9), 4, sampling={"n": 2}))
    assert len(answers) == 2
    for answer in answers:
        assert last_event(staging, answer["meta_info"]["id"])["event"] == "refused"
    assert published(staging) == before


def test_the_file_of_an_earlier_request_does_not_outlive_the_next_with_its_rid(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    post(server, body("again-1", prompt(10), 4))
    assert staged(staging, "again-1").prompt_tokens == 10
    answer = post(server, body("again-1", prompt(14), 4))
    assert_states(staged(staging, "again-1"), prompt(14), answer["output_ids"], hidden_states)
    with streaming(server, body("again-1", prompt(15), 1900)):
        pass
    while events_of(staging, "again-1")[-1]["event"] != "aborted":
        time.sleep(0.05)
    assert "again-1" not in published(staging)


def test_no_answer_no_rows(server: SglangServer, staging: Path) -> None:
    post(server, body("empty-1", prompt(10), 0))
    assert last_event(staging, "empty-1")["event"] == "incomplete"
    assert "empty-1" not in published(staging)


def test_a_write_that_fails_leaves_nothing_and_the_server_goes_on(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    """A bound on the size of the scheduler's files, as good as a full disk: 1400 rows need 1.4 MB."""
    scheduler = int(next(staging.glob("live.*.json")).name.split(".")[1])
    _, hard = resource.prlimit(scheduler, resource.RLIMIT_FSIZE)
    resource.prlimit(scheduler, resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        answer = post(server, body("full-1", prompt(1400), 3))
    finally:
        resource.prlimit(scheduler, resource.RLIMIT_FSIZE, (hard, hard))
    assert len(answer["output_ids"]) == 3
    event = last_event(staging, "full-1")
    assert (event["event"], event["where"]) == ("error", "write")
    assert "full-1" not in published(staging)
    assert "full-1" in why_missing(staging, "full-1")
    answer = post(server, body("full-2", prompt(1400), 3))
    assert_states(staged(staging, "full-2"), prompt(1400), answer["output_ids"], hidden_states)


def test_what_cannot_be_removed_fails_its_own_request_only(
    server: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    (staging / "blocked-1.safetensors").mkdir()
    with ThreadPoolExecutor(2) as pool:
        blocked, free = pool.map(
            lambda request: post(server, request), [body("blocked-1", prompt(8), 9), body("unblocked", prompt(8), 9)]
        )
    (staging / "blocked-1.safetensors").rmdir()
    assert blocked["output_ids"] == free["output_ids"]
    assert last_event(staging, "blocked-1")["event"] == "error"
    assert_states(staged(staging, "unblocked"), prompt(8), free["output_ids"], hidden_states)
