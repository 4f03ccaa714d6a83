"""A drafter's folder as an engine would serve it, right or wrong: read for an audit.

`load_checkpoint` refuses whatever is inconsistent. An engine does not: it takes the layer ids, the tensors and the
flags that it finds, and is silent about the rest. So nothing is judged here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from eagle3.drafter.forms import IDS, eagle_config
from eagle3.drafter.tensors import (
    CheckpointError,
    memory_name,
    parse_object,
    read_header,
    read_limited,
    read_tensors,
    weights_digest,
)


@dataclass(frozen=True)
class ServedDrafter:
    """What config.json and model.safetensors hold, as SGLang 0.5.23 reads them (spec_aux_hidden_state.py,
    llama_eagle3.py, kimi_k25_eagle3.py)."""

    where: str
    architecture: str | None
    ids: tuple[int, ...] | None
    """`eagle_config.eagle_aux_hidden_state_layer_ids`; None where it is missing: the engine takes its default list."""
    norm: NormFlags
    tensors: Mapping[str, Tensor]
    """Under their names in memory: a layer that the file calls `layers.0` is `midlayer`."""

    def weights_sha256(self) -> str:
        """The digest that a contract holds of its drafter's named tensors."""
        return weights_digest(self.tensors)


def read_served(folder: Path) -> ServedDrafter:
    """Read a drafter's folder. CheckpointError where a file is missing or unreadable: nothing could be served then."""
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    config = parse_object(read_limited(config_path), where=str(config_path))
    eagle = eagle_config(config)
    architectures = config.get("architectures")
    read_header(weights_path)  # of a bounded size, before anything is mapped
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(weights_path).items():
        key = memory_name(name)
        tensors[name if key in tensors else key] = tensor  # a layer under both names keeps both
    return ServedDrafter(
        where=str(folder),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        ids=_ids(eagle, config_path),
        norm=NormFlags(
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
        ),
        tensors=tensors,
    )


def _ids(eagle: Mapping[str, Any], path: Path) -> tuple[int, ...] | None:
    ids = eagle.get(IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: eagle_config.{IDS} is {ids!r:.120}, expected a list of whole numbers")
    return tuple(ids)
