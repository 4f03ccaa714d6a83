"""Dumps as a person asks about them: ours wherever they are published, other people's from the disk.

`open_dump` finds out which of the two a name is, `describe` says what it is, `compare` what sets two apart;
`tasks.dump_attribution` says which layers it holds.
"""

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import MANIFEST_NAME, FileEntry
from infra.settings import Settings
from infra.store import Store, open_store
from tasks.artifacts import CannotCheck, read_manifest

if TYPE_CHECKING:
    from eagle3.dump.foreign import ForeignDump
    from eagle3.dump.probe import Probe
    from eagle3.dump.reader import DumpReader
    from eagle3.dump.slots import SlotSample
    from eagle3.evidence.compare import Comparison

Progress = Callable[[int, int], None]
"""(samples done, samples in all)"""


class OpenedDump(Protocol):
    """A dump, whoever made it: its slots in order, and its samples."""

    where: str
    layout: str
    made_by: str
    claimed_by: str
    labels: tuple[str, ...]
    num_aux: int
    hidden_size: int
    dtype: str
    num_samples: int

    def claims(self, num_layers: int) -> dict[str, CapturePoint | None]:
        """What is claimed of each slot, for a target of that depth; None: nothing."""

    def claim_in_words(self, label: str) -> str | None:
        """The same where the depth is not known."""

    def samples(self, settings: Settings) -> Iterator["SlotSample"]:
        """Every sample in order. DumpError for a damaged file, MissingIds where there are no token ids."""


class PublishedDump:
    """One of our own: a prefix with a manifest, in a store or in a folder."""

    layout, claimed_by = "eagle3", "its manifest"

    def __init__(self, uri: str, store: Store) -> None:
        self.where, self._store = uri, store
        self.manifest = read_manifest(uri, store)
        self.folder = Path(url2pathname(urlsplit(uri).path)) if uri.startswith("file://") else None
        self.made_by = f"this project, {self.manifest.created_at:%Y-%m-%d %H:%M} UTC"
        self.labels, self.num_aux = tuple(map(str, self.manifest.spec.points)), len(self.manifest.spec.aux)
        self.hidden_size, self.dtype = self.manifest.target.hidden_size, str(self.manifest.dtype)
        self.num_samples = self.manifest.num_samples

    def claims(self, _num_layers: int) -> dict[str, CapturePoint | None]:
        return {str(point): point for point in self.manifest.spec.points}

    def claim_in_words(self, label: str) -> str | None:
        return label

    @contextmanager
    def reader(self, files: Collection[FileEntry], settings: Settings) -> Iterator["DumpReader"]:
        """The dump with those files at hand, each compared with its digest; the others are not touched.

        DumpError or StoreCorrupt where a file is not the one that the manifest names.
        """
        from eagle3.dump.files import named_file
        from eagle3.dump.reader import DumpReader

        if self.folder is not None:
            for entry in files:
                named_file(self.folder, entry)
            yield DumpReader.open(self.folder, expect_sha256=self.manifest.digest())
            return
        parent = settings.root / "staging"
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="look-", dir=parent) as name:
            folder = Path(name)
            (folder / MANIFEST_NAME).write_bytes(self.manifest.canonical())
            for entry in (self.manifest.samples, *files):
                self._store.get_file(entry.name, folder / entry.name, sha256=entry.sha256, size=entry.bytes)
            yield DumpReader.open(folder, expect_sha256=self.manifest.digest())

    def samples(self, settings: Settings) -> Iterator["SlotSample"]:
        """With one shard at hand at a time."""
        for shard, entry in enumerate(self.manifest.shards):
            with self.reader([entry], settings) as reader:
                for index in reader.samples_of(shard):
                    yield reader.read(index).slots()

    def probe(self, settings: Settings) -> "Probe | None":
        """The probe that came with it; None where none did. DumpError or StoreCorrupt as `reader`."""
        from eagle3.dump.probe import read_dump_probe

        if self.manifest.probe is None:
            return None
        with self.reader([self.manifest.probe], settings) as reader:
            return read_dump_probe(reader.folder, self.manifest)


class OthersDump:
    """Somebody else's, on this machine's disk."""

    def __init__(self, dump: "ForeignDump") -> None:
        self.dump, self.where = dump, str(dump.path)
        self.layout, self.made_by, self.claimed_by = dump.layout.name, dump.layout.made_by, dump.layout.claimed_by
        self.labels = dump.labels
        self.num_aux = sum(label.startswith("aux_") for label in dump.labels)
        self.hidden_size, self.dtype, self.num_samples = dump.hidden_size, dump.dtype, len(dump)

    def claims(self, num_layers: int) -> dict[str, CapturePoint | None]:
        return self.dump.claims(num_layers)

    def claim_in_words(self, label: str) -> str | None:
        return self.dump.layout.claimed.get(label)

    def samples(self, _settings: Settings) -> Iterator["SlotSample"]:
        return (sample.slots() for sample in self.dump)


def open_dump(
    named: str, settings: Settings, *, layout: str | None = None, ids: Path | None = None
) -> PublishedDump | OthersDump:
    """Ours where there is a manifest, else one of the layouts of `eagle3.dump.foreign`; `layout` skips the manifest.

    Raises DumpError (UnknownLayout says what was looked for), StoreError, CannotCheck.
    """
    path = _path(named)
    if layout is None and (path is None or (path / MANIFEST_NAME).is_file()):
        uri = named.rstrip("/") if path is None else path.as_uri()
        return PublishedDump(uri, open_store(uri, settings))
    if path is None:
        raise CannotCheck(f"{named}: other people's dumps are read from this machine's disk. Copy it here first")
    from eagle3.dump.foreign import open_foreign

    return OthersDump(open_foreign(path, layout=layout, ids=ids))


def _path(named: str) -> Path | None:
    if "://" not in named:
        return Path(named).expanduser().resolve()
    return Path(url2pathname(urlsplit(named).path)) if named.startswith("file://") else None


def compare(
    first: OpenedDump, second: OpenedDump, settings: Settings, on_progress: Progress, *, accept_target: bool = False
) -> "Comparison":
    """Statistics of every slot side by side, and the rows of the samples that both hold.

    Slots pair by name; those of somebody else's dump take the names of ours in order, where both have as many. Raises
    CannotCheck where the two are not of one target (`accept_target` goes on where they are as wide) or have nothing in
    common, MissingIds, DumpError, StoreError.
    """
    from eagle3.dump.slots import SlotSample
    from eagle3.evidence.compare import compare_captures

    _check_one_target(first, second, accept=accept_target)
    ours = next((dump.labels for dump in (first, second) if isinstance(dump, PublishedDump)), ())
    total, done = first.num_samples + second.num_samples, 0

    def taken(dump: OpenedDump) -> dict[str, str]:
        """How this comparison calls the slots of a dump."""
        pairs = isinstance(dump, OthersDump) and len(ours) == len(dump.labels)
        return dict(zip(dump.labels, ours if pairs else dump.labels, strict=True))

    weights = {d.manifest.target.weights_sha256 for d in (first, second) if isinstance(d, PublishedDump)}

    def called(dump: OpenedDump) -> str:
        notes = [f"{label} as {name}" for label, name in taken(dump).items() if label != name]
        if isinstance(dump, PublishedDump) and len(weights) > 1:
            notes.append(f"its target's weights are {dump.manifest.target.weights_sha256[:12]}")
        return f"{dump.where} ({', '.join(notes)})" if notes else dump.where

    def samples(dump: OpenedDump) -> "Iterator[SlotSample]":
        nonlocal done
        names = taken(dump)
        for sample in dump.samples(settings):
            done += 1
            on_progress(done, total)
            states = {names[label]: state for label, state in sample.states.items()}
            yield SlotSample(id=sample.id, input_ids=sample.input_ids, states=states)

    comparison = compare_captures(
        samples(first), samples(second), dtypes=(first.dtype, second.dtype), names=(called(first), called(second))
    )
    if not comparison.compares_anything:
        raise CannotCheck(
            f"{first.where} holds {', '.join(first.labels)}, {second.where} {', '.join(second.labels)}: no slot has "
            "the same name in both, and no sequence stands in both, so there is nothing to compare"
        )
    return comparison


def _check_one_target(first: OpenedDump, second: OpenedDump, *, accept: bool) -> None:
    """CannotCheck with what differs, where the two dumps are not of one target. Only our own name their target."""
    if first.hidden_size != second.hidden_size:
        raise CannotCheck(
            f"the states of {first.where} are {first.hidden_size} wide, those of {second.where} {second.hidden_size}: "
            "they are of different targets, and there is nothing to compare"
        )
    if accept or not (isinstance(first, PublishedDump) and isinstance(second, PublishedDump)):
        return
    one, other = (dump.manifest.target.model_dump() for dump in (first, second))
    told = {
        "class": "model_class",
        "decoder layers": "num_layers",
        "vocabulary": "vocab_size",
        "digest of the weights": "weights_sha256",
    }
    differing = [
        f"{words} {_short(one[field])} against {_short(other[field])}"
        for words, field in told.items()
        if one[field] != other[field]
    ]
    if differing:
        raise CannotCheck(
            f"{first.where} ({one['name']}) and {second.where} ({other['name']}) are of different targets: "
            f"{'; '.join(differing)}. Their states cannot be alike. Where one is the other's quantised copy, "
            "--accept-target compares them all the same"
        )


def _short(value: object) -> str:
    """A digest's first digits; anything else that a manifest says of a target as it is."""
    text = str(value)
    return text[:12] if len(text) == 64 else text
