"""A drafter that a person names: a folder of this machine, or the URI of a checkpoint of ours in the store."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.refs import CheckpointRef
from infra.settings import Settings
from infra.store import open_store
from tasks.artifacts import fetch_checkpoint
from tasks.params import DrafterParams, ParamsError, ParentParams

if TYPE_CHECKING:
    from eagle3.capture import CapturePoint
    from eagle3.drafter.config import DrafterConfig
    from eagle3.drafter.opening import OpenedDrafter
    from eagle3.target import Target


def drafter_at(named: str, settings: Settings) -> Path:
    """The local folder. A checkpoint in the store is fetched, and checked whole, into this machine's cache.

    A URI has no digest beside it, so what it holds today is taken; a folder's content is not looked at here.
    """
    if "://" not in named:
        return Path(named).expanduser()
    if named.startswith("file://"):
        return Path(url2pathname(urlsplit(named).path))
    from eagle3.drafter.tensors import MAX_JSON_BYTES

    data = open_store(named, settings).get_bytes(CONTRACT_NAME, max_bytes=MAX_JSON_BYTES)
    contract = DrafterContract.parse(data, where=f"{named}/{CONTRACT_NAME}")
    folder, _ = fetch_checkpoint(CheckpointRef(uri=named, sha256=contract.digest()), settings)
    return folder


def new_config(drafter: DrafterParams, target: "Target", *, num_slots: int, draft_vocab_size: int) -> "DrafterConfig":
    """The shape of a drafter that has no parent. DrafterConfigError where it fits no drafter of this target."""
    from eagle3.drafter.config import DrafterConfig, MlaDrafterConfig

    kind = MlaDrafterConfig if drafter.attention == "latent" else DrafterConfig
    return kind.like_target(target, num_slots=num_slots, draft_vocab_size=draft_vocab_size, **drafter.overrides())


def open_parent(
    parent: ParentParams, points: "Sequence[CapturePoint]", target: "Target", settings: Settings
) -> "OpenedDrafter":
    """The drafter that a training on states of these points starts from.

    CheckpointError where it reads other points or is for another target, and for whatever is wrong with its files;
    ParamsError where a drafter without a contract comes without its engine and version.
    """
    from eagle3.drafter.opening import Source, open_drafter

    folder, source = drafter_at(parent.drafter, settings), None
    if folder.is_dir() and not (folder / CONTRACT_NAME).exists():
        if parent.engine is None or parent.engine_version is None:
            raise ParamsError(
                f"the parent {parent.drafter} has no {CONTRACT_NAME}: name the engine and the version that its layer "
                "ids are for"
            )
        source = Source(parent.engine, parent.engine_version, target, parent.accept_default_layers)
    opened = open_drafter(folder, source)
    opened.check_start(points, target)
    return opened
