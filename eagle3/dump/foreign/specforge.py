"""SpecForge's rows: a `.ckpt` (or `.ckpt.gz`) for each sample, written by `scripts/prepare_hidden_states.py`.

A dict of `torch.save`: `input_ids` [T], `loss_mask` [T], `hidden_state` [1, T, H] and, with
`--enable-aux-hidden-states`, `aux_hidden_state` [1, T, k * H]; in folders `rows_0-5000/data_<i>.ckpt`. `hidden_state`
is SGLang's `last_hidden_states`, which went through the final norm, and training uses it as such (`target` in
specforge/data/preprocessing.py of SpecForge 0.2.0, `process_offline_eagle3_sample`). The layers come from
`--aux-hidden-states-layers`, by default 1, N//2-1, N-4, and are not written into the rows. SpecForge itself opens these
files with `weights_only=False` (specforge/runtime/data_plane/feature_store.py); here they are not executed.
"""

from pathlib import Path

from eagle3.dump.foreign.layout import Layout, name_of
from eagle3.dump.foreign.loading import load_dict
from eagle3.dump.foreign.sample import FINAL, ForeignSample, make_sample, split_width, state_rows

_SUFFIXES = (".ckpt", ".ckpt.gz")
_EXPECTED = "a row of SpecForge: expected a dict with input_ids, loss_mask, hidden_state and aux_hidden_state"


def find(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name.endswith(_SUFFIXES) else []
    return sorted(file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}"))


def read(file: Path, root: Path) -> ForeignSample:
    row = load_dict(file, "hidden_state", _EXPECTED)
    final = state_rows(row["hidden_state"], f"{file}, hidden_state")
    aux = row.get("aux_hidden_state")
    slots = [] if aux is None else split_width(aux, final.shape[1], f"{file}, aux_hidden_state")
    return make_sample(name_of(file, root), str(file), row.get("input_ids"), slots, final)


LAYOUT = Layout(
    name="specforge",
    made_by="SpecForge (scripts/prepare_hidden_states.py)",
    looks_for="*.ckpt or *.ckpt.gz at any depth, each a dict with input_ids, hidden_state and aux_hidden_state",
    find=find,
    read=read,
    claimed={FINAL: "norm"},
    claimed_by="SpecForge trains on hidden_state as the state after the final norm; its rows name no layers",
)
