"""An extraction in partitions on the real stack: equal to one worker's, a lost part rerun alone, cancelled as one.

All parts attach to one server of a tiny target; the pool lets one run at a time in, so they take turns.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.conventions import ids_of
from eagle3.dump.probe import read_dump_probe
from eagle3.dump.reader import DumpReader
from eagle3.refs import DumpRef
from infra.lineage import Lineage
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from infra.stack import connect
from infra.store import Store, open_store
from tasks.artifacts import fetch_dump
from tasks.journal import Claim, Journal, ShardDone
from tests.e2e.stack import PROJECT, Command, tiny_pipeline, write_prompts
from tests.e2e.test_extraction import RUN_FLOW, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_PROMPTS, NUM_HELDOUT = 84, 4
TOLERANCE = 1e-4  # of a repeated capture in float32
WAIT_S = 400.0

# What a user's client does: a deployed run, and what Prefect knows of all runs of one name.
CLIENT = """
import json, sys
from infra.settings import Settings
from infra.stack import connect
connect(Settings())
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters as f
from prefect.deployments import run_deployment
from prefect.states import Cancelling
verb, *rest = sys.argv[1:]
if verb == "submit":
    run = run_deployment(rest[0], parameters={"params": json.loads(rest[1])}, timeout=0, as_subflow=False)
    print(json.dumps(str(run.id)))
with get_client(sync_client=True) as client:
    if verb == "runs":
        names = f.FlowRunFilter(name=f.FlowRunFilterName(any_=rest))
        runs = client.read_flow_runs(flow_run_filter=names)
        print(json.dumps([[run.name, run.state.type.value, run.state.message or ""] for run in runs]))
    if verb == "cancel":
        client.set_flow_run_state(rest[0], Cancelling())
"""


@dataclass(frozen=True)
class Bench:
    command: Command
    settings: Settings
    params: dict[str, Any]

    def start(self, name: str, partitions: int) -> subprocess.Popen[str]:
        """The extract flow in a process of its own; its partitions run on the pool's worker."""
        params = self.params | {"name": name, "partitions": partitions}
        return subprocess.Popen(
            [sys.executable, "-c", RUN_FLOW, "extract", "extract", json.dumps(params)],
            cwd=PROJECT,
            env=self.command.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, name: str, partitions: int) -> tuple[DumpReader, Any]:
        with self.start(name, partitions) as process:
            shown, _ = process.communicate(timeout=900)
        result = result_of(subprocess.CompletedProcess(process.args, process.returncode, shown, ""))
        return DumpReader.open(fetch_dump(DumpRef(**result["dump"]), self.settings)), result

    def client(self, *args: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, *args],
            cwd=PROJECT,
            env=self.command.environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None

    def states(self, name: str) -> list[tuple[str, str]]:
        return sorted((run, state) for run, state, _ in self.client("runs", f"{name}-p000", f"{name}-p001"))

    def place(self, name: str) -> Store | None:
        root = open_store(self.settings.store, self.settings)
        for key, _ in root.list(f"dumps/{name}/unfinished/"):
            return open_store(json.loads(root.get_bytes(key, max_bytes=4096))["uri"], self.settings)
        return None

    def journal(self, name: str, number: int) -> Journal | None:
        store = self.place(name)
        return Journal(store, number) if store else None

    def stored(self, name: str, number: int) -> list[ShardDone]:
        journal = self.journal(name, number)
        return journal.done()[0] if journal else []

    def owner(self, name: str, number: int) -> Claim | None:
        journal = self.journal(name, number)
        return journal.last_claim() if journal else None


@pytest.fixture(scope="module")
def bench(command: Command, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("partitions")
    whole = tiny_pipeline(tiny_llama, write_prompts(folder / "prompts.jsonl", NUM_PROMPTS))
    params = {key: whole[key] for key in ("target", "prompts", "capture", "answers", "serving")}
    params["prompts"] |= {"num_heldout": NUM_HELDOUT}
    params["answers"] |= {"max_new_tokens": 48}
    points = tuple(CapturePoint(point) for point in params["capture"]["aux"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # connect() sets variables of this process
        settings = connect(Settings(home=command.home))
        ids = ids_of(points, engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", num_layers=8)
        staging = folder / "tap"
        serving = ServerConfig(target=tiny_llama, device="cpu", capture=CaptureServing(ids=ids, staging=staging))
        with start_server(serving, settings=settings, log_path=folder / "server.log") as server:
            params["serving"] |= {"attach": server.url, "attach_staging": str(staging), "streams": 2}
            yield Bench(command, settings, params | {"shard_mib": 1})


@pytest.fixture(scope="module")
def single(bench: Bench) -> DumpReader:
    return bench.run("single", 1)[0]


def test_two_partitions_give_the_dump_of_one_worker_and_one_record(bench: Bench, single: DumpReader) -> None:
    dump, result = bench.run("split", 2)
    assert_same_samples(dump, single)
    assert {shard.name[:10] for shard in dump.manifest.shards} == {"shard-p000", "shard-p001"}
    assert dump.manifest.spec_digest == single.manifest.spec_digest
    assert dump.manifest.prompts_sha256 == single.manifest.prompts_sha256
    assert read_dump_probe(dump.folder, dump.manifest) is not None
    assert bench.states("extract-split") == [("extract-split-p000", "COMPLETED"), ("extract-split-p001", "COMPLETED")]

    store = open_store(result["dump"]["uri"], bench.settings)
    assert {key for key, _ in store.list()} == {file.name for file in dump.manifest.files} | {"manifest.json"}
    assert bench.place("split") is None

    client = Lineage(bench.settings.mlflow_uri())._connection.client
    recorded = client.get_run(result["mlflow_run_id"])
    assert recorded.data.params["partitions.count"] == "2"
    lines = json.loads(recorded.data.params["partitions"])
    assert ["/flow-run/" in line for line in lines] == [True, True]
    assert len(client.search_runs([recorded.info.experiment_id], f"tags.`dump.uri` = '{result['dump']['uri']}'")) == 1


def test_a_partition_that_is_killed_is_named_and_rerun_alone(bench: Bench, single: DumpReader) -> None:
    name = "lost"
    with bench.start(name, 2) as parent:
        number = wait_for(lambda: next((n for n in (0, 1) if bench.stored(name, n)), None))  # they take turns
        claim = bench.owner(name, number)
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        shown, _ = parent.communicate(timeout=600)
    assert parent.returncode != 0
    lost, other = f"extract-{name}-p{number:03d}", f"extract-{name}-p{1 - number:03d}"
    assert f"partition {number} ({lost}, http" in shown
    assert "ended as Crashed" in shown
    assert "start the extraction again with the same parameters" in shown
    assert sorted(bench.states(f"extract-{name}")) == sorted([(lost, "CRASHED"), (other, "COMPLETED")])
    before = {shard.shard for n in (0, 1) for shard in bench.stored(name, n)}
    assert bench.stored(name, number)

    dump, _ = bench.run(name, 2)
    assert_same_samples(dump, single)
    assert before <= set(dump.manifest.shards)  # what was stored stays as it was
    expected = [(lost, "COMPLETED"), (lost, "CRASHED"), (other, "COMPLETED")]
    assert sorted(bench.states(f"extract-{name}")) == sorted(expected)  # the whole one was not started again


def test_cancelling_the_extraction_cancels_its_partitions(bench: Bench) -> None:
    name = "cancelled"
    params = json.dumps(bench.params | {"name": name, "partitions": 2})
    run = bench.client("submit", "extract/cpu", params)
    wait_for(lambda: bench.owner(name, 0) or bench.owner(name, 1))
    bench.client("cancel", run)
    # One that was nearly done may have ended before it heard of it; the one that waited for its turn cannot.
    wait_for(lambda: {state for _, state in bench.states(f"extract-{name}")} <= {"CANCELLED", "COMPLETED"})
    assert "CANCELLED" in {state for _, state in bench.states(f"extract-{name}")}
    store = bench.place(name)
    assert store is None or not store.exists("manifest.json")


def test_a_split_extraction_in_the_pool_of_its_partitions_is_refused(bench: Bench) -> None:
    name = "wrong-pool"
    bench.client("submit", "extract/blackwell", json.dumps(bench.params | {"name": name, "partitions": 2}))

    def end() -> Any:
        return next(
            (message for _, state, message in bench.client("runs", f"extract-{name}") if state == "FAILED"), None
        )

    assert "run the deployment extract/cpu, or set partitions to 1" in wait_for(end)
    assert bench.states(f"extract-{name}") == []
    assert bench.place(name) is None


def assert_same_samples(dump: DumpReader, single: DumpReader) -> None:
    by_id = {sample.id: sample for sample in single}
    assert sorted(sample.id for sample in dump) == sorted(by_id)
    assert len(dump) == NUM_PROMPTS - NUM_HELDOUT
    for sample in dump:
        other = by_id[sample.id]
        assert torch.equal(sample.full_ids(), other.full_ids())
        assert torch.equal(sample.loss_mask, other.loss_mask)
        for point, state in sample.states.items():
            torch.testing.assert_close(state, other.states[point], rtol=TOLERANCE, atol=TOLERANCE)


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while (found := what()) is None or found is False:
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found
