"""Named tensors of a safetensors checkpoint, read one at a time: never the whole target, and never a pickle."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.target.files import MAX_INDEX_BYTES, TargetError, read_json_object

if TYPE_CHECKING:
    import torch

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# What stands before `embed_tokens`, `layers.i` and `norm`: most models; Kimi-K2.5 and other wrappers of a whole causal
# model; transformers' own vision-language classes; nvidia/Kimi-K2.5-NVFP4 (layers only); a bare decoder.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
# The head stands beside the decoder, not in it.
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class Weights:
    """Which file of a folder holds which tensor. Opening a tensor touches that tensor's bytes of that file only."""

    folder: Path
    file_of: dict[str, str]

    @classmethod
    def locate(cls, folder: Path) -> "Weights":
        """Read the index, or the header of the single file. The shards themselves are not opened."""
        single, index = folder / SINGLE_NAME, folder / INDEX_NAME
        if index.is_file():
            file_of = _read_index(index)
            if single.is_file() and set(file_of.values()) != {SINGLE_NAME}:
                raise TargetError(
                    f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, and they are different weights: transformers "
                    "would read the first, SGLang the second. Remove the one that is not the model."
                )
            return cls(folder, file_of)
        if single.is_file():
            with _opened(single) as file:
                return cls(folder, dict.fromkeys(file.keys(), SINGLE_NAME))
        raise TargetError(_no_weights(folder))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all weight files, sorted."""
        return tuple(sorted(set(self.file_of.values())))

    def first(self, names: Iterable[str]) -> str | None:
        """The first of these tensor names that the checkpoint has."""
        return next((name for name in names if name in self.file_of), None)

    def require(self, what: str, names: Iterable[str]) -> str:
        """The one of these names that the checkpoint has; none and several are errors that list them."""
        expected = tuple(names)
        found = [name for name in expected if name in self.file_of]
        if len(found) == 1:
            return found[0]
        if found:
            raise TargetError(f"{self.folder}: which tensor is the {what}? Found {', '.join(found)}; expected one")
        has = ", ".join(sorted(self.file_of)[:6])
        raise TargetError(
            f"{self.folder} has no {what}: expected a tensor named {' or '.join(expected)}. Its {len(self.file_of)} "
            f"tensors begin with {has or 'none'}. Either the download is incomplete or the layout is not supported."
        )

    def read(self, name: str) -> "torch.Tensor":
        """One tensor in its stored dtype, mapped from its file."""
        with _opened(self._file(name)) as file:
            if name not in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                raise TargetError(
                    f"{self._file(name)} has no tensor {name}, although {INDEX_NAME} says so. Fetch both files again."
                )
            return file.get_tensor(name)

    def paths(self) -> Iterator[Path]:
        """Every weight file; TargetError lists those that are missing."""
        missing = [name for name in self.files if not (self.folder / name).is_file()]
        if missing:
            raise TargetError(
                f"{self.folder}: {len(missing)} of {len(self.files)} weight files are missing: "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Complete the download."
            )
        return (self.folder / name for name in self.files)

    def _file(self, name: str) -> Path:
        path = self.folder / self.file_of[name]
        if not path.is_file():
            raise TargetError(f"{path} is missing: {INDEX_NAME} keeps {name} in it. Complete the download.")
        return path


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TargetError(f"{path} is not a safetensors file ({error}). Fetch it again.") from None


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TargetError(f"{index} has no weight_map: it must map every tensor's name to its file")
    for tensor, file in weight_map.items():
        # The index comes with the download: a name like ../x would make us read outside the folder.
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise TargetError(
                f"{index} puts {tensor:.120} into {file!r:.120}: expected the name of a .safetensors file in the same "
                "folder. It is not opened."
            )
    return weight_map


def _no_weights(folder: Path) -> str:
    expected = f"expected {SINGLE_NAME}, or {INDEX_NAME} with its files"
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        return (
            f"{folder} has its weights only as pickles ({', '.join(pickles[:3])}): {expected}. A pickle can run any "
            "code when it is opened, so it is refused. Convert it in a place you trust, e.g. load the model with "
            "transformers and call save_pretrained, or download the safetensors revision."
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} has {', '.join(shards[:3])} but no {INDEX_NAME}: {expected}. Complete the download."
    return f"{folder} has no weights: {expected}. Complete the download."
