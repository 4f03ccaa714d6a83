"""The mistakes of the field, made on purpose: copies of a drafter's folder with one thing changed.

Everything else that the folder says stays as it was: what a hasty hand leaves behind.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LAYER_IDS = ("eagle_config", "eagle_aux_hidden_state_layer_ids")


def with_ids(folder: Path, copy: Path, ids: tuple[int, ...]) -> Path:
    """The same weights with another list of layer ids in config.json, where SGLang reads it."""
    copy.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[_LAYER_IDS[0]][_LAYER_IDS[1]] = list(ids)
    (copy / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (copy / "model.safetensors").symlink_to((folder / "model.safetensors").resolve())
    return copy


def with_tensors(folder: Path, copy: Path, tensors: "Mapping[str, torch.Tensor]") -> Path:
    """The same config.json with other weights."""
    from safetensors.torch import save_file

    copy.mkdir(parents=True)
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(dict(tensors), copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def exchanged(
    tensors: "Mapping[str, torch.Tensor]", num_slots: int, first: int, second: int
) -> "dict[str, torch.Tensor]":
    """The tensors with two slots' column blocks of `fc.weight` exchanged. SGLang captures in the order of the layers
    whatever the order of its ids, so this is how two slots are swapped there.
    """
    import torch

    blocks = list(tensors["fc.weight"].chunk(num_slots, dim=1))
    blocks[first], blocks[second] = blocks[second], blocks[first]
    return dict(tensors) | {"fc.weight": torch.cat(blocks, dim=1)}
