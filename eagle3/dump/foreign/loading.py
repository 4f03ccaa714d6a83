"""Open other people's files without trusting them: no pickle is executed, nothing grows beyond what lies on the disk.

A `.pt` or `.ckpt` of `torch.save` is a zip of a small pickle and raw tensors. `torch.load(weights_only=True)` builds
tensors, numbers, strings and containers from it and refuses every other name; with mmap the tensors stay on the disk.
"""

import gzip
import io
import pickletools
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.dump.manifest import DumpError

MAX_PICKLE_BYTES = 64 * 2**20
"""The pickle inside a file of `torch.save` describes tensors and holds none; a whole prompt as numbers fits too."""
MAX_GZIP_RATIO = 16
"""Hidden states hardly compress (bfloat16 noise: 1.2 to 1); zeros compress 1000 to 1, and such a file is a bomb."""
GZIP_ALLOWANCE = 2**20
MAX_OBJECTS = 2**22
"""Parts of one saved value that are looked at; a long context as lists of numbers has some 100 000."""
_CHUNK = 2**20
_MAX_DEPTH = 4
_NESTED = (torch.Tensor, dict, list, tuple)


class ForeignPickle(DumpError):
    """A file whose pickle names code to run. It was not run."""


def load_saved(path: Path) -> Any:
    """What `torch.save` wrote to a file: tensors mapped from it, inside lists, tuples and dicts.

    Raises ForeignPickle where its pickle names code, DumpError where it is truncated, of torch's format before 1.6, or
    not what `torch.save` writes.
    """
    try:
        if path.suffix == ".gz":
            return _load_gzipped(path)
        return _load(path, path.stat().st_size, str(path))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from None


def load_dict(path: Path, key: str, expected: str) -> dict[Any, Any]:
    """A dict of `torch.save` that has `key`; DumpError says what was expected and which keys there are."""
    value = load_saved(path)
    if isinstance(value, dict) and key in value:
        return value
    if isinstance(value, dict):
        held = _first(list(map(str, value))) if value else "an empty dict"
    else:
        held = type(value).__name__
    raise DumpError(f"{path} is not {expected}, found {held}")


def load_safetensors(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Those tensors of a safetensors file; DumpError where it is damaged, or lacks one of `names`."""
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            missing = [name for name in names if name not in held]
            if missing:
                raise DumpError(f"{path} holds no {', '.join(missing)}; it holds {_first(sorted(held))}")
            return {name: file.get_tensor(name) for name in (*names, *optional) if name in held}
    except (SafetensorError, OSError) as error:
        raise DumpError(f"{path} is not a whole safetensors file: {error}. Copy it again") from None


def _load_gzipped(path: Path) -> Any:
    """Unpacked to a temporary file, which is mapped and unlinked: a sample larger than the memory can be read."""
    limit = MAX_GZIP_RATIO * path.stat().st_size + GZIP_ALLOWANCE
    with tempfile.NamedTemporaryFile(prefix="eagle3-", suffix=".ckpt") as unpacked:
        try:
            _unpack(path, unpacked, limit)
        except (OSError, EOFError, zlib.error) as error:
            raise DumpError(
                f"{path} cannot be unpacked: {error}. Truncated files end like this: copy it again"
            ) from None
        unpacked.flush()
        return _load(Path(unpacked.name), Path(unpacked.name).stat().st_size, f"{path} (unpacked)")


def _unpack(path: Path, unpacked: IO[bytes], limit: int) -> None:
    total = 0
    with gzip.open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            total += len(chunk)
            if total > limit:
                raise DumpError(
                    f"{path} unpacks to more than {MAX_GZIP_RATIO} times its size, which no hidden states do: it is "
                    "not unpacked further. If you trust it, unpack it yourself and name the .ckpt"
                )
            unpacked.write(chunk)


def _load(path: Path, size: int, where: str) -> Any:
    _check_archive(path, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other pickle protocols: what they lack is refused anyway
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise ForeignPickle(_refusal(path, where, error)) from None
    except (RuntimeError, OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DumpError(f"{where} cannot be read: {reason:.200}. It is damaged: copy it again") from None
    for tensor in _tensors(value, where):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise DumpError(f"{where} holds a {tensor.layout} tensor on {tensor.device}; plain tensors were expected")
        if tensor.numel() * tensor.element_size() > size:
            raise DumpError(
                f"{where} holds a tensor {list(tensor.shape)} that is larger than the file: one value stands for many. "
                "It is not read"
            )
    return value


def _check_archive(path: Path, where: str) -> None:
    """Only torch's own zip, whose entries are stored as they are: a compressed one could unpack to anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        with path.open("rb") as file:
            names = _code_named_by(file)
        if names:
            raise ForeignPickle(_names_code(where, names)) from None
        raise DumpError(
            f"{where} is not a whole file of torch.save ({error}). It is truncated (copy it again), or a pickle of its "
            "own, or older than torch 1.6: these are not opened. Load it where you trust it, save it with torch.save"
        ) from None
    if packed:
        raise DumpError(f"{where} holds compressed entries ({_first(packed)}), which torch.save never writes: refused")


def _refusal(path: Path, where: str, error: Exception) -> str:
    names: list[str] = []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl"):
                with archive.open(entry) as file:
                    names += _code_named_by(file)
    if names:
        return _names_code(where, names)
    reason = next(iter(str(error).splitlines()), "")
    return f"{where}: its pickle holds more than tensors, numbers and strings, and is not executed ({reason:.200})"


def _names_code(where: str, names: list[str]) -> str:
    return (
        f"{where}: its pickle names code to run: {_first(names)}. Nothing of it was executed. Tensors, numbers, "
        "strings, lists and dicts are read; if you trust the file, load it where it was made and save it again with "
        "these only"
    )


def _code_named_by(file: IO[bytes]) -> list[str]:
    """Every importable name in the pickles of a file that is not torch's own, found by reading their opcodes."""
    names: dict[str, None] = {}
    strings: list[str] = []
    data = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    try:
        while True:  # torch before 1.6 wrote several pickles, one behind the other
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name in ("GLOBAL", "INST"):
                    names[str(argument).replace(" ", ".")] = None
                elif opcode.name == "STACK_GLOBAL":
                    names[".".join(strings[-2:])] = None
                elif isinstance(argument, str):
                    strings = [*strings[-1:], argument]
    except Exception:  # noqa: BLE001, S110 - the end, or a pickle that breaks off in any way: what stood before counts
        pass
    return [name for name in names if not name.startswith("torch.") and name != "collections.OrderedDict"]


def _tensors(value: Any, where: str) -> Iterator[torch.Tensor]:
    """Every tensor of a saved value, once each.

    Only distinct containers are walked: a pickle of a few kilobytes can hold one list a thousand times in a list that
    a third one holds a thousand times, and so on.
    """
    seen: set[int] = set()
    level: list[Any] = [value] if isinstance(value, _NESTED) else []
    looked_at = 0
    for _ in range(_MAX_DEPTH + 1):  # the containers and tensors of one depth, then of the next
        parts: list[Any] = []
        for one in level:
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                yield one
                continue
            looked_at += len(one)
            if looked_at > MAX_OBJECTS:
                raise DumpError(f"{where} holds more than {MAX_OBJECTS} things, which no hidden states do: not read")
            parts += one.values() if isinstance(one, dict) else one
        level = [part for part in parts if isinstance(part, _NESTED)]


def _first(names: list[str], count: int = 5) -> str:
    """Names of a foreign file as text for a terminal: short, and without control characters."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    shown = (name if name.isprintable() else ascii(name) for name in names[:count])
    return (", ".join(name[:100] for name in shown) or "nothing") + more
