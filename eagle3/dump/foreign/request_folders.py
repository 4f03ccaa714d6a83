"""Our own dumps of before: a folder for each request with `aux_0.pt`, `aux_1.pt`, `aux_2.pt` and the final state.

Each file is one tensor [T, H]. Taken from SGLang, whose final state is the one after the final norm. Which layers the
numbers 0, 1, 2 stand for is written nowhere in them.
"""

from pathlib import Path
from typing import Any

from eagle3.dump.foreign.layout import Layout, name_of
from eagle3.dump.foreign.loading import load_saved
from eagle3.dump.foreign.sample import FINAL, ID_KEYS, ForeignSample, ids_in, make_sample, read_json
from eagle3.dump.manifest import DumpError

FINAL_NAMES = tuple(
    f"{name}.pt"
    for name in (
        *("final", "final_hidden", "final_hidden_state", "final_hidden_states", "final_state"),
        *("last", "last_hidden", "last_hidden_state", "last_hidden_states"),
        *("hidden", "hidden_state", "hidden_states", "norm"),
    )
)
ID_NAMES = tuple(f"{key}.{suffix}" for key in ID_KEYS for suffix in ("pt", "json"))


def find(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    if (path / "aux_0.pt").is_file():
        return [path]
    return sorted(folder for folder in path.iterdir() if (folder / "aux_0.pt").is_file())


def read(folder: Path, root: Path) -> ForeignSample:
    held = sorted(file.name for file in folder.iterdir() if file.is_file())
    count = sum(name.startswith("aux_") and name.endswith(".pt") for name in held)
    missing = [name for name in (f"aux_{i}.pt" for i in range(count)) if name not in held]
    if missing:
        raise DumpError(
            f"{folder} has {count} aux files but no {', '.join(missing)}: which slots they are is not known"
        )
    finals = [name for name in FINAL_NAMES if name in held]
    if len(finals) != 1:
        raise DumpError(
            f"{folder} needs one file with the final state; expected one of {', '.join(FINAL_NAMES)}, found "
            f"{', '.join(finals) or 'none'} among {', '.join(held)[:300]}. Rename the right one to final.pt"
        )
    aux = [load_saved(folder / f"aux_{i}.pt") for i in range(count)]
    return make_sample(name_of(folder, root), str(folder), _ids(folder, held), aux, load_saved(folder / finals[0]))


def _ids(folder: Path, held: list[str]) -> Any | None:
    names = [name for name in ID_NAMES if name in held]
    if len(names) > 1:
        raise DumpError(f"{folder} has several files with token ids: {', '.join(names)}. Leave the right one")
    if not names:
        return None
    path = folder / names[0]
    return ids_in(read_json(path) if path.suffix == ".json" else load_saved(path))


LAYOUT = Layout(
    name="request-folders",
    made_by="our own dumps before this project",
    looks_for="aux_0.pt, aux_1.pt, ... and a final state in the folder or in each of its folders",
    find=find,
    read=read,
    claimed={FINAL: "norm"},
    claimed_by="SGLang's final state is the one after the final norm; the aux files name no layers",
)
