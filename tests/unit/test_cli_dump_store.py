"""`eagle3 dump ls|show|copy|prune` on folder stores. MLflow is a real server in tests/integration."""

import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eagle3.dump.manifest import Manifest, SampleRecord, ShardEntry
from infra.settings import Settings
from infra.store import StoreCorrupt, open_store
from tasks import dump_copy, housekeeping
from tasks.dump_copy import CopyRefused
from tasks.journal import Beat, Claim, Journal, ShardDone
from tests.command import dump
from tests.dumps import Capture, capture, flip_bit, write_dump

pytestmark = pytest.mark.unit

DONE, USAGE, NOT_ASKED = 0, 2, 3
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama, num_samples=4, max_new_tokens=16)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path / "home"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store" / "dumps"


@pytest.fixture
def manifest(captured: Capture, root: Path) -> Manifest:
    return made(captured, root / "a" / "1", days_old=0)


def made(captured: Capture, folder: Path, *, days_old: float) -> Manifest:
    folder.mkdir(parents=True)
    return write_dump(captured, folder, created_at=datetime.now(UTC) - days_old * DAY)


def leftover(folder: Path, *, days_old: float) -> Path:
    """What an extraction that was killed leaves."""
    for name in ("shard-00000.safetensors", "extraction/claim-000000.json", "extraction/beat-000000.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    return age(folder, days_old)


def age(folder: Path, days: float) -> Path:
    then = time.time() - days * DAY.total_seconds()
    for path in folder.rglob("*"):
        os.utime(path, (then, then))
    return folder


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ls, show


def test_an_empty_store_holds_no_dump(tmp_path: Path) -> None:
    said = dump("ls")
    assert said.code == DONE
    assert "no dump lies below" in said.out


def test_every_dump_and_every_leftover_is_listed(captured: Capture, manifest: Manifest, root: Path) -> None:
    leftover(root / "a" / "2", days_old=1)
    broken = root / "b" / "1"
    made(captured, broken, days_old=3)
    (broken / "shard-00000.safetensors").unlink()
    (root / "c").mkdir()
    (root / "c" / "manifest.json").write_text("{}")
    (root / "d").mkdir()
    (root / "d" / "model.safetensors").write_bytes(b"a drafter, no dump")
    listed = dump("ls", "--json")
    assert listed.code == DONE
    assert "no MLflow server is known" in listed.json["users_unknown"]
    states = {entry["uri"].removeprefix(root.as_uri()): entry["state"] for entry in listed.json["dumps"]}
    assert states == {"/a/1": "committed", "/a/2": "uncommitted", "/b/1": "damaged", "/c": "unreadable"}
    first = listed.json["dumps"][0]
    assert (first["num_samples"], first["num_tokens"]) == (4, manifest.num_tokens)
    assert first["sha256"] == manifest.digest()
    assert first["bytes"] == sum(path.stat().st_size for path in (root / "a" / "1").iterdir())
    assert first["num_foreign"] == 0
    said = dump("ls")
    for words in ("layers.1, layers.3, layers.5, norm", "uncommitted", "shard-00000.safetensors (1 in all)"):
        assert words in said.out
    assert [e["uri"] for e in dump("ls", root / "a", "--json").json["dumps"]] == [
        (root / "a" / name).as_uri() for name in ("1", "2")
    ]


def test_a_store_that_cannot_be_asked_is_no_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_S3_RETRIES", "0")
    for name, value in {"ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY": "a", "SECRET_KEY": "b"}.items():
        monkeypatch.setenv(f"EAGLE3_S3_{name}", value)
    said = dump("ls", "s3://test-bucket/dumps")
    assert said.code == NOT_ASKED
    assert "does not answer" in said.err


def test_a_manifest_is_told_in_words(manifest: Manifest, root: Path) -> None:
    said = dump("show", root / "a" / "1")
    assert said.code == DONE
    for words in (
        manifest.digest(),
        f"4 samples, {manifest.num_tokens} rows",
        "LlamaForCausalLM, 8 layers, hidden 64",
        "source while_answering",
        "sglang 0.5.23 LlamaForCausalLM [1, 3, 5]",
        "used by     not known: no MLflow server",
    ):
        assert words in said.out, said.out
    assert dump("show", root / "a" / "1", "--json").json["manifest"]["num_tokens"] == manifest.num_tokens
    assert dump("show", root / "a").code == NOT_ASKED


# copy


def test_a_copy_is_the_same_dump(manifest: Manifest, root: Path, tmp_path: Path, home: Path) -> None:
    said = dump("copy", root / "a" / "1", tmp_path / "kept" / "x", "--json")
    assert said.code == DONE
    assert said.json == {"uri": (tmp_path / "kept" / "x").as_uri(), "sha256": manifest.digest()}
    assert dump("verify", tmp_path / "kept" / "x").code == 0
    assert names(tmp_path / "kept" / "x") == names(root / "a" / "1")
    assert list((home / "staging").iterdir()) == []
    again = dump("copy", root / "a" / "1", tmp_path / "kept" / "x")
    assert f"holds the dump {manifest.digest()}" in again.out


def test_a_copy_that_was_stopped_goes_on(
    manifest: Manifest, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, settings = (root / "a" / "1").as_uri(), (tmp_path / "kept").as_uri(), Settings()

    class Stopped(Exception):
        pass

    copied = 0

    def stop(done: int, total: int) -> None:
        nonlocal copied
        assert total == sum(entry.bytes for entry in manifest.files)
        if done and copied >= 2:
            raise Stopped
        copied += 1

    with pytest.raises(Stopped):
        dump_copy.copy_dump(source, target, settings, on_progress=stop)
    there = names(tmp_path / "kept")
    assert there == {entry.name for entry in manifest.files[:2]}
    before = {name: (tmp_path / "kept" / name).stat().st_ino for name in there}
    dump_copy.copy_dump(source, target, settings)
    assert {name: (tmp_path / "kept" / name).stat().st_ino for name in there} == before  # read back, not written again
    assert dump("verify", tmp_path / "kept").code == 0


def test_a_damaged_file_is_not_copied_and_the_copy_is_no_dump(manifest: Manifest, root: Path, tmp_path: Path) -> None:
    flip_bit(root / "a" / "1" / manifest.shards[-1].name)
    with pytest.raises(StoreCorrupt, match=manifest.shards[-1].name):
        dump("copy", root / "a" / "1", tmp_path / "kept")
    assert "manifest.json" not in names(tmp_path / "kept")
    assert manifest.shards[-1].name not in names(tmp_path / "kept")


def test_two_dumps_are_never_mixed(captured: Capture, manifest: Manifest, root: Path, tmp_path: Path) -> None:
    made(captured, tmp_path / "other", days_old=1)
    with pytest.raises(CopyRefused, match="holds another dump"):
        dump("copy", root / "a" / "1", tmp_path / "other")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(CopyRefused, match=r"notes\.txt, which is no file of"):
        dump("copy", root / "a" / "1", tmp_path / "foreign")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / manifest.shards[0].name).write_bytes(b"of another one")
    with pytest.raises(CopyRefused, match="is not the file of"):
        dump("copy", root / "a" / "1", tmp_path / "half")
    with pytest.raises(CopyRefused, match="onto itself"):
        dump("copy", root / "a" / "1", root / "a" / "1")


def test_of_two_copies_at_once_the_slower_one_agrees(manifest: Manifest, root: Path, tmp_path: Path) -> None:
    """The other copy finishes just before this one writes its manifest."""
    total = sum(entry.bytes for entry in manifest.files)

    def other_is_faster(done: int, _total: int) -> None:
        if done == total:
            shutil.copy(root / "a" / "1" / "manifest.json", tmp_path / "kept" / "manifest.json")

    ref = dump_copy.copy_dump(
        (root / "a" / "1").as_uri(), (tmp_path / "kept").as_uri(), Settings(), on_progress=other_is_faster
    )
    assert ref.sha256 == manifest.digest()


# prune


@pytest.fixture
def aged(captured: Capture, root: Path) -> Path:
    for name, days in {"a/1": 50, "a/2": 40, "a/3": 1, "b/1": 60}.items():
        made(captured, root / name, days_old=days)
    leftover(root / "a" / "4", days_old=20)
    leftover(root / "a" / "5", days_old=1)
    return root


def test_without_mlflow_nothing_is_removed_unless_forced(aged: Path) -> None:
    before = names(aged)
    refused = dump("prune", "--older-than", "30d", "--yes")
    assert refused.code == NOT_ASKED
    assert "which dumps registered drafters rest on is not known" in refused.err
    assert names(aged) == before
    assert dump("prune", "--older-than", "30d", "--yes", "--force").code == DONE
    assert {name.rpartition("/")[0] for name in names(aged)} >= {"a/3", "a/4", "a/5"}
    assert not {"a/1", "a/2", "b/1"} & {name.rpartition("/")[0] for name in names(aged)}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--older-than", "30d"], ["a/1", "a/2", "b/1"]),
        (["--keep-last", "1"], ["a/1", "a/2"]),
        (["--keep-last", "2", "--older-than", "45d"], ["a/1"]),
        (["--older-than", "9w"], []),
        (["--uncommitted"], ["a/4"]),
        (["--uncommitted", "--older-than", "12h"], ["a/4", "a/5"]),
    ],
    ids=" ".join,
)
def test_a_dry_run_says_what_would_go(aged: Path, options: list[str], gone: list[str]) -> None:
    before = names(aged)
    said = dump("prune", *options, "--force", "--json")
    assert said.code == DONE
    assert [entry["uri"] for entry in said.json["removed"]] == [(aged / name).as_uri() for name in gone]
    assert said.json["done"] is False
    assert names(aged) == before
    told = dump("prune", *options, "--force")
    assert f"would remove {len(gone)} of them" in told.out
    assert ("`--yes` removes them" in told.out) == bool(gone)


def test_leftovers_go_and_foreign_files_stay(aged: Path) -> None:
    (aged / "a" / "4" / "notes.txt").write_text("mine")
    age(aged / "a" / "4", 20)
    said = dump("prune", "--uncommitted", "--yes", "--force")
    assert "its 1 foreign files stay" in said.out
    assert names(aged / "a" / "4") == {"notes.txt"}
    assert len(names(aged / "a" / "5")) == 3
    assert len(names(aged / "a" / "3")) > 3


def test_extractions_that_are_called_extraction_are_no_journal(captured: Capture, root: Path) -> None:
    """Every name is allowed that Prefect's form takes; the journal of an extraction has the same."""
    made(captured, root / "extraction" / "1", days_old=1)
    leftover(root / "extraction" / "2", days_old=20)
    made(captured, root / "extraction" / "done" / "3", days_old=1)
    kept = {name for name in names(root) if not name.startswith("extraction/2/")}
    said = dump("prune", "--uncommitted", "--yes", "--force", "--json")
    assert [entry["uri"] for entry in said.json["removed"]] == [(root / "extraction" / "2").as_uri()]
    assert names(root) == kept


def test_the_journal_of_an_extraction_is_known_as_such(root: Path) -> None:
    store = open_store((root / "a" / "1").as_uri(), Settings())
    journal, claim = Journal(store), Claim.of_this_process(0, {"prompts.count": 3})
    journal.claim(claim)
    journal.beat(claim, Beat(count=1))
    shard = ShardEntry(name="shard-00000.safetensors", bytes=5, sha256="0" * 64, samples=1, tokens=3)
    record = SampleRecord(
        id="a",
        shard=0,
        start=0,
        rows=3,
        prompt_tokens=2,
        output_tokens=2,
        last_token_id=1,
        finish_reason="stop",
        ids_sha256="0" * 64,
        digest="0" * 64,
    )
    journal.note_done(ShardDone(number=0, dtype="float32", shard=shard, records=(record,)))
    store.put_bytes(shard.name, b"12345")
    (entry,) = dump("ls", "--json").json["dumps"]
    assert (entry["state"], entry["num_objects"], entry["num_foreign"]) == ("uncommitted", 4, 0)
    assert dump("prune", "--uncommitted", "--older-than", "1h", "--force", "--json").json["removed"] == []
    assert dump("prune", "--uncommitted", "--older-than", "0h", "--force", "--yes").code == DONE
    assert list(store.list()) == []


def test_a_dump_that_a_drafter_names_stays_unless_forced(aged: Path) -> None:
    """By URI or by digest; `used_by` is filled from MLflow, which tests/integration asks."""
    settings = Settings()
    dumps = [
        entry.model_copy(update={"used_by": ("eagle3-x version 1 @champion",)}) if entry.uri.endswith("b/1") else entry
        for entry in housekeeping.find_dumps(aged.as_uri(), settings)
    ]
    rule = housekeeping.PruneRule(older_than=30 * DAY)
    pruned = housekeeping.prune(dumps, rule, settings, force=False, really=True)
    assert [entry.uri.rpartition("/dumps/")[2] for entry in pruned.kept] == ["b/1"]
    assert (aged / "b" / "1" / "manifest.json").exists()
    assert not (aged / "a" / "1" / "manifest.json").exists()
    assert housekeeping.prune(dumps, rule, settings, force=True, really=False).removed[-1].uri.endswith("b/1")


def test_what_changed_after_the_listing_stays(captured: Capture, aged: Path) -> None:
    settings = Settings()
    dumps = housekeeping.find_dumps(aged.as_uri(), settings)
    open_store((aged / "a" / "4").as_uri(), settings).put_bytes("extraction/beat-000000.json", b"alive")
    pruned = housekeeping.prune(dumps, housekeeping.PruneRule(uncommitted=True), settings, force=False, really=True)
    assert [entry.uri.rpartition("/dumps/")[2] for entry in pruned.kept] == ["a/4"]
    assert len(names(aged / "a" / "4")) == 3


def test_damaged_and_unreadable_ones_are_left_to_a_person(captured: Capture, aged: Path) -> None:
    (aged / "a" / "1" / "samples.jsonl").unlink()
    (aged / "b" / "1" / "manifest.json").write_text("{}")
    said = dump("prune", "--older-than", "1d", "--force", "--json")
    assert [entry["uri"].rpartition("/dumps/")[2] for entry in said.json["removed"]] == ["a/2", "a/3"]


@pytest.mark.parametrize(
    "options",
    [[], ["--yes"], ["--older-than", "soon"], ["--keep-last", "0"], ["--uncommitted", "--keep-last", "1"]],
    ids=" ".join,
)
def test_a_prune_without_a_clear_rule_is_wrong_usage(aged: Path, options: list[str]) -> None:
    before = names(aged)
    assert dump("prune", *options).code == USAGE
    assert names(aged) == before
