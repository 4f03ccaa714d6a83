"""speculators' samples: `hs_<i>.safetensors`, what vLLM's hidden-states connector wrote for row i of the dataset.

`hidden_states` [T, L, H] and `token_ids` [T] (src/speculators/train/data.py of speculators 0.9.0, `loaded_hs`;
hs_connectors/transfer.py, `FileTransfer`). The last of the L states is vLLM's boundary N, the last layer's output
before the final norm, which speculators applies itself (scripts/launch_vllm.py appends N to the ids); the others are
the boundaries of `--target-layer-ids`, by default 2, N//2, N-3, and stand nowhere in the file. With the FP8 connector
the states are float8 with one scale a token in `hidden_states_scales` [T, 1, 1] (hs_connectors/fp8_utils.py).
"""

from pathlib import Path

import torch

from eagle3.dump.content import dtype_name
from eagle3.dump.foreign.layout import LAST_LAYER, Layout, name_of
from eagle3.dump.foreign.loading import load_safetensors
from eagle3.dump.foreign.sample import FINAL, ForeignSample, make_sample
from eagle3.dump.manifest import DumpError

_STATES, _IDS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_PATTERN = "hs_*.safetensors"


def find(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.match(_PATTERN) else []
    found = list(path.glob(_PATTERN)) or list(path.glob(f"hidden_states/{_PATTERN}"))
    return sorted(found, key=lambda file: (len(file.name), file.name))  # hs_2 before hs_10


def read(file: Path, root: Path) -> ForeignSample:
    held = load_safetensors(file, (_STATES, _IDS), optional=(_SCALES,))
    states = held[_STATES]
    if states.ndim != 3 or not states.is_floating_point():
        raise DumpError(
            f"{file}: {_STATES} must be floating-point [T, layers, H], found {dtype_name(states.dtype)} "
            f"{list(states.shape)}"
        )
    if _SCALES in held:
        states = _dequantized(states, held[_SCALES], str(file))
    slots = list(states.unbind(1))
    return make_sample(name_of(file, root), str(file), held[_IDS], slots[:-1], slots[-1] if slots else None)


def _dequantized(states: torch.Tensor, scales: torch.Tensor, where: str) -> torch.Tensor:
    if not scales.is_floating_point() or tuple(scales.shape) != (len(states), 1, 1):
        raise DumpError(
            f"{where}: {_SCALES} must be floating-point [{len(states)}, 1, 1], found {dtype_name(scales.dtype)} "
            f"{list(scales.shape)}"
        )
    return states.float() * scales.float()


LAYOUT = Layout(
    name="speculators",
    made_by="speculators (vLLM's hidden-states connector)",
    looks_for="hs_<i>.safetensors in the folder or in its folder hidden_states, with hidden_states and token_ids",
    find=find,
    read=read,
    claimed={FINAL: LAST_LAYER},
    claimed_by="speculators applies the final norm to the last state itself; the files name no layers",
)
