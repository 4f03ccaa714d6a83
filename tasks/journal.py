"""The journal of an extraction: what is known to be done, kept in the store beside the shards.

    <dump>/extraction/claim-000000.json   who extracts, and what was asked; each later owner adds the next number
    <dump>/extraction/beat-000000.json    that owner is at work; written again and again
    <dump>/extraction/served.json         the server that the first owner used, and its probe
    <dump>/extraction/done/<shard>.json   a shard that was stored and verified, and the samples in it
    <dump>/extraction/part-000/...        the same of a partition, where the extraction was split: each has its own

Claims are written where nothing is, so of two owners with the same number one is refused. The files of each owner have
names of their own: an owner that was taken for dead and is not can spoil nothing, and ends at its next shard.
"""

import os
import re
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.digests import sha256_json
from eagle3.dump.manifest import EngineRecord, FileEntry, Generation, SampleRecord, ShardEntry
from eagle3.errors import Eagle3Error, first_fault
from infra.store import AlreadyExists, MissingObject, Store
from tasks.fields import MAX_PARTITIONS

FOLDER = "extraction"
_CLAIM = re.compile(r"claim-(\d{6})\.json")
_PARTITION = re.compile(rf"{FOLDER}/part-(\d{{3}})/.+")
_MAX_SMALL_BYTES = 2**20
_MAX_DONE_BYTES = 2**28  # 500 bytes for each sample of a shard

StateType = Literal["float32", "bfloat16", "float16"]
_Model = TypeVar("_Model", bound=BaseModel)


class JournalError(Eagle3Error):
    """An extraction that cannot go on as it stands in the store: another one owns it, or its journal is damaged."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Entry):
    """Who extracts into this prefix, and what was asked."""

    number: int = Field(ge=0, description="0 for the first owner, one more for each that resumed")
    owner: str
    asked: dict[str, Any] = Field(description="`tasks.asked`: by field, what decides whether a dump is the same")
    host: str
    machine: str = Field(description="Changes when the machine is started again")
    pid: int
    started: float = Field(description="Of the process, seconds since the epoch")
    partition: int | None = Field(None, ge=0, lt=MAX_PARTITIONS, description="Of an extraction that was split")
    run: str | None = Field(None, description="Prefect's id of its flow run")

    @classmethod
    def of_this_process(
        cls, number: int, asked: dict[str, Any], *, partition: int | None = None, run: str | None = None
    ) -> Self:
        return cls(
            number=number,
            partition=partition,
            run=run,
            owner=uuid.uuid4().hex,
            asked=asked,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )

    @property
    def digest(self) -> str:
        return sha256_json(self.asked)

    @property
    def stem(self) -> str:
        """How the names of this owner's shards begin."""
        return f"shard{self._mark}"

    def own_name(self, name: str) -> str:
        """The name of a file that every owner would write, `samples.jsonl`, as this owner writes it."""
        stem, dot, suffix = name.partition(".")
        return f"{stem}{self._mark}{dot}{suffix}"

    @property
    def _mark(self) -> str:
        return partition_mark(self.partition) + (f"-r{self.number}" if self.number else "")

    def process(self) -> Literal["runs", "ended", "unknown"]:
        """Whether the owner's process still runs, as far as this machine can tell."""
        if self.machine != this_machine() or self.pid == os.getpid():
            return "unknown"
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 2.0  # seconds; the clock may be set
            return "runs" if same and process.status() != psutil.STATUS_ZOMBIE else "ended"
        except psutil.Error:
            return "ended"


class Beat(_Entry):
    """That an owner is at work (`count` goes up), or that it has stopped by itself."""

    count: int = Field(ge=0)
    released: bool = False


class Served(_Entry):
    """The server that captured: its record for the manifest. Another one may go on only if it captures the same."""

    engine: EngineRecord
    generation: Generation
    probe: FileEntry | None


class ShardDone(_Entry):
    """A shard that was stored and verified."""

    number: int = Field(ge=0, description="Of the claim under which it was written")
    dtype: StateType
    shard: ShardEntry
    records: tuple[SampleRecord, ...] = Field(min_length=1)


class Journal:
    """Reads and writes the journal of the extraction at `store`. Methods raise StoreError, and JournalError.

    That of a partition is a folder below; its shards lie beside those of the others, under names of their own.
    """

    def __init__(self, store: Store, partition: int | None = None) -> None:
        self.store, self._partition = store, partition
        self._folder = FOLDER if partition is None else f"{FOLDER}/part-{partition:03d}"
        self._done, self._served = f"{self._folder}/done/", f"{self._folder}/served.json"

    def partitions(self) -> list["Journal"]:
        """The journals of the partitions that were begun here, by number."""
        found = (_PARTITION.fullmatch(key) for key, _ in self.store.list(f"{FOLDER}/part-"))
        return [Journal(self.store, number) for number in sorted({int(match[1]) for match in found if match})]

    def last_claim(self) -> Claim | None:
        """The claim that counts: the one with the highest number."""
        return next(iter(self._claims(self._claim_numbers()[-1:])), None)

    def claims(self) -> list[Claim]:
        """Every owner that this extraction has had, in order."""
        return self._claims(self._claim_numbers())

    def claim(self, claim: Claim) -> None:
        """Take the extraction; JournalError where another process was faster."""
        try:
            self.store.put_bytes(self._claim_key(claim.number), _bytes(claim), if_absent=True)
        except AlreadyExists:
            raise JournalError(
                f"{self.store.uri}: another process took this extraction at the same moment. Wait for it, or give "
                "yours another name"
            ) from None

    def check_still_mine(self, claim: Claim) -> None:
        """JournalError where a later owner has taken the extraction over, or even finished it."""
        if self.store.exists(self._claim_key(claim.number + 1)) or not self.store.exists(self._claim_key(claim.number)):
            raise JournalError(
                f"{self.store.uri}: another process has taken this extraction over, so this one stops; nothing of it "
                "is mixed in. It happens where this process did not reach the store for a while"
            )

    def beat(self, claim: Claim, beat: Beat) -> None:
        self.store.put_bytes(self._beat_key(claim.number), _bytes(beat))

    def last_beat(self, claim: Claim) -> Beat | None:
        try:
            return self._read(Beat, self._beat_key(claim.number), _MAX_SMALL_BYTES)
        except MissingObject:
            return None

    def served(self) -> Served | None:
        """What the first owner noted of its server; None where it did not come so far."""
        try:
            return self._read(Served, self._served, _MAX_SMALL_BYTES)
        except MissingObject:
            return None

    def note_served(self, served: Served) -> None:
        try:
            self.store.put_bytes(self._served, _bytes(served), if_absent=True)
        except AlreadyExists:
            raise JournalError(f"{self.store.uri}: another process notes its server here, so this one stops") from None

    def note_done(self, done: ShardDone) -> None:
        """A shard is stored and verified: its samples need not be captured again."""
        self.store.put_bytes(f"{self._done}{done.shard.name}.json", _bytes(done), if_absent=True)

    def done(self) -> tuple[list[ShardDone], list[str]]:
        """The shards that count, in order of owner and number, and sentences on those that do not.

        One that is missing in the store, has another size, or repeats a sample does not count. Nothing is read again:
        its digest was compared when it was stored, and is again by whoever fetches the dump.
        """
        sizes = dict(self.store.list(f"shard{partition_mark(self._partition)}-"))
        noted = [
            self._read(ShardDone, key, _MAX_DONE_BYTES)
            for key, _ in self.store.list(self._done)
            if key.endswith(".safetensors.json")
        ]
        kept: list[ShardDone] = []
        told: list[str] = []
        seen: set[str] = set()
        for done in sorted(noted, key=lambda done: (done.number, done.shard.name)):
            ids = [record.id for record in done.records]
            rows = sum(record.rows for record in done.records)
            wrong = [
                file
                for file in (done.shard, *([done.shard.answers] if done.shard.answers else []))
                if sizes.get(file.name) != file.bytes
            ]
            if (len(ids), rows) != (done.shard.samples, done.shard.tokens):
                raise JournalError(
                    f"{self.store.uri_of(self._done + done.shard.name)}.json does not list the {done.shard.samples} "
                    "samples of its shard: it was changed. Remove it, and its samples are captured again"
                )
            if wrong:
                size = sizes.get(wrong[0].name)
                what = "is gone" if size is None else f"has {size} bytes instead of {wrong[0].bytes}"
                told.append(f"{self.store.uri_of(wrong[0].name)} {what}: its {len(ids)} samples are captured again")
            elif seen.intersection(ids) or len(set(ids)) < len(ids):
                told.append(f"{self.store.uri_of(done.shard.name)} repeats samples of other shards: it is left out")
            else:
                kept.append(done)
                seen.update(ids)
        return kept, told

    def forget(self, keep: Sequence[str]) -> None:
        """After the commit: remove the journal, and shards, lists and probes that the manifest does not name (`keep`).

        With its partitions, where it has any; of a partition's only its own. The claims go last: until then the
        extraction is known to be one.
        """
        mark = partition_mark(self._partition)
        for prefix in (f"shard{mark}-", f"samples{mark}", f"probe{mark}"):
            for key, _ in self.store.list(prefix):
                if key not in keep and "/" not in key:
                    self.store.delete(key)
        keys = [key for key, _ in self.store.list(f"{self._folder}/")]
        for key in sorted(keys, key=lambda key: (self._claim(key) is not None, key)):
            self.store.delete(key)

    def _claims(self, numbers: Sequence[int]) -> list[Claim]:
        return [self._read(Claim, self._claim_key(number), _MAX_SMALL_BYTES) for number in numbers]

    def _claim_numbers(self) -> list[int]:
        found = (self._claim(key) for key, _ in self.store.list(f"{self._folder}/claim-"))
        return sorted(int(match[1]) for match in found if match)

    def _claim(self, key: str) -> re.Match[str] | None:
        return _CLAIM.fullmatch(key.removeprefix(f"{self._folder}/"))

    def _claim_key(self, number: int) -> str:
        return f"{self._folder}/claim-{number:06d}.json"

    def _beat_key(self, number: int) -> str:
        return f"{self._folder}/beat-{number:06d}.json"

    def _read(self, model: type[_Model], key: str, max_bytes: int) -> _Model:
        data = self.store.get_bytes(key, max_bytes=max_bytes)
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            field, what = first_fault(error)
            raise JournalError(
                f"{self.store.uri_of(key)} is not what an extraction writes: {field}: {what}. It was changed, "
                "or written by another version of this software: finish with that one, or start anew (resume: new)"
            ) from None


def this_machine() -> str:
    """The running system and its space of process ids: a pid means something only there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def partition_mark(partition: int | None) -> str:
    """In the names of a partition's files. All of one width: no name of one begins as another's do."""
    return "" if partition is None else f"-p{partition:03d}"


def _bytes(entry: BaseModel) -> bytes:
    return entry.model_dump_json().encode()
