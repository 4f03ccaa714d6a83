"""What the tests of the tap share: requests in SGLang's own words, and the states that transformers computes."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from infra.sglang.server import SglangServer
from infra.sglang.staging import StagedRows, events, read_staged, staged_path
from tests.targets import CONTEXT, HIDDEN, VOCAB

LAYERS_CAPTURED = (1, 3, 5)
# Absolute. Float32 states of the tiny targets reach 17; the largest difference seen was 4e-5.
TOLERANCE = 1e-4

Reference = Callable[[Sequence[int]], tuple[Tensor, ...]]


def load_reference(target: Path) -> Reference:
    """Token ids -> transformers' `hidden_states`: N+1 tensors [tokens, H], the last one after the final norm."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def hidden_states(ids: Sequence[int]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        return tuple(state[0] for state in states)

    return hidden_states


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids without the special ones."""
    assert length < CONTEXT
    numbers = random.Random(f"{seed}-{length}")
    return [numbers.randrange(3, VOCAB) for _ in range(length)]


def body(rid: str, ids: list[int], max_new_tokens: int, *, tap: Any = True, **more: Any) -> dict[str, Any]:
    """A greedy /generate request that does not end before `max_new_tokens`; `tap` None leaves custom_params out."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if tap is not None:
        sampling["custom_params"] = {"tap": tap}
    sampling |= more.pop("sampling", {})
    return {"rid": rid, "input_ids": ids, "sampling_params": sampling, **more}


def post(server: SglangServer, request: dict[str, Any], path: str = "/generate") -> Any:
    answer = httpx.post(f"{server.url}{path}", json=request, timeout=120, trust_env=False)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def staged(staging: Path, rid: str) -> StagedRows:
    return read_staged(staged_path(staging, rid), num_slots=len(LAYERS_CAPTURED), hidden_size=HIDDEN)


def assert_states(rows: StagedRows, ids: list[int], output: list[int], hidden_states: Reference) -> None:
    """The staged rows are those of prompt and answer, and every row is what transformers computes."""
    assert rows.token_ids == ids + output
    assert (rows.prompt_tokens, rows.output_tokens) == (len(ids), len(output))
    assert len(rows.final) == len(ids) + len(output) - 1
    expected = hidden_states(rows.token_ids[:-1])
    for layer, aux in zip(LAYERS_CAPTURED, rows.aux, strict=True):
        torch.testing.assert_close(aux, expected[layer + 1], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(rows.final, expected[-1], rtol=0, atol=TOLERANCE)


@contextmanager
def streaming(server: SglangServer, request: dict[str, Any]) -> Iterator[None]:
    """A request that has given its first token; leaving the block closes the connection."""
    with httpx.stream(
        "POST", f"{server.url}/generate", json=request | {"stream": True}, timeout=120, trust_env=False
    ) as response:
        response.raise_for_status()
        chunks = response.iter_raw()
        next(chunks)
        yield
        chunks.close()


def load(server: SglangServer, name: str) -> int:
    """What the scheduler counts: `num_running_reqs` or `num_waiting_reqs`."""
    loads = httpx.get(f"{server.url}/v1/loads", timeout=60, trust_env=False).json()["loads"]
    return sum(rank[name] for rank in loads)


def wait_for(condition: Callable[[], bool], *, patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_survivors(server: SglangServer, staging: Path, hidden_states: Reference) -> None:
    """Four requests decode in one batch, one is aborted, one client goes away: the others' rows stay right.

    So do those of a request that takes the freed places while the others are still running.
    """
    staying = [body(f"stays-{i}", prompt(40 + 30 * i, seed=3), 400) for i in range(2)]
    aborted, left = body("aborted-1", prompt(35, seed=3), 800), body("left-1", prompt(90, seed=3), 800)
    late = body("comes-late", prompt(70, seed=3), 20)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, server, request) for request in staying]
        wait_for(lambda: load(server, "num_running_reqs") == 2)
        with streaming(server, aborted):
            with streaming(server, left):
                wait_for(lambda: load(server, "num_running_reqs") == 4)
            post(server, {"rid": aborted["rid"]}, "/abort_request")
            events = [last_event(staging, request["rid"])["event"] for request in (aborted, left)]
        late_answer = post(server, late)
        assert not any(future.done() for future in running), "the neighbours ended before the abort"
        answers = [future.result() for future in running]
    assert events == ["aborted", "aborted"]
    assert not {aborted["rid"], left["rid"]} & published(staging)
    for request, answer in zip([*staying, late], [*answers, late_answer], strict=True):
        assert_states(staged(staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)


def check_retraction(server: SglangServer, staging: Path, hidden_states: Reference, count: int) -> None:
    """`count` requests that do not fit the cache together: some are retracted and computed again."""
    # With ignore_eos SGLang counts on the longest answer and admits no more than fit.
    sampling = {"ignore_eos": False}
    requests = [body(f"retracted-{i}", prompt(200 + i, seed=1), 200, sampling=sampling) for i in range(count)]
    together = requests[0] | {name: [request[name] for request in requests] for name in ("rid", "input_ids")}
    answers = post(server, together)  # one HTTP request: all of them are admitted before the cache is full
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    for request, answer in zip(requests, answers, strict=True):
        assert_states(staged(staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)


def events_of(staging: Path, rid: str) -> list[dict[str, Any]]:
    return [event for event in events(staging) if event["rid"] == rid]


def last_event(staging: Path, rid: str, *, patience: float = 30.0) -> dict[str, Any]:
    """The tap's last word on a request; waited for, because an abort is answered before it is done."""
    deadline = time.monotonic() + patience
    while not (found := events_of(staging, rid)):
        assert time.monotonic() < deadline, f"no event for {rid}"
        time.sleep(0.05)
    return found[-1]


def published(staging: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in staging.glob("*.safetensors")}
