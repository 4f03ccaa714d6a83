"""Is there room for a dump: on the staging disk, on the store's own disk, under the quota of the store."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import BaseModel, ConfigDict, Field

from eagle3.errors import Eagle3Error
from infra.settings import Settings
from infra.store import StoreError, open_store
from tasks.estimate import size


class NoRoom(Eagle3Error):
    """A disk that is too small for what is about to be written."""


class Room(BaseModel):
    """One place, what it must take, and what it has left."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["staging disk", "store's disk", "store's quota"]
    where: str
    needed: int = Field(description="Bytes, an upper bound")
    free: int | None = Field(description="Bytes; None: it could not be asked")
    remark: str = Field("", description="Why it could not be asked, or what the figure is made of")

    @property
    def verdict(self) -> Literal["enough", "lacking", "unknown"]:
        if self.free is None:
            return "unknown"
        return "enough" if self.free >= self.needed else "lacking"

    def sentence(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        asked = f"{self.what} {self.where}: up to {size(self.needed)} are needed"
        if self.free is None:
            return f"{asked}, what is free is not known{remark}"
        short = f": {size(self.needed - self.free)} lack" if self.verdict == "lacking" else ""
        return f"{asked}, {size(max(self.free, 0))} are free{short}{remark}"


_MEND = {
    "staging disk": "free them, or set EAGLE3_HOME to a larger disk",
    "store's disk": "free them (`eagle3 dump prune`), or set EAGLE3_STORE to a larger one",
    "store's quota": "make room (`eagle3 dump ls`, `eagle3 dump prune`), or raise EAGLE3_STORE_QUOTA",
}


def staging_room(folder: Path, needed: int) -> Room:
    """The disk on which `folder` lies or will be made."""
    return Room(what="staging disk", where=str(folder), needed=needed, free=_free(folder))


def staging_elsewhere(needed: int) -> Room:
    """The staging disk of a worker that is not this machine."""
    remark = "the target's folder is not on this machine: the worker's disk is asked when the extraction starts"
    return Room(what="staging disk", where="of the worker", needed=needed, free=None, remark=remark)


def store_rooms(settings: Settings, needed: int, staging: Room | None = None) -> list[Room]:
    """What bounds the store from here: the disk of a folder store, a quota that is set. Empty where nothing does.

    `staging` is what the same extraction needs on this machine: on one disk with the store, both count. Nothing is
    written. A store that does not answer makes its quota unknown, no error.
    """
    rooms = []
    if settings.store.startswith("file://"):
        folder = Path(url2pathname(urlsplit(settings.store).path))
        both = staging is not None and staging.free is not None and _disk(Path(staging.where)) == _disk(folder)
        rooms.append(
            Room(
                what="store's disk",
                where=str(folder),
                needed=needed + (staging.needed if both and staging else 0),
                free=_free(folder),
                remark="the staging disk is the same" if both else "",
            )
        )
    if settings.store_quota is not None:
        rooms.append(_quota_room(settings, int(settings.store_quota), needed))
    return rooms


def refuse_lacking(rooms: Sequence[Room]) -> None:
    """NoRoom where a place is known to be too small; it says by how much and what to do."""
    lacking = [room for room in rooms if room.verdict == "lacking"]
    if lacking:
        said = "; ".join(f"{room.sentence()}: {_MEND[room.what]}" for room in lacking)
        raise NoRoom(f"{said}. Or take fewer prompts (prompts.num_train) or shorter answers (answers.max_new_tokens).")


def _quota_room(settings: Settings, quota: int, needed: int) -> Room:
    try:
        used = sum(num_bytes for _, num_bytes in open_store(settings.store, settings).list())
    except StoreError as error:
        return Room(what="store's quota", where=settings.store, needed=needed, free=None, remark=str(error))
    remark = f"{size(used)} of {size(quota)} are taken"
    return Room(what="store's quota", where=settings.store, needed=needed, free=quota - used, remark=remark)


def _free(folder: Path) -> int:
    """Bytes that this user may still write there."""
    return shutil.disk_usage(_existing(folder)).free


def _disk(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
