"""`kill -9` of SGLang, of the flow process or of the worker, while it extracts: what is resumed equals the whole.

A few moments here; `make soak` takes twenty (EAGLE3_KILLS says how many). The moments come from a seed, and a test's
name says which: victim, and the share of the prompts that were captured when it was killed.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from eagle3.dump.reader import DumpReader
from eagle3.refs import DumpRef
from infra.processes import mark_of, marked
from infra.settings import Settings
from infra.stack import connect
from infra.store import Store, open_store
from tasks.artifacts import fetch_dump
from tasks.journal import FOLDER
from tests.e2e.stack import PROJECT, Command, tiny_pipeline, write_prompts
from tests.e2e.test_extraction import RUN_FLOW, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_PROMPTS, NUM_HELDOUT = 104, 4
CAPTURED = NUM_PROMPTS - NUM_HELDOUT
TOLERANCE = 1e-4  # of a repeated capture in float32: batches differ, and with them the last bits
WAIT_S = 900.0  # until it was killed; three minutes on a machine that does nothing else

START_DEPLOYED = """
import json, sys
from infra.settings import Settings
from infra.stack import connect
connect(Settings())
from prefect.deployments import run_deployment
print(run_deployment("extract/blackwell", parameters={"params": json.loads(sys.argv[1])}, timeout=0).id)
"""


def moments() -> list[tuple[str, float]]:
    """(victim, share of the prompts): each victim once, then at random."""
    chance = random.Random(4)
    first = [("flow", 0.55), ("sglang", 0.3), ("worker", 0.7)]
    more = [(chance.choice(("flow", "sglang", "worker")), round(chance.uniform(0.0, 1.0), 2)) for _ in range(997)]
    return [*first, *more][: int(os.environ.get("EAGLE3_KILLS", "3"))]


@dataclass(frozen=True)
class Bench:
    """What the tests of this module share."""

    command: Command
    settings: Settings
    params: dict[str, Any]

    def start(self, name: str) -> subprocess.Popen[str]:
        """The extract flow in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", RUN_FLOW, "extract", "extract", json.dumps(self.params | {"name": name})],
            cwd=PROJECT,
            env=self.command.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str) -> tuple[DumpRef, str]:
        """The extract flow to its end; the dump, and all that was printed."""
        with self.start(name) as process:
            shown, _ = process.communicate(timeout=1800)
        done = subprocess.CompletedProcess(process.args, process.returncode, shown, "")
        return DumpRef(**result_of(done)["dump"]), shown

    def place(self, name: str) -> Store | None:
        """Where the unfinished extraction of that name writes."""
        root = open_store(self.settings.store, self.settings)
        for key, _ in root.list(f"dumps/{name}/unfinished/"):
            return open_store(json.loads(root.get_bytes(key, max_bytes=4096))["uri"], self.settings)
        return None

    def verified(self, name: str) -> dict[str, str]:
        """sha256 of every shard that the journal has, by its name."""
        store = self.place(name)
        found = {}
        for key, _ in store.list(f"{FOLDER}/done/") if store else ():
            assert store is not None
            shard = json.loads(store.get_bytes(key, max_bytes=2**26))["shard"]
            found[shard["name"]] = shard["sha256"]
        return found

    def captured(self, name: str) -> int:
        """How many answers have come."""
        lines = 0
        for path in (self.command.home / "staging").glob(f"{name}-*/answers.jsonl"):
            with suppress(FileNotFoundError):
                lines += sum(1 for line in path.read_bytes().splitlines() if line)
        return lines

    def staged(self, name: str) -> int:
        """How many prompts' rows wait on this machine for their shard."""
        return sum(1 for _ in (self.command.home / "staging").glob(f"{name}-*/tap/cap-*.safetensors"))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def bench(
    command: Command,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch_module: pytest.MonkeyPatch,
) -> Bench:
    monkeypatch_module.setattr(os, "environ", os.environ.copy())  # connect() sets variables of this process
    prompts = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", NUM_PROMPTS)
    whole = tiny_pipeline(tiny_llama, prompts)
    params = {key: whole[key] for key in ("target", "prompts", "capture", "answers", "serving")}
    params["prompts"] |= {"num_heldout": NUM_HELDOUT}
    params["answers"] |= {"max_new_tokens": 48}
    params["serving"] |= {"streams": 4}
    return Bench(command, connect(Settings(home=command.home)), params | {"shard_mib": 1})


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench) -> DumpReader:
    reference, shown = bench.run("whole")
    assert "resumed" not in shown
    dump = DumpReader.open(fetch_dump(reference, bench.settings))
    assert len(dump) == CAPTURED
    assert len(dump.manifest.shards) > 3
    return dump


@pytest.mark.parametrize(("victim", "share"), moments(), ids=str)
def test_a_killed_extraction_goes_on_and_equals_the_whole(
    bench: Bench,
    uninterrupted: DumpReader,
    victim: str,
    share: float,
    record_property: Callable[[str, object], None],
) -> None:
    name = f"killed-{victim}-{int(share * 100):02d}"
    if victim == "worker":
        kill_worker(bench, name, share)
    else:
        kill_flow_or_server(bench, name, share, victim)
    verified = bench.verified(name)
    record_property("answers when it was killed", bench.captured(name))
    record_property("rows staged", bench.staged(name))
    record_property("shards verified", len(verified))
    reference, shown = bench.run(name)
    went_on = re.search(rf"(\d+) of {CAPTURED} prompts are done", shown)
    record_property("prompts done when it went on", int(went_on[1]) if went_on else 0)

    resumed = DumpReader.open(fetch_dump(reference, bench.settings))  # every byte against the manifest's digests
    manifest_entries = {shard.name: shard.sha256 for shard in resumed.manifest.shards}
    assert verified.items() <= manifest_entries.items()
    assert f"of {CAPTURED} prompts are done" in shown or not verified
    assert_same_samples(resumed, uninterrupted)
    assert_nothing_is_left(bench, name, reference)


def kill_flow_or_server(bench: Bench, name: str, share: float, victim: str) -> None:
    process = bench.start(name)
    try:
        wait_for_share(bench, name, share, ended=lambda: process.poll() is not None)
        if victim == "flow":
            process.kill()
        else:
            server = server_of(process.pid)
            if server is not None:
                server.kill()
        shown, _ = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    if victim == "sglang" and process.returncode:
        assert "cannot be reached" in shown or "SglangError" in shown, shown


def kill_worker(bench: Bench, name: str, share: float) -> None:
    """Kill the worker and, as the end of its machine would, the flow run that it started; then a new worker comes."""
    params = json.dumps(bench.params | {"name": name})
    subprocess.run(
        [sys.executable, "-c", START_DEPLOYED, params],
        cwd=PROJECT,
        env=bench.command.environment(),
        check=True,
        capture_output=True,
        timeout=600,
    )
    wait_for_share(bench, name, max(share, 1 / CAPTURED), ended=lambda: False)
    processes = marked(lambda mark: mark == mark_of("worker-blackwell", bench.settings.root))
    assert processes
    for process in processes:
        if not is_server(process):  # SGLang ends by itself: nobody holds its guard's pipe any more
            with suppress(psutil.Error):
                process.kill()
    psutil.wait_procs(processes, timeout=60)
    bench.command.run("up")


def server_of(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if "sglang.launch_server" in child.cmdline() and "guard.py" not in " ".join(child.cmdline()):
                return child
    return None


def is_server(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "sglang" in line or "guard.py" in line


def wait_for_share(bench: Bench, name: str, share: float, *, ended: Callable[[], bool]) -> None:
    """Until that share of the prompts was answered, or all of them, their rows gone."""
    deadline, most = time.monotonic() + WAIT_S, 0
    while not ended():
        captured = bench.captured(name)
        if captured >= share * CAPTURED or captured < most:
            return
        most = captured
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.01)


def assert_same_samples(resumed: DumpReader, whole: DumpReader) -> None:
    by_id = {sample.id: sample for sample in whole}
    assert {sample.id for sample in resumed} == by_id.keys()
    for sample in resumed:
        other = by_id[sample.id]
        assert torch.equal(sample.full_ids(), other.full_ids())
        assert torch.equal(sample.loss_mask, other.loss_mask)
        for point, state in sample.states.items():
            torch.testing.assert_close(state, other.states[point], rtol=TOLERANCE, atol=TOLERANCE)
    assert resumed.manifest.spec_digest == whole.manifest.spec_digest


def assert_nothing_is_left(bench: Bench, name: str, reference: DumpRef) -> None:
    assert bench.place(name) is None
    store = open_store(reference.uri, bench.settings)
    named = {file.name for file in DumpReader.open(fetch_dump(reference, bench.settings)).manifest.files}
    assert {key for key, _ in store.list()} == named | {"manifest.json"}
    assert not list((bench.command.home / "staging").glob(f"{name}-*"))
