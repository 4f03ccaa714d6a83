"""`eagle3 doctor`: what is on this machine, what is missing, and the step that mends it."""

import shutil

from infra import stack
from infra.settings import Settings
from infra.sglang.doctor import DoctorItem, check_sglang

_ENOUGH_DISK = 10e9


def examine_machine(settings: Settings) -> list[DoctorItem]:
    """SGLang and its path (GPU or CPU), disk, and the parts of the stack."""
    return [*check_sglang(settings), _disk(settings), *_stack(settings)]


def _disk(settings: Settings) -> DoctorItem:
    folder = settings.root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return DoctorItem(
        name="disk",
        ok=free >= _ENOUGH_DISK,
        found=f"{free / 1e9:.0f} GB free at {folder}",
        mend=""
        if free >= _ENOUGH_DISK
        else f"free space, or set EAGLE3_HOME to a disk with {_ENOUGH_DISK / 1e9:.0f} GB",
    )


def _stack(settings: Settings) -> list[DoctorItem]:
    return [
        DoctorItem(name=part.name, ok=part.healthy, found=part.url or part.state, mend=part.mend)
        for part in stack.status(settings)
    ]
