"""The tap where a model runs in several processes: one of them writes a request, once, and its rows are whole.

Two processes with a core each: `--tp-size 2` splits every layer, `--dp-size 2` runs two replicas behind one address.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.writer import PackedShard, assemble
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import events, read_live
from infra.store_folder import FolderStore
from tasks.capture_run import Bounds, CaptureRun
from tasks.capture_session import Session, check_server
from tasks.params import AnswerParams, ExtractParams, ServingParams
from tasks.resume import begin
from tests.integration.conftest import POINTS, capture_ids
from tests.integration.tap_support import (
    LAYERS_CAPTURED,
    TOLERANCE,
    Reference,
    assert_states,
    body,
    load_reference,
    post,
    prompt,
    published,
    staged,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CHUNK = 64


@pytest.fixture(scope="module")
def hidden_states(tiny_llama: Path) -> Reference:
    return load_reference(tiny_llama)


@pytest.fixture(scope="module")
def patient(sglang_settings: Settings) -> Settings:
    """Two more processes import SGLang: on busy cores that takes minutes."""
    return sglang_settings.model_copy(update={"sglang_start_timeout": 900})


def serve(target: Path, staging: Path, settings: Settings, log: Path, **parallel: Any) -> SglangServer:
    config = ServerConfig(
        target=target,
        device="cpu",
        capture=CaptureServing(ids=capture_ids("LlamaForCausalLM"), staging=staging),
        max_running_requests=8,
        max_total_tokens=4096,
        chunked_prefill_size=CHUNK,
        **parallel,
    )
    return start_server(config, settings=settings, log_path=log)


def check_every_request_is_written_once(server: SglangServer, staging: Path, hidden_states: Reference) -> Counter[int]:
    """Twelve requests at once, of unlike lengths, some in chunks: how many each process wrote, by its id."""
    requests = [body(f"par-{i:02d}", prompt(7 + 23 * i, seed=9), 2 + 3 * i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda request: post(server, request), requests))
    assert published(staging) == {request["rid"] for request in requests}
    for request, answer in zip(requests, answers, strict=True):
        assert_states(staged(staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)
    told = list(events(staging))
    assert Counter((event["event"], event["rid"]) for event in told) == Counter(
        ("published", request["rid"]) for request in requests
    )
    return Counter(event["pid"] for event in told)


def ranks_of(staging: Path) -> list[tuple[int, int]]:
    """(tensor-parallel rank, data-parallel rank) of every process that keeps rows, as it says itself."""
    records = [json.loads(path.read_text()) for path in staging.glob("live.*.json")]
    return sorted((record["tp_rank"], record["dp_rank"] or 0) for record in records)


def test_of_two_tensor_parallel_ranks_one_writes_and_its_rows_are_whole(
    tiny_llama: Path, hidden_states: Reference, patient: Settings, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    with serve(tiny_llama, staging, patient, tmp_path / "log", tensor_parallel=2) as server:
        assert server.client.server_info().tp_size == 2
        wrote = check_every_request_is_written_once(server, staging, hidden_states)
    assert len(wrote) == 1
    assert ranks_of(staging) == [(0, 0)]


@pytest.fixture(scope="module")
def replicas_staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas-staging")


@pytest.fixture(scope="module")
def replicas(
    tiny_llama: Path, replicas_staging: Path, patient: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    log = tmp_path_factory.mktemp("logs") / "replicas.log"
    with serve(tiny_llama, replicas_staging, patient, log, data_parallel=2) as server:
        yield server


def test_each_of_two_replicas_writes_its_own_requests_whole(
    replicas: SglangServer, replicas_staging: Path, hidden_states: Reference
) -> None:
    assert replicas.client.server_info().dp_size == 2
    wrote = check_every_request_is_written_once(replicas, replicas_staging, hidden_states)
    assert len(wrote) == 2
    assert sum(wrote.values()) == 12
    assert len(ranks_of(replicas_staging)) == 2
    assert read_live(replicas_staging).layers_to_capture == (2, 4, 6)


class Quiet:
    """Nobody looks at the progress."""

    def begin(self, note: str, total: float | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def at(self, done: float) -> None: ...

    def advance(self) -> None: ...


def test_an_extraction_from_two_replicas_has_every_sample_whole(
    replicas: SglangServer, replicas_staging: Path, tiny_llama: Path, hidden_states: Reference, tmp_path: Path
) -> None:
    spec, most = CaptureSpec(aux=POINTS), 24
    prompts = [TokenizedPrompt(f"p{n:02d}", tuple(prompt(9 + 13 * n, seed=4))) for n in range(14)]
    params = ExtractParams(
        name="replicas",
        capture=spec,
        answers=AnswerParams(max_new_tokens=most),
        serving=ServingParams(streams=8),
    )
    settings = Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())
    extraction = begin(params, {"asked": "once"}, settings, lambda _: None)
    target, ids = Target.open(tiny_llama), capture_ids("LlamaForCausalLM")
    session = Session(params, target, ids, replicas_staging, replicas.client, name=extraction.tag)
    source = check_server(replicas.client.server_info(), ids, "auto")
    assert source == "while_answering"
    assert session.check_live_model(prompts[0]).layers_to_capture == (2, 4, 6)
    assert session.probe(prompts)
    bounds = Bounds.of(2**30, shard_bytes=2**20, prompts=prompts, most=most, row_bytes=4 * 64 * 4 + 9)
    done = CaptureRun(session, extraction, prompts, source, tmp_path, Quiet(), bounds).run()  # type: ignore[arg-type]

    wrote = Counter(event["pid"] for event in events(replicas_staging) if "cap-" in event["rid"])
    assert len(wrote) == 2
    assert sum(wrote.values()) == len(prompts)
    assert not any("cap-" in rid for rid in published(replicas_staging)), "what is stored is not staged any more"
    files = assemble(tmp_path, [PackedShard(shard.shard, shard.records) for shard in done], dtype="float32")
    assert files.num_samples == len(prompts)
    store = extraction.store
    assert isinstance(store, FolderStore)
    for shard in done:
        tensors = load_file(Path(store.uri.removeprefix("file://")) / shard.shard.name)
        for record in shard.records:
            rows = slice(record.start, record.start + record.rows)
            read = tensors["input_ids"][rows].tolist()
            assert read[: record.prompt_tokens] == list(next(p for p in prompts if p.id == record.id).input_ids)
            expected = hidden_states(read)
            for layer in LAYERS_CAPTURED:
                point = CapturePoint(f"layers.{layer}")
                torch.testing.assert_close(tensors[point][rows], expected[layer + 1], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(tensors[spec.final][rows], expected[-1], rtol=0, atol=TOLERANCE)
