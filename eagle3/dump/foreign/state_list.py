"""A `.pt` that holds the list `[aux..., final]`, of which a script's comment says that `hs[0]` is the embedding.

The list of the story this project began with: the comment was wrong, the tensor was the output of layer 2. The list may
also lie under `hidden_states` of a dict, beside `input_ids`, as speculators' `VllmHiddenStatesGenerator` returned it
(read so by compute_hidden_states_vllm.py of NVIDIA/Model-Optimizer: the last entry is the output state, the others are
the aux layers). A bare list has no token ids: they come from a file beside it (`<name>.json` or `<name>_ids.pt`) or
from the command line.
"""

from pathlib import Path
from typing import Any

import torch

from eagle3.dump.foreign.layout import Layout, name_of
from eagle3.dump.foreign.loading import load_saved
from eagle3.dump.foreign.sample import ForeignSample, ids_in, make_sample, read_json
from eagle3.dump.manifest import DumpError

_IDS_SUFFIX = "_ids"


def saved_files(path: Path) -> list[Path]:
    """The `.pt` files at a path: itself, those in it, or those in its folders. Files of ids are not samples."""
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    if not path.is_dir():
        return []
    found = sorted(path.glob("*.pt")) or sorted(path.glob("*/*.pt"))
    return [file for file in found if not file.stem.endswith(_IDS_SUFFIX)]


def find(path: Path) -> list[Path]:
    files = saved_files(path)
    return files if files and _states(load_saved(files[0])) is not None else []


def read(file: Path, root: Path) -> ForeignSample:
    value = load_saved(file)
    states = _states(value)
    if states is None:
        raise DumpError(f"{file} holds no list of states, as the files beside it do; it holds a {type(value).__name__}")
    if len(states) < 2:
        raise DumpError(f"{file}: a list [aux..., final] has at least two states; this one has {len(states)}")
    ids = ids_in(value) if isinstance(value, dict) else _ids_beside(file)
    return make_sample(name_of(file, root), str(file), ids, states[:-1], states[-1])


def _states(value: Any) -> list[Any] | None:
    held = value.get("hidden_states") if isinstance(value, dict) else value
    if isinstance(held, list | tuple) and held and all(isinstance(state, torch.Tensor) for state in held):
        return list(held)
    return None


def _ids_beside(file: Path) -> Any | None:
    saved, written = file.with_name(f"{file.stem}{_IDS_SUFFIX}.pt"), file.with_suffix(".json")
    if saved.is_file():
        return ids_in(load_saved(saved))
    return ids_in(read_json(written)) if written.is_file() else None


LAYOUT = Layout(
    name="state-list",
    made_by="a script that saves the list [aux..., final]",
    looks_for="a .pt file, or a folder of them, each a list of tensors (or a dict whose `hidden_states` is one)",
    find=find,
    read=read,
    claimed={"aux_0": "embed"},
    claimed_by="the comment that calls the list's first entry the embedding; --claim says otherwise",
)
