"""Dumps in a store: which there are, who needs them, which may go.

A dump is a prefix with a manifest.json whose files are there. What an extraction or a copy left without one is an
uncommitted leftover. Anything else is somebody else's and is never touched.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DumpError, Manifest
from infra.settings import Settings
from infra.store import Store, Stored, open_store
from tasks.artifacts import read_manifest
from tasks.journal import FOLDER as _JOURNAL

if TYPE_CHECKING:
    from infra.lineage import DumpUse

Progress = Callable[[int, int], None]
"""(objects done, objects in all)"""

_OURS = re.compile(
    r"(shard-[\w.-]+\.safetensors|shard-[\w.-]+\.answers\.jsonl|samples[\w-]*\.jsonl|probe[\w-]*\.safetensors)"
)
# The journal's own files and no others: a name of extractions may be "extraction" too.
_JOURNAL_FILE = re.compile(
    rf"(?:(.*)/)?{_JOURNAL}/(?:part-\d{{3}}/)?(?:(?:claim|beat)-\d{{6}}\.json|served\.json|done/shard-[\w.-]+\.json)"
)
_READERS = 8
LEFTOVER_AGE = timedelta(days=7)


class StoredDump(BaseModel):
    """What lies at one prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    state: Literal["committed", "uncommitted", "damaged", "unreadable"]
    problem: str = Field("", description="Of a damaged or unreadable one")
    created: datetime | None = Field(None, description="By its manifest")
    written: datetime = Field(description="Its newest object, by the store's clock")
    bytes: int = Field(description="Of all objects of ours at the prefix")
    num_objects: int
    num_foreign: int = Field(0, description="Objects at the prefix that no extraction writes")
    sha256: str | None = Field(None, description="Manifest digest")
    points: tuple[str, ...] = ()
    num_samples: int | None = None
    num_tokens: int | None = None
    used_by: tuple[str, ...] = Field((), description="Registered drafters that rest on it, where MLflow was asked")

    @property
    def group(self) -> str:
        """The prefix above it: the extractions of one name lie side by side."""
        return self.uri.rpartition("/")[0]

    @property
    def when(self) -> datetime:
        return self.created or self.written


@dataclass(frozen=True)
class PruneRule:
    """What may go: committed dumps that are old enough and not among the last of their name, or leftovers instead."""

    older_than: timedelta | None = None
    keep_last: int | None = None
    uncommitted: bool = False


class Pruned(BaseModel):
    """What was, or would be, removed, and what was kept although the rule names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    removed: tuple[StoredDump, ...]
    kept: tuple[StoredDump, ...] = Field(description="Named by a registered drafter's lineage, or changed meanwhile")
    bytes: int
    done: bool = Field(description="False: a dry run, nothing was removed")


def find_dumps(root: str, settings: Settings) -> list[StoredDump]:
    """Dumps and leftovers below `root` (or at it), by URI. Reads the listing and the manifests alone."""
    store = open_store(root, settings)
    entries = list(store.entries())
    manifests = {_parent(entry.key) for entry in entries if _leaf(entry.key) == MANIFEST_NAME}
    groups: dict[str, list[Stored]] = defaultdict(list)
    for entry in entries:
        groups[_prefix_of(entry.key, manifests)].append(entry)
    with ThreadPoolExecutor(_READERS) as pool:
        looked = pool.map(lambda prefix: _look(store, prefix, groups[prefix], settings), sorted(groups))
        return [dump for dump in looked if dump is not None]


def with_users(dumps: Sequence[StoredDump], uses: "Sequence[DumpUse]") -> list[StoredDump]:
    """The same with the registered drafters that name them, by URI or by the manifest's digest."""
    return [dump.model_copy(update={"used_by": users_of(dump.uri, dump.sha256, uses)}) for dump in dumps]


def users_of(uri: str, sha256: str | None, uses: "Sequence[DumpUse]") -> tuple[str, ...]:
    """Who names this dump, by URI or by the manifest's digest (None: it has no manifest)."""
    found = (use for use in uses if use.uri.rstrip("/") == uri or (sha256 is not None and use.sha256 == sha256))
    return tuple(dict.fromkeys(map(str, found)))


def dump_uses(settings: Settings) -> "tuple[DumpUse, ...]":
    """Which dumps registered drafters rest on. MissingSetting or LineageError where MLflow cannot be asked."""
    from infra.lineage import Lineage

    return Lineage(settings.mlflow_uri()).dump_uses()


def chosen(dumps: Sequence[StoredDump], rule: PruneRule, now: datetime) -> list[StoredDump]:
    """What the rule names. Damaged and unreadable ones are for a person to look at."""
    if rule.uncommitted:
        age = LEFTOVER_AGE if rule.older_than is None else rule.older_than
        return [dump for dump in dumps if dump.state == "uncommitted" and now - dump.written >= age]
    by_group: dict[str, list[StoredDump]] = defaultdict(list)
    for dump in sorted(dumps, key=lambda dump: dump.when, reverse=True):
        if dump.state == "committed":
            by_group[dump.group].append(dump)
    earlier = [dump for group in by_group.values() for dump in group[rule.keep_last or 0 :]]
    age = rule.older_than or timedelta(0)
    return sorted((dump for dump in earlier if now - dump.when >= age), key=lambda dump: dump.uri)


def prune(
    dumps: Sequence[StoredDump],
    rule: PruneRule,
    settings: Settings,
    *,
    force: bool,
    really: bool,
    on_progress: Progress = lambda _done, _total: None,
) -> Pruned:
    """Remove what the rule names; with `really` False only say what that is.

    A dump that a registered drafter names (`used_by`) is kept unless `force`. The manifest goes first, so that what is
    half removed is no dump. A leftover that was written to or committed meanwhile is kept.
    """
    picked = chosen(dumps, rule, datetime.now(UTC))
    kept = [] if force else [dump for dump in picked if dump.used_by]
    free = [dump for dump in picked if dump not in kept]
    removed = []
    total, done = sum(dump.num_objects for dump in free), 0
    for dump in free:
        if really and not _remove(dump, settings):
            kept.append(dump)
        else:
            removed.append(dump)
        done += dump.num_objects
        on_progress(done, total)
    return Pruned(removed=tuple(removed), kept=tuple(kept), bytes=sum(dump.bytes for dump in removed), done=really)


def _remove(dump: StoredDump, settings: Settings) -> bool:
    """Whether it was removed: not where it is no longer what was listed."""
    store = open_store(dump.uri, settings)
    entries = list(store.entries())
    named: set[str] = set()
    if dump.state == "committed":
        manifest = read_manifest(dump.uri, store)
        if manifest.digest() != dump.sha256:
            return False
        named = {entry.name for entry in manifest.files}
        store.delete(MANIFEST_NAME)
    elif any(entry.key == MANIFEST_NAME or entry.modified > dump.written for entry in entries):
        return False
    ours = [entry.key for entry in entries if entry.key in named or _is_ours(entry.key)]
    for key in sorted(ours, key=lambda key: (key.startswith(f"{_JOURNAL}/claim-"), key)):
        store.delete(key)  # the claims last: until then it is known to be an extraction
    return True


def _look(store: Store, prefix: str, entries: Sequence[Stored], settings: Settings) -> StoredDump | None:
    """What the objects of one prefix are; None where none of them is ours."""
    uri = store.uri_of(prefix) if prefix else store.uri
    sizes = {entry.key.removeprefix(f"{prefix}/" if prefix else ""): entry.bytes for entry in entries}
    facts = {"uri": uri, "written": max(entry.modified for entry in entries)}
    if MANIFEST_NAME not in sizes:
        ours = [key for key in sizes if _is_ours(key)]
        if not ours:
            return None
        return StoredDump(
            **facts,
            state="uncommitted",
            bytes=sum(sizes[key] for key in ours),
            num_objects=len(ours),
            num_foreign=len(sizes) - len(ours),
        )
    everything = {"bytes": sum(sizes.values()), "num_objects": len(sizes)}
    if (size := sizes[MANIFEST_NAME]) > MAX_MANIFEST_BYTES:
        return StoredDump(**facts, **everything, state="unreadable", problem=f"its {MANIFEST_NAME} has {size} bytes")
    try:
        manifest = read_manifest(uri, open_store(uri, settings))
    except DumpError as error:
        return StoredDump(**facts, **everything, state="unreadable", problem=str(error))
    broken = [entry.name for entry in manifest.files if sizes.get(entry.name) != entry.bytes]
    ours = [key for key in sizes if _is_named(key, manifest) or _is_ours(key)]
    return StoredDump(
        **facts,
        state="damaged" if broken else "committed",
        problem=f"missing or of another size: {', '.join(broken[:3])} ({len(broken)} in all)" if broken else "",
        created=manifest.created_at,
        bytes=sum(sizes[key] for key in ours),
        num_objects=len(ours),
        num_foreign=len(sizes) - len(ours),
        sha256=manifest.digest(),
        points=tuple(manifest.spec.points),
        num_samples=manifest.num_samples,
        num_tokens=manifest.num_tokens,
    )


def _prefix_of(key: str, manifests: set[str]) -> str:
    """The dump or leftover that an object belongs to: the outermost prefix with a manifest, else by its own name."""
    parts = key.split("/")
    for depth in range(len(parts)):
        if (prefix := "/".join(parts[:depth])) in manifests:
            return prefix
    journal = _JOURNAL_FILE.fullmatch(key)
    return (journal[1] or "") if journal else _parent(key)


def _is_named(key: str, manifest: Manifest) -> bool:
    return key == MANIFEST_NAME or any(key == entry.name for entry in manifest.files)


def _is_ours(key: str) -> bool:
    journal = _JOURNAL_FILE.fullmatch(key)
    return (journal is not None and journal[1] is None) or _OURS.fullmatch(key) is not None


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _leaf(key: str) -> str:
    return key.rpartition("/")[2]
