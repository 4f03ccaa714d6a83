"""A dump that somebody else made: which layout it is, and its samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.capture import CapturePoint
from eagle3.dump.content import dtype_name
from eagle3.dump.foreign import model_optimizer, request_folders, specforge, speculators, state_list
from eagle3.dump.foreign.layout import Layout
from eagle3.dump.foreign.sample import ForeignSample, ids_in, token_ids
from eagle3.dump.manifest import DumpError

LAYOUTS: Mapping[str, Layout] = {
    module.LAYOUT.name: module.LAYOUT
    for module in (request_folders, specforge, speculators, model_optimizer, state_list)
}
_MAX_LINE_BYTES = 64 * 2**20

Ids = Mapping[str, Sequence[int]] | Sequence[Sequence[int]]


class UnknownLayout(DumpError):
    """A path that holds nothing that is known."""


class ForeignDump:
    """Samples of one layout, read one at a time. Every sample has the same slots, of the same width and dtype."""

    def __init__(self, path: Path, layout: Layout, items: list[Path], ids: Ids | None = None) -> None:
        self.path, self.layout, self._items, self._ids = path, layout, items, ids
        if ids is not None and not isinstance(ids, Mapping) and len(ids) != len(items):
            raise DumpError(f"{len(ids)} lines of ids for the {len(items)} samples of {path}: give each its `id`")
        first = self.sample(0)
        state = next(iter(first.states.values()))
        self.labels: tuple[str, ...] = tuple(first.states)
        self.hidden_size = int(state.shape[1])
        self.dtype = dtype_name(state.dtype)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ForeignSample]:
        return (self.sample(index) for index in range(len(self)))

    def sample(self, index: int) -> ForeignSample:
        """The sample at that place in order of its path. DumpError where its slots are not those of the first one."""
        sample = self.layout.read(self._items[index], self.path)
        if self._ids is not None:
            given = self._ids.get(sample.id) if isinstance(self._ids, Mapping) else self._ids[index]
            if given is not None:
                sample = replace(sample, input_ids=token_ids(given, sample.rows, f"the ids given for {sample.id!r}"))
        if index:
            state = next(iter(sample.states.values()))
            found = (tuple(sample.states), int(state.shape[1]), dtype_name(state.dtype))
            if found != (self.labels, self.hidden_size, self.dtype):
                raise DumpError(
                    f"{sample.where} has {', '.join(found[0])}, {found[1]} wide, {found[2]}; the first sample has "
                    f"{', '.join(self.labels)}, {self.hidden_size} wide, {self.dtype}: they are of different dumps"
                )
        return sample

    def claims(self, num_layers: int) -> dict[str, CapturePoint | None]:
        """What the layout says of each slot, for a target of that depth; None where it says nothing."""
        return {label: self.layout.claim(label, num_layers) for label in self.labels}


def open_foreign(path: Path, *, layout: str | None = None, ids: Path | None = None) -> ForeignDump:
    """Open somebody else's dump; `layout` (a key of LAYOUTS) skips the recognition, `ids` is a file of token ids.

    Raises UnknownLayout with what was looked for, ForeignPickle where a file names code to run, DumpError where a file
    is damaged or its tensors cannot be what the layout says.
    """
    if not path.exists():
        raise UnknownLayout(f"{path} does not exist")
    if layout is not None and layout not in LAYOUTS:
        raise UnknownLayout(f"there is no layout {layout!r}: known are {', '.join(LAYOUTS)}")
    tried = [LAYOUTS[layout]] if layout else list(LAYOUTS.values())
    given = read_ids(ids) if ids else None
    for candidate in tried:
        items = candidate.find(path)
        if items:
            return ForeignDump(path, candidate, items, given)
    looked_for = "; ".join(f"{candidate.name}: {candidate.looks_for}" for candidate in tried)
    raise UnknownLayout(
        f"{path} is no dump that is known here. Looked for a manifest.json (our own), {looked_for}. It {_held(path)}"
    )


def read_ids(path: Path) -> Ids:
    """Token ids from JSON lines: objects with `input_ids` (or token_ids) and the sample's `id`; without, in order."""
    named: dict[str, list[int]] = {}
    in_order: list[list[int]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                value: Any = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
                found = ids_in(value) if isinstance(value, dict) else None
                if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
                    raise DumpError(
                        f'{path}, line {number}: expected {{"id": "...", "input_ids": [1, 2, ...]}} with whole numbers'
                    )
                if "id" in value:
                    named[str(value["id"])] = found
                else:
                    in_order.append(found)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"{path} is no file of token ids: {error}") from None
    if bool(named) == bool(in_order):
        raise DumpError(f"{path}: either every line has an `id` or none, and there is at least one")
    return named or in_order


def _held(path: Path) -> str:
    if path.is_file():
        return f"is a file of {path.stat().st_size} bytes"
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"holds {', '.join(names[:8]) or 'nothing'}{more}"
