"""A drafter's folder as an engine would serve it, right or wrong: read for an audit.

`load_checkpoint` refuses whatever is inconsistent. An engine does not: it takes the layer ids, the tensors and the
flags that it finds, and is silent about the rest. So nothing is judged here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    CheckpointError,
    parse_object,
    read_header,
    read_limited,
    weights_digest,
)

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class ServedDrafter:
    """What config.json and model.safetensors hold, as SGLang 0.5.23 reads them (spec_aux_hidden_state.py,
    llama_eagle3.py)."""

    where: str
    architecture: str | None
    ids: tuple[int, ...] | None
    """`eagle_config.eagle_aux_hidden_state_layer_ids`; None where it is missing: the engine takes its default list."""
    norm: NormFlags
    tensors: Mapping[str, Tensor]

    def weights_sha256(self) -> str:
        """The digest that a contract holds of its drafter's named tensors."""
        return weights_digest(self.tensors)


def read_served(folder: Path) -> ServedDrafter:
    """Read a drafter's folder. CheckpointError where a file is missing or unreadable: nothing could be served then."""
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    config = parse_object(read_limited(config_path), where=str(config_path))
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    architectures = config.get("architectures")
    read_header(weights_path)  # of a bounded size, before anything is mapped
    try:
        tensors = load_file(weights_path)
    except SafetensorError as error:
        raise CheckpointError(f"{weights_path}: not a whole safetensors file ({error}): fetch it again") from None
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
    ids = eagle.get(_IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: eagle_config.{_IDS} is {ids!r:.120}, expected a list of whole numbers")
    return tuple(ids)
