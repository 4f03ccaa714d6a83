"""A drafter's folder, ours or somebody else's: to export it in another form, or as the start of a fine-tuning.

A folder without a contract says what it was trained on with integers only. So its engine, that engine's version and the
target must be named, and nothing is guessed: ids that are not there are an error, unless the engine's default list is
accepted in so many words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.conventions import EngineIds, convention, default_points_of, points_of
from eagle3.drafter.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load_checkpoint
from eagle3.drafter.config import DrafterConfig, DrafterConfigError
from eagle3.drafter.forms import CONTRACT_KEY, IDS, eagle_config, flatten, id_key, ids_in, read_shape
from eagle3.drafter.model import Drafter
from eagle3.drafter.tensors import (
    EMBEDDING,
    MAPS,
    CheckpointError,
    CheckpointUnreadable,
    Header,
    check_header,
    full_vocabulary,
    load_drafter,
    memory_name,
    parse_object,
    read_header,
    read_limited,
    read_tensors,
)
from eagle3.drafter.vocab import VocabMap, VocabMapError
from eagle3.target.config import TargetConfig

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Names of older files, as SGLang's llama_eagle3.py knows them.
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_NO_WEIGHT = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # computed from the config
_CURE = "Nothing was changed. Look whether the folder was fetched whole, and whether it is an EAGLE-3 drafter"


@dataclass(frozen=True)
class Source:
    """Where the ids of a drafter without a contract come from."""

    engine: str
    version: str
    target: TargetConfig
    accept_default_layers: bool = False
    """Take the engine's own default list where the file names no ids, as the engine does."""


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter, and what is known of it."""

    drafter: Drafter
    vocab: VocabMap
    points: tuple[CapturePoint, ...]  # the slots of fc, in order; () where nobody said whose ids the file's are
    contract: DrafterContract | None  # None: somebody else's, and nothing proves what it was trained on
    coverage: float | None
    embedding: Tensor | None
    notes: tuple[str, ...]

    def check_start(self, points: Sequence[CapturePoint], target: TargetConfig) -> None:
        """Refuse this drafter as the start of a training on states of these points of this target."""
        config = self.drafter.config
        if tuple(points) != self.points:
            raise CheckpointError(
                f"the parent drafter reads {', '.join(self.points)}, the dump holds {', '.join(points)}: its fc would "
                "get other states than it has learnt. Extract the parent's points, or train without a parent"
            )
        for what, ours, theirs in (
            ("hidden size", config.target_hidden_size, target.hidden_size),
            ("vocabulary", config.target_vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"the parent drafter is for a target of {what} {ours}; {target.path} has {theirs}"
                )


def open_drafter(folder: Path, source: Source | None = None, *, need_points: bool = True) -> OpenedDrafter:
    """Open a drafter's folder: one with a contract as `load_checkpoint` does, another one by its `source`.

    Without `need_points` a drafter of somebody else's may be looked at before anybody knows what its ids mean. Raises
    CheckpointError and its kin, each naming what is missing, renamed, wrongly shaped or inconsistent.
    """
    if not folder.is_dir():
        raise CheckpointUnreadable(f"there is no folder {folder}: expected a drafter's config.json and safetensors")
    if (folder / CONTRACT_NAME).exists():
        found = load_checkpoint(folder)
        points = found.contract.capture.aux
        return OpenedDrafter(
            found.drafter, found.vocab, points, found.contract, found.coverage, found.embedding, notes=()
        )
    if source is None and need_points:
        raise CheckpointError(
            f"{folder} has no {CONTRACT_NAME}: a drafter of somebody else's. Name the engine, its version and the "
            "target that its layer ids are for"
        )
    return _open_foreign(folder, source)


def _open_foreign(folder: Path, source: Source | None) -> OpenedDrafter:
    where = str(folder / CONFIG_NAME)
    raw = parse_object(read_limited(folder / CONFIG_NAME), where=where)
    if CONTRACT_KEY in raw:
        raise CheckpointUnreadable(
            f"{folder} was exported with a contract, and its {CONTRACT_NAME} is missing: fetch the checkpoint again"
        )
    points: tuple[CapturePoint, ...] = ()
    if source is None:
        notes = ["what its layer ids mean follows from the engine, its version and the target: name them"]
        config = read_shape(raw, num_slots=_slots(folder, raw, where), where=where)
    else:
        points, notes = _points(raw, source, where)
        config = read_shape(raw, num_slots=len(points), where=where)
        _check_target(config, source.target, where)
        notes += _flags(raw, config, source, where)
    tensors = _tensors(folder, config)
    vocab, told = _vocabulary(tensors, config, str(folder))
    notes += told
    embedding = tensors.get(EMBEDDING)
    if embedding is not None:
        notes.append("it brings an embedding of its own; SGLang and this trainer use the target's")
    return OpenedDrafter(load_drafter(config, tensors), vocab, points, None, None, embedding, tuple(notes))


def _points(raw: Mapping[str, Any], source: Source, where: str) -> tuple[tuple[CapturePoint, ...], list[str]]:
    engine, version, target = source.engine, source.version, source.target
    title, ids = convention(engine).title, ids_in(raw, engine)
    if ids is not None:
        named = EngineIds(engine=engine, version=version, model_class=target.model_class, ids=tuple(ids))
        return points_of(named, target.num_layers), []
    default = default_points_of(
        engine=engine, version=version, model_class=target.model_class, num_layers=target.num_layers
    )
    told = f"{where}: no {id_key(engine)}; {title} {version} would capture its default list, {', '.join(default)}"
    elsewhere = raw.get(IDS) or eagle_config(raw).get(IDS)
    if elsewhere:
        told += f". {elsewhere!r:.80} stands where {title} does not look"
    if source.accept_default_layers:
        return default, [f"{told}; accepted"]
    raise CheckpointError(f"{told}. Accept that list in so many words if the drafter was trained on it")


def _slots(folder: Path, raw: Mapping[str, Any], where: str) -> int:
    """How many slots fc joins, by its width."""
    flat = flatten(raw, where=where)
    width = flat.get("target_hidden_size") or flat.get("hidden_size")
    header = {_key(name): entry for path in _weight_files(folder) for name, entry in read_header(path).items()}
    _, shape = header.get("fc.weight", ("", ()))
    if len(shape) != 2 or not isinstance(width, int) or width < 1:
        raise CheckpointError(f"{folder}: no fc.weight [H, slots x H]: not an EAGLE-3 drafter. {_CURE}")
    return max(1, round(shape[1] / width))


def _check_target(config: DrafterConfig, target: TargetConfig, where: str) -> None:
    for what, ours, theirs in (
        ("target hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.target_vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise DrafterConfigError(f"{where}: {what} {ours}; the target {target.path} has {theirs}: another target's")


def _flags(raw: Mapping[str, Any], config: DrafterConfig, source: Source, where: str) -> list[str]:
    if config.norm.norm_before_residual and source.engine == "sglang":
        raise DrafterConfigError(
            f"{where}: norm_before_residual is set, which SGLang ignores: it would run another model than was trained. "
            "If it was trained for vLLM, name that engine"
        )
    if source.engine != "sglang" and "norm_before_residual" not in flatten(raw, where=where):
        return ["norm_before_residual is not said: taken as false (vLLM takes a speculators file without it as true)"]
    return []


def _tensors(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Every tensor under its name in memory, read once the headers fit the config."""
    files = _weight_files(folder)
    header: Header = {}
    for path in files:
        for name, entry in read_header(path).items():
            key = _key(name)
            if key in header:
                raise CheckpointError(f"{path}: {name} is there twice, under two names of {key}")
            if key is not None:
                header[key] = entry
    check_header(header, config, where=str(folder), names={}, optional=MAPS, cure=_CURE)
    return {key: tensor for path in files for name, tensor in read_tensors(path).items() if (key := _key(name))}


def _key(name: str) -> str | None:
    """A name in memory for the name in a file; None for what is no weight."""
    if name.endswith(_NO_WEIGHT):
        return None
    key = memory_name(name.removeprefix("model."))
    for legacy, new in _LEGACY.items():
        key = key.replace(legacy, new)
    return key


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        parts = parse_object(read_limited(index), where=str(index)).get("weight_map")
        names = sorted(set(parts.values())) if isinstance(parts, dict) else []
        if not names or not all(isinstance(n, str) and n == Path(n).name and n.endswith(".safetensors") for n in names):
            raise CheckpointError(f"{index}: its weight_map does not name safetensors files of this folder")
        return [folder / name for name in names]
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    pickles = [path.name for path in _found(folder, _PICKLES)]
    if pickles:
        raise CheckpointUnreadable(
            f"{folder} holds {', '.join(pickles[:3])} and no safetensors: a pickle can run any code, so it is never "
            "opened here. Write its tensors with safetensors.torch.save_file where you trust it"
        )
    raise CheckpointUnreadable(f"{folder} holds no {WEIGHTS_NAME}: fetch the drafter's weights")


def _found(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _vocabulary(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> tuple[VocabMap, list[str]]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and t2d is None:
        if full_vocabulary(config):
            return VocabMap.whole(config.target_vocab_size), []
        raise VocabMapError(
            f"{where}: no d2t and no t2d, but the head has {config.draft_vocab_size} of {config.target_vocab_size} "
            "tokens: an engine would take draft ids for target ids"
        )
    notes = []
    if d2t is not None and not d2t.is_floating_point():
        d2t = d2t.long()
    if t2d is not None and t2d.dtype != torch.bool and bool(((t2d == 0) | (t2d == 1)).all()):
        t2d = t2d.bool()
    try:
        if d2t is None:
            assert t2d is not None
            notes.append("no d2t: made from t2d")
            vocab = VocabMap(t2d.nonzero()[:, 0], config.target_vocab_size)
        elif t2d is None:
            notes.append("no t2d: made from d2t")
            vocab = VocabMap(d2t + torch.arange(len(d2t)), config.target_vocab_size)
        else:
            vocab = VocabMap.from_tensors(d2t, t2d)
    except VocabMapError as error:
        raise VocabMapError(f"{where}: {error}") from None
    if len(vocab) != config.draft_vocab_size:
        raise VocabMapError(f"{where}: the map names {len(vocab)} tokens, the head has {config.draft_vocab_size}")
    return vocab, notes
