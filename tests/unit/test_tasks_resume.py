"""Which extraction goes on, which is refused, and what of an earlier one counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.dump.manifest import SampleRecord, ShardEntry
from infra.settings import Settings
from infra.store import Store, open_store
from tasks import resume
from tasks.journal import Beat, Claim, Journal, JournalError, ShardDone
from tasks.params import ExtractParams
from tasks.resume import Extraction, Heartbeat, ResumeRefused, abandon, begin, differences, is_at_work

pytestmark = pytest.mark.unit

PARAMS = ExtractParams(name="tiny")
ASKED: dict[str, Any] = {"capture.aux": ["layers.1", "layers.3"], "prompts.sha256": "a" * 64, "states.dtype": "float32"}
OTHER = ASKED | {"capture.aux": ["layers.2", "layers.3"]}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(resume, "PATIENCE_SECONDS", 0.3)


def start(settings: Settings, asked: dict[str, Any] = ASKED, **params: Any) -> Extraction:
    return begin(PARAMS.model_copy(update=params), asked, settings, lambda _: None)


def shard_done(store: Store, name: str, ids: list[str], *, number: int = 0, size: int = 10) -> ShardDone:
    """A stored shard and its entry; its bytes are none of a shard."""
    store.put_bytes(name, b"x" * size)
    records = [
        SampleRecord(
            id=sample,
            shard=0,
            start=3 * place,
            rows=3,
            prompt_tokens=2,
            output_tokens=2,
            last_token_id=1,
            finish_reason="stop",
            ids_sha256="0" * 64,
            digest="1" * 64,
        )
        for place, sample in enumerate(ids)
    ]
    entry = ShardEntry(name=name, bytes=size, sha256="2" * 64, samples=len(ids), tokens=3 * len(ids))
    done = ShardDone(number=number, dtype="float32", shard=entry, records=tuple(records))
    Journal(store).note_done(done)
    return done


def test_an_extraction_that_nobody_works_on_is_taken_up_at_its_place(settings: Settings) -> None:
    first = start(settings)
    shard_done(first.store, "shard-00000.safetensors", ["a", "b"])
    again = start(settings)  # the first one fell silent
    assert (again.uri, again.claim.number, again.claim.stem) == (first.uri, 1, "shard-r1")
    assert again.done_ids == {"a", "b"}
    with pytest.raises(JournalError, match="has taken this extraction over"):
        first.journal.check_still_mine(first.claim)
    again.journal.check_still_mine(again.claim)


def test_a_second_one_is_refused_while_the_first_works_and_goes_on_when_it_has_stopped(settings: Settings) -> None:
    first = start(settings)
    with Heartbeat(first), pytest.raises(ResumeRefused, match=r"is being extracted by process \d+ on "):
        start(settings)
    assert start(settings).uri == first.uri


def test_a_process_that_was_killed_on_this_machine_is_known_to_be_dead_at_once(settings: Settings) -> None:
    first = start(settings)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        import psutil

        claim = first.claim.model_copy(
            update={"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
        )
        assert is_at_work(first.journal, claim, pytest.fail)  # no watching: the process tells
        assert not is_at_work(first.journal, claim.model_copy(update={"started": claim.started - 60}), pytest.fail)
        process.kill()
        process.wait()
        assert not is_at_work(first.journal, claim, pytest.fail)


def test_an_owner_on_another_machine_is_judged_by_its_heartbeat(settings: Settings) -> None:
    first, notes = start(settings), []
    claim = first.claim.model_copy(update={"machine": "another"})
    first.journal.beat(claim, Beat(count=1))
    assert not is_at_work(first.journal, claim, notes.append)
    assert "is watched" in notes[0]
    with Heartbeat(first):
        assert is_at_work(first.journal, claim, notes.append)
    assert not is_at_work(first.journal, claim, pytest.fail)  # it has said that it stopped


def test_of_two_that_take_over_at_once_one_is_refused(settings: Settings) -> None:
    first = start(settings)
    first.journal.claim(Claim.of_this_process(1, ASKED))
    with pytest.raises(JournalError, match="another process took this extraction"):
        first.journal.claim(Claim.of_this_process(1, ASKED))


def test_other_parameters_never_leave_verified_shards_behind_unseen(settings: Settings) -> None:
    first = start(settings)
    assert start(settings, OTHER).uri != first.uri  # nothing was captured yet
    shard_done(first.store, "shard-00000.safetensors", ["a"])
    third = ASKED | {"prompts.sha256": "b" * 64}
    with pytest.raises(ResumeRefused) as refused:
        start(settings, third)
    assert f"- prompts.sha256 is {'a' * 16}... there, {'b' * 16}... here" in str(refused.value)
    assert "holds 1 verified shards" in str(refused.value)
    assert "states.dtype" not in str(refused.value)

    assert start(settings, third, resume="new").uri != first.uri
    assert start(settings, third).claim.number == 1
    assert start(settings, ASKED, resume=first.uri).done_ids == {"a"}  # it is still there, for who names it
    with pytest.raises(ResumeRefused, match=r"capture\.aux is layers\.1, layers\.3 there, layers\.2, layers\.3 here"):
        start(settings, OTHER, resume=first.uri)


def test_a_place_without_an_extraction_is_refused(settings: Settings) -> None:
    with pytest.raises(ResumeRefused, match="holds no unfinished extraction"):
        start(settings, resume=f"{settings.store}/dumps/tiny/nothing")


def test_new_begins_anew_although_an_extraction_asked_for_the_same(settings: Settings) -> None:
    first = start(settings)
    shard_done(first.store, "shard-00000.safetensors", ["a"])
    anew = start(settings, ASKED | {}, resume="new")
    assert anew.done_ids == frozenset()
    assert start(settings).uri == anew.uri


@pytest.mark.parametrize("uri", ["file:///etc", "../../../elsewhere", "a/b", ""])
def test_a_pointer_that_leads_elsewhere_is_refused(settings: Settings, uri: str) -> None:
    start(settings)
    root = open_store(settings.store, settings)
    (key,) = [key for key, _ in root.list("dumps/tiny/unfinished/")]
    wrong = uri if uri.startswith("file:") else f"{settings.store}/dumps/tiny/{uri}"
    root.put_bytes(key, json.dumps({"uri": wrong}).encode())
    with pytest.raises(JournalError, match="does not name an extraction under"):
        start(settings)


def test_shards_that_are_gone_cut_or_repeated_do_not_count(settings: Settings) -> None:
    first = start(settings)
    store = first.store
    kept = shard_done(store, "shard-00000.safetensors", ["a", "b"])
    shard_done(store, "shard-00001.safetensors", ["c"])
    shard_done(store, "shard-00002.safetensors", ["d"])
    shard_done(store, "shard-r1-00000.safetensors", ["e", "b"], number=1)
    store.delete("shard-00001.safetensors")
    store.put_bytes("shard-00002.safetensors", b"x")
    again = start(settings)
    assert again.done == (kept,)
    assert [sentence.split(": ", 1)[1] for sentence in again.remarks] == [
        "its 1 samples are captured again",
        "its 1 samples are captured again",
        "it is left out",
    ]


def test_a_changed_journal_is_refused_by_name(settings: Settings) -> None:
    first = start(settings)
    done = shard_done(first.store, "shard-00000.safetensors", ["a", "b"])
    key = "extraction/done/shard-00000.safetensors.json"
    first.store.put_bytes(key, done.model_copy(update={"records": done.records[:1]}).model_dump_json().encode())
    with pytest.raises(JournalError, match=r"shard-00000\.safetensors\.json does not list the 2 samples"):
        start(settings)
    first.store.put_bytes(key, b'{"number": 0}')
    with pytest.raises(JournalError, match=r"is not what an extraction writes: dtype: Field required"):
        start(settings)


def test_differences_name_every_field_of_either_side() -> None:
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5}) == [
        "b is 2 there, 4 here",
        "c is 3 there, None here",
        "d is None there, 5 here",
    ]


def test_the_journal_goes_after_the_commit_and_with_it_what_the_manifest_does_not_name(settings: Settings) -> None:
    first = start(settings)
    shard_done(first.store, "shard-00000.safetensors", ["a"])
    first.store.put_bytes("shard-00001.safetensors", b"never noted")
    first.store.put_bytes("samples.jsonl", b"{}")
    first.store.put_bytes("notes.txt", b"somebody's own")
    first.journal.forget(["manifest.json", "samples.jsonl", "shard-00000.safetensors"])
    assert [key for key, _ in first.store.list()] == ["notes.txt", "samples.jsonl", "shard-00000.safetensors"]


def test_a_failure_before_the_first_shard_leaves_nothing_in_the_store(settings: Settings) -> None:
    root = open_store(settings.store, settings)
    first = start(settings)
    abandon(first, settings)
    assert list(root.list()) == []
    second = start(settings)
    shard_done(second.store, "shard-00000.safetensors", ["a"])
    abandon(second, settings)
    assert start(settings).done_ids == {"a"}
