"""The flow of an extraction around a stand-in server: bounded on the disk, stopped anywhere, the same samples.

Real servers that are really killed: tests/e2e/test_killed.py.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.dump.manifest import SampleRecord
from eagle3.dump.writer import PackedShard, assemble
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import SglangClient
from infra.store import Store, StoreError
from infra.store_folder import FolderStore
from tasks.capture_run import Bounds, CaptureRun
from tasks.capture_session import Session, Source
from tasks.journal import JournalError, ShardDone
from tasks.params import AnswerParams, ExtractParams, ServingParams
from tasks.resume import Extraction, begin
from tests.tap_stand_in import StandIn, stand_in
from tests.targets import HIDDEN, LAYERS

pytestmark = pytest.mark.unit

MOST = 6
PROMPTS = tuple(TokenizedPrompt(f"p{n:02d}", tuple(range(n + 1, n + 9 + n % 5))) for n in range(30))
ROW = 4 * HIDDEN * 4 + 9
SHARD = 40_000  # about three samples
SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))
PARAMS = ExtractParams(
    name="tiny", capture=SPEC, answers=AnswerParams(max_new_tokens=MOST), serving=ServingParams(streams=4)
)


class Progress:
    """Keeps what would be shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done = 0.0

    def begin(self, note: str, total: float | None = None) -> None:
        self.notes.append(note)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def at(self, done: float) -> None:
        self.done = done

    def advance(self) -> None:
        self.done += 1


class WatchedStore(FolderStore):
    """Calls `before(key)` when a file is about to be stored."""

    before: Callable[[str], None] = staticmethod(lambda key: None)

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        self.before(key)
        super().put_file(key, path, sha256=sha256)


@dataclass
class Bench:
    """A target, a stand-in server, a store and a staging folder; `run` is one process's try."""

    folder: Path
    target: Target
    server: StandIn
    url: str
    source: Source = "while_answering"
    store_before: Callable[[str], None] = print
    staging_bytes: int = 2**30
    progress: Progress = field(default_factory=Progress)

    def extraction(self) -> Extraction:
        settings = Settings(home=self.folder / "home", store=(self.folder / "store").as_uri())
        found = begin(PARAMS, {"asked": "the same"}, settings, lambda _: None)
        store = WatchedStore(Path(found.uri.removeprefix("file://")))
        store.before = self.store_before  # type: ignore[method-assign]
        return Extraction(found.name, store, found.claim, found.done, found.remarks)

    def run(self, extraction: Extraction | None = None) -> list[ShardDone]:
        extraction = extraction or self.extraction()
        ids = ids_of(SPEC.aux, engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", num_layers=LAYERS)
        self.progress = Progress()
        bounds = Bounds.of(self.staging_bytes, shard_bytes=SHARD, prompts=PROMPTS, most=MOST, row_bytes=ROW)
        with SglangClient(self.url) as client:
            session = Session(PARAMS, self.target, ids, self.server.staging, client, name=extraction.tag)
            run = CaptureRun(session, extraction, PROMPTS, self.source, self.folder, self.progress, bounds)  # type: ignore[arg-type]
            run._writer._shard_bytes = SHARD  # parameters have whole MiB
            return run.run()

    def on_disk(self) -> int:
        total = 0
        for folder in (self.server.staging, self.folder / "shards"):
            for path in folder.iterdir() if folder.is_dir() else ():
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
        return total


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.resume.PATIENCE_SECONDS", 0.05)


@pytest.fixture(params=["while_answering", "answer_then_prefill"])
def bench(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path) -> Iterator[Bench]:
    staging = tmp_path / "tap"
    staging.mkdir()
    with stand_in(staging, HIDDEN) as (server, url):
        yield Bench(tmp_path, Target.open(tiny_llama), server, url, source=request.param)


def content(folder: Path, done: list[ShardDone]) -> tuple[str, dict[str, SampleRecord]]:
    """Digest of what a dump of these shards holds, however it is packed, and its samples by id."""
    folder.mkdir(exist_ok=True)
    files = assemble(folder, [PackedShard(shard.shard, shard.records) for shard in done], dtype="float32")
    return files.content_digest, {record.id: record for shard in done for record in shard.records}


def shards(store: Store) -> dict[str, bytes]:
    return {key: store.get_bytes(key, max_bytes=2**20) for key, _ in store.list("shard-") if key.endswith("tensors")}


def test_every_prompt_is_captured_stored_and_noted_and_nothing_stays_on_the_disk(bench: Bench) -> None:
    done = bench.run()
    _, samples = content(bench.folder / "list", done)
    assert sorted(samples) == [prompt.id for prompt in PROMPTS]
    assert len(done) > 6
    extraction = bench.extraction()
    assert [shard.shard for shard in extraction.done] == [shard.shard for shard in done]
    assert bench.on_disk() == 0
    assert bench.server.most_in_flight <= 4
    assert bench.progress.done == len(PROMPTS)


@pytest.mark.parametrize("after", [0, 3])
def test_a_store_that_fails_loses_nothing_and_verified_shards_stay_as_they_are(bench: Bench, after: int) -> None:
    whole, expected = content(bench.folder / "list", bench.run())
    once = bench.server.asked.copy()
    bench.server.asked.clear()
    other = Bench(bench.folder / "other", bench.target, bench.server, bench.url, source=bench.source)
    other.folder.mkdir()
    stored: list[str] = []

    def fail_later(key: str) -> None:
        if key.endswith("tensors"):
            stored.append(key)
        if len(stored) > after:
            raise StoreError(f"{key}: the store is full")

    other.store_before = fail_later
    with pytest.raises(StoreError, match="the store is full"):
        other.run()
    extraction = other.extraction()
    before = shards(extraction.store)
    assert len(extraction.done) == after
    asked = len(bench.server.asked)

    other.store_before = lambda key: None
    extraction = other.extraction()
    found, samples = content(bench.folder / "list", other.run(extraction))
    after_all = shards(extraction.store)
    assert found == whole  # the stand-in's states are the same each time
    assert {id: record.ids_sha256 for id, record in samples.items()} == {
        id: record.ids_sha256 for id, record in expected.items()
    }
    assert before.items() <= after_all.items()
    assert bench.server.asked[asked:]  # what was captured was not asked again
    assert len(bench.server.asked) <= len(once) + 2 * 4  # but for what was in flight
    assert any(
        note.startswith("resumed: ") and note.endswith(" of 30 prompts are done") for note in other.progress.notes
    )
    assert other.on_disk() == 0


def test_a_server_that_dies_is_told_and_its_staged_rows_are_taken_up(bench: Bench) -> None:
    count = 0

    def die(rid: str) -> None:
        nonlocal count
        count += 1
        if count > 20:
            raise ConnectionAbortedError("killed")

    bench.server.before = die
    with pytest.raises(Exception, match="cannot be reached"):
        bench.run()
    asked = bench.server.asked[:20]
    bench.server.before = lambda rid: None
    bench.server.asked.clear()
    _, samples = content(bench.folder / "list", bench.run())
    assert sorted(samples) == [prompt.id for prompt in PROMPTS]
    again = set(bench.server.asked) & {rid for rid in asked if rid.startswith("cap-")}
    assert len(again) <= 4  # heard by nobody when the others failed


def test_rows_without_their_answer_half_written_files_and_torn_lines_are_not_taken(bench: Bench) -> None:
    extraction = bench.extraction()
    rid = f"cap-{extraction.tag}-000003"
    bench.server.stage(rid, list(PROMPTS[3].input_ids), [1, 2, 3])  # nobody heard this answer
    (bench.server.staging / f"cap-{extraction.tag}-000004.safetensors.77.tmp").write_bytes(b"half")
    (bench.folder / "answers.jsonl").write_bytes(b'{"prompt": "p05", "answer": {"rid"')
    (bench.folder / "shards").mkdir()
    (bench.folder / "shards" / "shard-00000.safetensors").write_bytes(b"half")
    _, samples = content(bench.folder / "list", bench.run(extraction))
    assert sorted(samples) == [prompt.id for prompt in PROMPTS]
    assert samples["p03"].output_tokens == MOST
    assert bench.on_disk() == 0


def test_a_slow_store_holds_the_prompts_back_and_the_disk_keeps_its_bound(bench: Bench) -> None:
    bench.staging_bytes = 0  # as little as one shard and the longest sample need
    bench.store_before = lambda key: time.sleep(0.03)
    bound = Bounds.of(0, shard_bytes=SHARD, prompts=PROMPTS, most=MOST, row_bytes=ROW).staging_bytes
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, bench.on_disk())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = bench.run()
    stop.set()
    watcher.join()
    files = len(PROMPTS) * 2048  # headers of small files, which rows of real width do not notice
    assert sum(shard.shard.bytes for shard in done) > 3 * bound
    assert 0 < peak <= bound + files


def test_an_owner_that_was_taken_over_stops_and_mixes_nothing_in(bench: Bench) -> None:
    first = bench.extraction()
    later: list[Extraction] = []

    def take_over(key: str) -> None:
        if not later and key == "shard-00002.safetensors":
            bench.store_before = lambda _: None
            later.append(bench.extraction())

    bench.store_before = take_over
    first.store.before = take_over  # type: ignore[attr-defined]
    with pytest.raises(JournalError, match="has taken this extraction over"):
        bench.run(first)
    (second,) = later
    done = bench.run(second)
    _, samples = content(bench.folder / "list", done)
    assert sorted(samples) == [prompt.id for prompt in PROMPTS]
    assert {shard.shard.name for shard in done} >= {"shard-00000.safetensors", "shard-r1-00000.safetensors"}
