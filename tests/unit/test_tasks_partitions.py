"""An extraction that is split: the same parts everywhere, each with its own journal, merged only where they fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.dump.manifest import FileEntry, Generation
from eagle3.dump.writer import PackedShard, assemble
from eagle3.prompts import PromptError, TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import SglangClient
from infra.store import open_store
from tasks import partition_runs, resume
from tasks.capture_run import Bounds, CaptureRun
from tasks.capture_session import Session
from tasks.housekeeping import find_dumps
from tasks.inputs import partitioned
from tasks.journal import Beat, Journal, JournalError, Served, ShardDone
from tasks.params import AnswerParams, ExtractParams, PartitionParams, ServingParams
from tasks.partitions import MergeRefused, described, merged, parts_of
from tasks.resume import Extraction, Heartbeat, ResumeRefused, abandon, begin, begin_partition
from tests.dumps import engine_record
from tests.tap_stand_in import StandIn, stand_in
from tests.targets import HIDDEN, LAYERS
from tests.unit.test_tasks_capture_run import Progress
from tests.unit.test_tasks_resume import shard_done

pytestmark = pytest.mark.unit

MOST = 6
PROMPTS = tuple(TokenizedPrompt(f"p{n:02d}", tuple(range(n + 1, n + 9 + n % 5))) for n in range(24))
ROW = 4 * HIDDEN * 4 + 9
SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))
PARAMS = ExtractParams(
    name="tiny", capture=SPEC, partitions=3, answers=AnswerParams(max_new_tokens=MOST), serving=ServingParams(streams=4)
)
ASKED: dict[str, Any] = {"capture.aux": ["layers.1"], "partitions.count": 3}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(resume, "PATIENCE_SECONDS", 0.2)


@pytest.fixture
def whole(settings: Settings) -> Extraction:
    return begin(PARAMS, ASKED, settings, lambda _: None)


@pytest.fixture
def served(tiny_llama: Path) -> Served:
    return Served(
        engine=engine_record(Target.open(tiny_llama).identity(), SPEC),
        generation=Generation(source="while_answering", max_new_tokens=MOST),
        probe=FileEntry(name="probe-p000.safetensors", bytes=1, sha256="0" * 64),
    )


def start(whole: Extraction, number: int, settings: Settings, asked: dict[str, Any] = ASKED) -> Extraction:
    part = PartitionParams(extraction=PARAMS, uri=whole.uri, number=number)
    own = partitioned(PROMPTS, PARAMS.partitions, MOST)[number]
    return begin_partition(part, asked, own, settings, lambda _: None)


def finish(whole: Extraction, number: int, settings: Settings, served: Served) -> Extraction:
    """A partition that has all of its samples in one shard; its bytes are none of a shard."""
    part = start(whole, number, settings)
    own = partitioned(PROMPTS, PARAMS.partitions, MOST)[number]
    part.journal.note_served(served)
    note(part, [prompt.id for prompt in own])
    return part


def note(part: Extraction, ids: list[str], *, dtype: str = "float32", place: int = 0) -> ShardDone:
    done = shard_done(part.store, f"{part.claim.stem}-{place:05d}.safetensors", ids, number=part.claim.number)
    done = done.model_copy(update={"dtype": dtype})
    # `shard_done` notes it in the journal of a whole extraction
    part.store.delete(f"extraction/done/{done.shard.name}.json")
    part.journal.note_done(done)
    return done


class TestTheSplit:
    def test_parts_are_disjoint_complete_in_order_and_of_about_as_many_tokens(self) -> None:
        parts = partitioned(PROMPTS, 3, MOST)
        assert sorted(prompt.id for part in parts for prompt in part) == [prompt.id for prompt in PROMPTS]
        tokens = [sum(len(prompt.input_ids) + MOST for prompt in part) for part in parts]
        assert max(tokens) - min(tokens) <= max(len(prompt.input_ids) for prompt in PROMPTS)
        assert all([prompt.id for prompt in part] == sorted(prompt.id for prompt in part) for part in parts)

    def test_a_prompt_lands_in_the_same_part_whatever_the_order_of_the_file(self) -> None:
        def ids(prompts: tuple[TokenizedPrompt, ...]) -> list[set[str]]:
            return [{prompt.id for prompt in part} for part in partitioned(prompts, 5, MOST)]

        assert ids(PROMPTS) == ids(PROMPTS[::-1])

    def test_one_long_prompt_has_a_part_for_itself(self) -> None:
        long = TokenizedPrompt("long", tuple(range(5000)))
        parts = partitioned((*PROMPTS, long), 2, MOST)
        assert [prompt.id for prompt in parts[0]] == ["long"]

    def test_more_parts_than_prompts_are_refused(self) -> None:
        with pytest.raises(PromptError, match="2 prompts cannot be split into 3 partitions"):
            partitioned(PROMPTS[:2], 3, MOST)

    def test_a_part_that_there_is_not_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="no part 3 of 3"):
            PartitionParams(extraction=PARAMS, uri="s3://a/b", number=3)


class TestAPartition:
    def test_it_needs_the_extraction_that_it_is_a_part_of(self, whole: Extraction, settings: Settings) -> None:
        with pytest.raises(ResumeRefused, match=r"capture\.aux is layers\.1 there, layers\.2 here"):
            start(whole, 0, settings, ASKED | {"capture.aux": ["layers.2"]})
        abandon(whole, settings)
        with pytest.raises(ResumeRefused, match="holds no extraction that could have partitions"):
            start(whole, 0, settings)

    def test_it_is_taken_up_where_it_stopped_and_by_one_process_at_a_time(
        self, whole: Extraction, settings: Settings
    ) -> None:
        first = start(whole, 1, settings)
        note(first, ["p01", "p02"])
        with Heartbeat(first), pytest.raises(ResumeRefused, match="is being extracted by process"):
            start(whole, 1, settings)
        again = start(whole, 1, settings)
        assert again.done_ids == {"p01", "p02"}
        assert (first.claim.stem, again.claim.stem) == ("shard-p001", "shard-p001-r1")
        assert again.claim.own_name("probe.safetensors") == "probe-p001-r1.safetensors"
        with pytest.raises(JournalError, match="has taken this extraction over"):
            first.journal.check_still_mine(first.claim)
        assert len({whole.tag, again.tag, start(whole, 0, settings).tag}) == 3

    def test_one_that_fails_before_its_first_shard_removes_what_is_its_own(
        self, whole: Extraction, settings: Settings, served: Served
    ) -> None:
        finish(whole, 1, settings, served)
        kept = {key for key, _ in whole.store.list()}
        failed = start(whole, 0, settings)
        failed.store.put_bytes("probe-p000.safetensors", b"probe")
        failed.store.put_bytes("shard-p000-00000.safetensors", b"never noted")
        abandon(failed, settings)
        assert {key for key, _ in whole.store.list()} == kept
        abandon(whole, settings)  # a partition has shards
        assert {key for key, _ in whole.store.list()} == kept
        assert list(open_store(settings.store, settings).list("dumps/tiny/unfinished/"))

    def test_an_owner_writes_nothing_more_once_the_dump_is_finished(
        self, whole: Extraction, settings: Settings
    ) -> None:
        part = start(whole, 0, settings)
        part.journal.check_still_mine(part.claim)
        whole.journal.forget([])
        with pytest.raises(JournalError, match="so this one stops"):
            part.journal.check_still_mine(part.claim)

    def test_its_leftovers_are_those_of_one_extraction(
        self, whole: Extraction, settings: Settings, served: Served
    ) -> None:
        finish(whole, 0, settings, served)
        start(whole, 1, settings)
        (leftover,) = find_dumps(f"{settings.store}/dumps/tiny", settings)
        assert (leftover.uri, leftover.state, leftover.num_foreign) == (whole.uri, "uncommitted", 0)


class TestTheWhole:
    def test_another_number_of_partitions_is_refused_while_shards_are_there(
        self, whole: Extraction, settings: Settings
    ) -> None:
        note(start(whole, 2, settings), ["p00"])
        with pytest.raises(ResumeRefused) as refused:
            begin(PARAMS, ASKED | {"partitions.count": 2}, settings, lambda _: None)
        assert "holds 1 verified shards:\n- partitions.count is 3 there, 2 here" in str(refused.value)
        assert begin(PARAMS, ASKED, settings, lambda _: None).uri == whole.uri

    def test_what_is_missing_is_known_from_the_journals(
        self, whole: Extraction, settings: Settings, served: Served
    ) -> None:
        finish(whole, 0, settings, served)
        note(start(whole, 1, settings), ["p01"])
        missing = [part.missing() for part in parts_of(whole, PROMPTS, PARAMS)]
        sizes = [len(part) for part in partitioned(PROMPTS, 3, MOST)]
        assert missing[0] == 0
        assert missing[1] == sizes[1] - ("p01" in {prompt.id for prompt in partitioned(PROMPTS, 3, MOST)[1]})
        assert missing[2] == sizes[2]

    def test_the_journals_go_with_the_dumps_own(self, whole: Extraction, settings: Settings, served: Served) -> None:
        for number in range(3):
            finish(whole, number, settings, served)
        _, shards = merged(whole, parts_of(whole, PROMPTS, PARAMS))
        whole.store.put_bytes("samples.jsonl", b"{}")
        whole.journal.forget(["samples.jsonl", *(shard.shard.name for shard in shards)])
        names = [f"shard-p00{number}-00000.safetensors" for number in range(3)]
        assert [key for key, _ in whole.store.list()] == ["samples.jsonl", *names]


Change = Callable[[Extraction, Settings, Served], None]


def never_begun(whole: Extraction, settings: Settings, served: Served) -> None:
    pass


def not_whole(whole: Extraction, settings: Settings, served: Served) -> None:
    part = start(whole, 2, settings)
    part.journal.note_served(served)
    note(part, [prompt.id for prompt in partitioned(PROMPTS, 3, MOST)[2]][1:])


def shard_gone(whole: Extraction, settings: Settings, served: Served) -> None:
    part = finish(whole, 2, settings, served)
    part.store.delete("shard-p002-00000.safetensors")


def sample_of_another(whole: Extraction, settings: Settings, served: Served) -> None:
    part = finish(whole, 2, settings, served)
    note(part, [partitioned(PROMPTS, 3, MOST)[0][0].id], place=1)


def other_engine(whole: Extraction, settings: Settings, served: Served) -> None:
    live = served.engine.live.model_copy(update={"layers_to_capture": (1, 3, 5)})
    engine = served.engine.model_copy(update={"live": live, "flags": {"dtype": "bfloat16"}})
    finish(whole, 2, settings, served.model_copy(update={"engine": engine}))


def other_length(whole: Extraction, settings: Settings, served: Served) -> None:
    generation = served.generation.model_copy(update={"max_new_tokens": MOST + 1})
    finish(whole, 2, settings, served.model_copy(update={"generation": generation}))


def other_type(whole: Extraction, settings: Settings, served: Served) -> None:
    part = start(whole, 2, settings)
    part.journal.note_served(served)
    note(part, [prompt.id for prompt in partitioned(PROMPTS, 3, MOST)[2]], dtype="bfloat16")


def other_tokenizer(whole: Extraction, settings: Settings, served: Served) -> None:
    part = finish(whole, 2, settings, served)
    claim = part.claim.model_copy(update={"number": 1, "asked": part.claim.asked | {"tokenizer.sha256": "b" * 64}})
    part.journal.claim(claim)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (never_begun, "partition 2 of 3 was never begun"),
        (not_whole, r"partition 2 of 3: 1 of its \d prompts are not stored \(p\d\d\)"),
        (shard_gone, r"shard-p002-00000\.safetensors is gone"),
        (sample_of_another, r"1 samples are not of its prompts \(p\d\d\)"),
        (other_engine, r"live\.layers_to_capture is 1, 3, 5 there, 2, 4, 6 here"),
        (other_engine, "dtype is bfloat16 there"),
        (other_length, r"generation\.max_new_tokens is 7 there, 6 here"),
        (other_type, r"states\.dtype is bfloat16 there, float32 here"),
        (other_tokenizer, r"tokenizer\.sha256 is b+\.\.\. there, None here"),
    ],
)
def test_parts_that_do_not_make_one_dump_are_refused_with_the_difference(
    whole: Extraction, settings: Settings, served: Served, change: Change, sentence: str
) -> None:
    for number in range(2):
        finish(whole, number, settings, served)
    change(whole, settings, served)
    with pytest.raises(MergeRefused, match=sentence):
        merged(whole, parts_of(whole, PROMPTS, PARAMS))


def test_a_probe_stands_for_the_dump_only_where_every_server_was_probed(
    whole: Extraction, settings: Settings, served: Served
) -> None:
    for number in range(3):
        finish(whole, number, settings, served)
    assert merged(whole, parts_of(whole, PROMPTS, PARAMS))[0].probe == served.probe
    other = begin(PARAMS.model_copy(update={"name": "other"}), ASKED, settings, lambda _: None)
    for number in range(3):
        finish(other, number, settings, served if number else served.model_copy(update={"probe": None}))
    assert merged(other, parts_of(other, PROMPTS, PARAMS))[0].probe is None


class TestALostRun:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partition_runs, "_BEAT_EVERY_SECONDS", 0.0)
        monkeypatch.setattr(partition_runs, "LOST_SECONDS", 0.0)

    @pytest.fixture
    def claimed(self, whole: Extraction, settings: Settings) -> Extraction:
        part = start(whole, 0, settings)
        claim = part.claim.model_copy(update={"number": 1, "run": "mine"})
        part.journal.claim(claim)
        return Extraction(part.name, part.store, claim)

    def test_it_is_one_whose_own_heartbeat_stands_still(self, claimed: Extraction) -> None:
        journal, claim = claimed.journal, claimed.claim
        pulse = partition_runs._Pulse()
        assert not pulse.is_lost(journal, "mine")  # it has not begun yet
        journal.beat(claim, Beat(count=1))
        assert not pulse.is_lost(journal, "mine")
        journal.beat(claim, Beat(count=2))
        assert not pulse.is_lost(journal, "mine")
        assert pulse.is_lost(journal, "mine")

    def test_it_is_not_one_that_starts_or_has_stopped_by_itself(self, claimed: Extraction) -> None:
        journal, claim = claimed.journal, claimed.claim
        journal.beat(claim, Beat(count=1))
        pulse = partition_runs._Pulse()
        assert not any(pulse.is_lost(journal, "of another run") for _ in range(3))  # an earlier owner's silence
        journal.beat(claim, Beat(count=2, released=True))
        assert not any(pulse.is_lost(journal, "mine") for _ in range(3))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[StandIn, str]]:
    staging = tmp_path / "tap"
    staging.mkdir()
    with stand_in(staging, HIDDEN) as found:
        yield found


def capture(
    extraction: Extraction, prompts: tuple[TokenizedPrompt, ...], target: Target, server: StandIn, url: str, work: Path
) -> None:
    """The bulk of one extraction, or partition, on the stand-in server."""
    ids = ids_of(SPEC.aux, engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", num_layers=LAYERS)
    bounds = Bounds.of(2**30, shard_bytes=2**20, prompts=prompts, most=MOST, row_bytes=ROW)
    work.mkdir()
    with SglangClient(url) as client:
        session = Session(PARAMS, target, ids, server.staging, client, name=extraction.tag)
        run = CaptureRun(session, extraction, prompts, "while_answering", work, Progress(), bounds)  # type: ignore[arg-type]
        run._writer._shard_bytes = 40_000  # parameters have whole MiB
        run.run()


def test_merged_partitions_are_the_dump_of_one_worker(
    tiny_llama: Path, tmp_path: Path, settings: Settings, served: Served, server: tuple[StandIn, str]
) -> None:
    target = Target.open(tiny_llama)
    single = begin(PARAMS.model_copy(update={"name": "single"}), {"asked": 1}, settings, lambda _: None)
    capture(single, PROMPTS, target, *server, tmp_path / "single")
    whole = begin(PARAMS, ASKED, settings, lambda _: None)
    for number, own in enumerate(partitioned(PROMPTS, 3, MOST)):
        part = start(whole, number, settings)
        part.journal.note_served(served)
        capture(part, own, target, *server, tmp_path / str(number))
    parts = parts_of(whole, PROMPTS, PARAMS)
    found, shards = merged(whole, parts)

    assert found == served
    assert len(shards) > 3
    alone, together = (
        assemble(tmp_path, [PackedShard(shard.shard, shard.records) for shard in done], dtype="float32")
        for done in (single.journal.done()[0], shards)
    )
    assert (together.content_digest, together.num_samples, together.num_tokens, together.num_cut) == (
        alone.content_digest,
        alone.num_samples,
        alone.num_tokens,
        alone.num_cut,
    )
    lines = described(parts)
    assert [line.split(" samples")[0] for line in lines] == [str(len(part.prompts)) for part in parts]
    stored = dict(open_store(whole.uri, settings).list("shard-"))
    assert all(stored[shard.shard.name] == shard.shard.bytes for shard in shards)
    assert [Journal(whole.store, number).claims()[0].partition for number in range(3)] == [0, 1, 2]
