"""Where an extraction writes, and whether it goes on from an earlier one: found, compared, taken over, or refused."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.digests import sha256_bytes, sha256_json
from eagle3.dump.manifest import MANIFEST_NAME, Manifest
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt
from infra.settings import Settings
from infra.store import AlreadyExists, MissingObject, Store, StoreError, open_store
from tasks.artifacts import read_manifest
from tasks.inputs import prompts_sha256
from tasks.journal import Beat, Claim, Journal, JournalError, Served, ShardDone
from tasks.params import ExtractParams, PartitionParams

if TYPE_CHECKING:
    from eagle3.target import Target

BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 35.0
"""How long an owner on another machine may be silent before it is taken for dead."""
_MAX_POINTER_BYTES = 4096


class ResumeRefused(Eagle3Error):
    """An unfinished extraction that must be left alone: it asked for something else, or somebody works on it."""


class _Pointer(BaseModel):
    """Names an unfinished extraction, under `dumps/<name>/unfinished/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str


@dataclass(frozen=True)
class Extraction:
    """A place in the store that this process owns, and what is done there already."""

    name: str
    store: Store
    claim: Claim
    done: tuple[ShardDone, ...] = ()
    remarks: tuple[str, ...] = ()  # on what was found and does not count
    committed: Manifest | None = None  # the dump is there; only what follows the commit may be missing

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def journal(self) -> Journal:
        return Journal(self.store, self.claim.partition)

    @property
    def tag(self) -> str:
        """12 characters that name this extraction, or partition, on a machine: its folder, and its requests."""
        part = "" if self.claim.partition is None else f"#{self.claim.partition}"
        return sha256_bytes(f"{self.uri}{part}".encode())[:12]

    @property
    def done_ids(self) -> frozenset[str]:
        return frozenset(record.id for shard in self.done for record in shard.records)


def asked_for(
    params: ExtractParams, target: "Target", prompts: Sequence[TokenizedPrompt], dtype: str
) -> dict[str, Any]:
    """By field, what decides whether two extractions give the same dump. A folder's name and a revision are labels.

    In how many partitions it is split changes no sample, but which of them lie in which journal.
    """
    parts: dict[str, dict[str, Any]] = {
        "capture": params.capture.model_dump(mode="json"),
        "target": target.identity().model_dump(mode="json", exclude={"name", "revision"}),
        "tokenizer": target.tokenizer_identity().model_dump(mode="json"),
        "prompts": {"sha256": prompts_sha256(prompts), "count": len(prompts)},
        "answers": params.answers.model_dump(mode="json"),
        "states": {"dtype": dtype},
    }
    if params.partitions > 1:
        parts["partitions"] = {"count": params.partitions}
    return {f"{part}.{field}": value for part, fields in parts.items() for field, value in fields.items()}


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """A sentence for each field in which two dictionaries differ."""
    return [
        f"{field} is {_short(there.get(field))} there, {_short(here.get(field))} here"
        for field in sorted(there.keys() | here.keys())
        if there.get(field) != here.get(field)
    ]


def begin(
    params: ExtractParams, asked: dict[str, Any], settings: Settings, on_note: Callable[[str], None]
) -> Extraction:
    """The place of this extraction: that of an unfinished one that asked for the same, else a new one.

    Raises ResumeRefused where a process is at work there, or where an unfinished extraction of this name, or at
    `params.resume`, asked for something else; every differing field is named.
    """
    if params.resume not in ("auto", "new"):
        return _take(params.name, open_store(params.resume, settings), asked, on_note, must_exist=True)
    root = open_store(settings.store, settings)
    key = f"{_unfinished(params.name)}{sha256_json(asked)[:16]}.json"
    _mind_others(params, root, key, asked, settings, on_note)
    # A name that no other extraction has, not one begun in the same second either.
    fresh = f"{root.uri}/dumps/{params.name}/{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"
    try:
        root.put_bytes(key, _Pointer(uri=fresh).model_dump_json().encode(), if_absent=params.resume == "auto")
        uri = fresh
    except AlreadyExists:
        uri = _read_pointer(root, key, params.name)
    return _take(params.name, open_store(uri, settings), asked, on_note)


def begin_partition(
    part: PartitionParams,
    asked: dict[str, Any],
    prompts: Sequence[TokenizedPrompt],
    settings: Settings,
    on_note: Callable[[str], None],
) -> Extraction:
    """The place of a partition of the extraction at `part.uri`, taken up where an earlier run of it stopped.

    `asked`: of the whole extraction, as this worker finds it; `prompts`: of this partition. Raises ResumeRefused where
    that is not what was split, or another process is at work on this very partition.
    """
    store = open_store(part.uri, settings)
    whole = Journal(store).last_claim()
    if whole is None:
        raise ResumeRefused(
            f"{store.uri} holds no extraction that could have partitions: it was finished or removed. Start the "
            "extraction; it starts its partitions"
        )
    if different := differences(whole.asked, asked):
        raise ResumeRefused(
            f"this worker would capture something else than the extraction at {store.uri} that it is a part of:\n- "
            + "\n- ".join(different)
            + "\nGive every worker of the pool the same target, tokenizer and prompts"
        )
    return _take(
        part.extraction.name, store, asked | partition_asked(part.number, prompts), on_note, partition=part.number
    )


def partition_asked(number: int, prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """What a partition's claim says beside what the whole extraction was asked."""
    return {"partition.number": number, "partition.sha256": prompts_sha256(prompts), "partition.count": len(prompts)}


def end(extraction: Extraction, manifest: Manifest, settings: Settings) -> None:
    """After the commit and its record: what points to the extraction goes, then its journal.

    In this order: a dump without a journal that was still pointed to would be taken for one that was not begun.
    """
    _forget_pointer(extraction, settings)
    extraction.journal.forget([MANIFEST_NAME, *(file.name for file in manifest.files)])


def abandon(extraction: Extraction, settings: Settings) -> None:
    """After a failure: an extraction with no verified shard leaves nothing in the store; any other stays as it is.

    So does one of whose partitions something is there: each of them does the same for itself.
    """
    is_whole = extraction.claim.partition is None
    if extraction.journal.done()[0] or extraction.store.exists(MANIFEST_NAME):
        return
    if is_whole and extraction.journal.partitions():
        return
    extraction.journal.check_still_mine(extraction.claim)
    if is_whole:
        _forget_pointer(extraction, settings)
    extraction.journal.forget([])


def _forget_pointer(extraction: Extraction, settings: Settings) -> None:
    root = open_store(settings.store, settings)
    key = f"{_unfinished(extraction.name)}{extraction.claim.digest[:16]}.json"
    with suppress(MissingObject):
        if _read_pointer(root, key, extraction.name) == extraction.uri:  # not that of one that was begun anew
            root.delete(key)


def check_same_server(before: Served, now: Served) -> None:
    """ResumeRefused where another server would capture something else than the one that began."""
    if different := server_differences(before, now):
        raise ResumeRefused(
            "this server would not go on as the extraction began:\n- " + "\n- ".join(different) + "\nServe as before, "
            "or start anew (resume: new)"
        )


def server_differences(before: Served, now: Served) -> list[str]:
    """A sentence for each thing in which the states of two servers could differ by more than their last bits."""
    parts = [
        {
            "engine": f"{served.engine.name} {served.engine.version}",
            "layer ids": str(served.engine.ids),
            "source": served.generation.source,
            **{f"live.{field}": value for field, value in served.engine.live.model_dump(mode="json").items()},
            **{flag: served.engine.flags.get(flag) for flag in ("dtype", "quantization", "kv_cache_dtype")},
        }
        for served in (before, now)
    ]
    return differences(*parts)


class Heartbeat:
    """Says in the journal that this owner is at work, every BEAT_SECONDS; at the end, that it has stopped."""

    def __init__(self, extraction: Extraction) -> None:
        self._extraction, self._count = extraction, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._beat(released=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._beat(released=True)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beat(released=False)

    def _beat(self, *, released: bool) -> None:
        self._count += 1
        with suppress(StoreError):  # a store that does not answer: the next shard says so
            self._extraction.journal.beat(self._extraction.claim, Beat(count=self._count, released=released))


def is_at_work(journal: Journal, claim: Claim, on_note: Callable[[str], None]) -> bool:
    """Whether the owner still works: by its process on this machine, else by its heartbeat, which takes a while."""
    before = journal.last_beat(claim)
    if before and before.released:
        return False
    process = claim.process()
    if process != "unknown":
        return process == "runs"
    on_note(f"an earlier owner on {claim.host} is watched for {PATIENCE_SECONDS:.0f} s: is it still at work?")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, PATIENCE_SECONDS / 10))
        now = journal.last_beat(claim)
        if now != before:
            return not (now and now.released)
    return False


def _take(
    name: str,
    store: Store,
    asked: dict[str, Any],
    on_note: Callable[[str], None],
    *,
    must_exist: bool = False,
    partition: int | None = None,
) -> Extraction:
    journal = Journal(store, partition)
    last = journal.last_claim()
    if last is None and (must_exist or store.exists(MANIFEST_NAME)):
        raise ResumeRefused(
            f"{store.uri} holds no unfinished extraction (no claim): it was finished, or the URI is not right. "
            "`resume: auto` finds one by its name, `resume: new` begins one"
        )
    if last is not None:
        if different := differences(last.asked, asked):
            raise ResumeRefused(_other_spec(store.uri, different))
        if store.exists(MANIFEST_NAME):
            return Extraction(name, store, last, committed=read_manifest(store.uri, store))
        if is_at_work(journal, last, on_note):
            raise ResumeRefused(
                f"{store.uri} is being extracted by process {last.pid} on {last.host}: two extractions cannot write to "
                "one place. Wait for it, or end it and start this one again, which goes on from there; an extraction "
                "of its own needs another name"
            )
    run = flow_run.id
    claim = Claim.of_this_process(
        last.number + 1 if last else 0, asked, partition=partition, run=str(run) if run else None
    )
    journal.claim(claim)
    done, remarks = journal.done()
    return Extraction(name, store, claim, tuple(done), tuple(remarks))


def _mind_others(
    params: ExtractParams,
    root: Store,
    own: str,
    asked: dict[str, Any],
    settings: Settings,
    on_note: Callable[[str], None],
) -> None:
    """Refuse where other parameters would leave verified shards behind unseen; with `new` they are left, and named."""
    for key, _ in root.list(_unfinished(params.name)):
        if key == own and params.resume == "auto":
            continue
        store = open_store(_read_pointer(root, key, params.name), settings)
        claim = Journal(store).last_claim()
        if claim is None or claim.process() == "runs" or store.exists(MANIFEST_NAME):
            continue
        journal = Journal(store)
        shards = sum(len(part.done()[0]) for part in (journal, *journal.partitions()))
        if params.resume == "new":
            on_note(f"an unfinished extraction with {shards} verified shards stays at {store.uri}")
            if key != own:
                root.delete(key)
        elif shards:
            raise ResumeRefused(_other_spec(store.uri, differences(claim.asked, asked), shards))


def _other_spec(uri: str, different: Sequence[str], shards: int | None = None) -> str:
    held = f" and holds {shards} verified shards" if shards is not None else ""
    return (
        f"the unfinished extraction at {uri} asked for something else{held}:\n- " + "\n- ".join(different) + "\nSet "
        "these back, and it goes on; to leave it and begin anew, set `resume` to new, or choose another name"
    )


def _unfinished(name: str) -> str:
    return f"dumps/{name}/unfinished/"


def _read_pointer(root: Store, key: str, name: str) -> str:
    try:
        uri = _Pointer.model_validate_json(root.get_bytes(key, max_bytes=_MAX_POINTER_BYTES)).uri
    except ValidationError:
        uri = ""
    home = f"{root.uri}/dumps/{name}/"
    if not uri.startswith(home) or "/" in uri.removeprefix(home) or uri.removeprefix(home) in {"", ".", ".."}:
        raise JournalError(f"{root.uri_of(key)} does not name an extraction under {home}: it was changed. Remove it")
    return uri


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."
