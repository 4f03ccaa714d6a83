"""`eagle3 doctor`: what is on this machine, what is missing, and the step that mends it."""

import shutil
from pathlib import Path

from eagle3.errors import Eagle3Error
from infra import stack
from infra.settings import Settings
from infra.sglang.doctor import DoctorItem, check_server, check_sglang
from infra.sglang.launch import resolve_device
from infra.store import open_store

_ENOUGH_DISK = 10e9


def examine_machine(settings: Settings, server: str | None = None, staging: Path | None = None) -> list[DoctorItem]:
    """SGLang and its path (GPU or CPU), disk, the parts of the stack, and the servers elsewhere that settings name.

    `server` is the URL of a running SGLang server to ask too, `staging` its EAGLE3_TAP_DIR as seen from here.
    """
    parts = stack.status(settings)
    items = [*check_sglang(settings), _graphs(settings), _disk(settings)]
    if server is not None:
        items += check_server(server, staging, settings)
    items += [
        DoctorItem(name=part.name, ok=part.healthy, found=part.url or part.state, mend=part.mend) for part in parts
    ]
    own = {part.name for part in parts}
    if "mlflow" not in own:
        items.append(_mlflow(settings))
    if "s3" not in own:
        items.append(_store(settings))
    return items


def _graphs(settings: Settings) -> DoctorItem:
    if resolve_device("auto", settings) == "cpu":
        found = "decode graphs: off on the CPU path, states are captured while answering"
    else:
        found = (
            "decode graphs: on; states are captured by answer-then-prefill, unless serving.disable_decode_graphs is set"
        )
    return DoctorItem(name="a server started here", ok=True, found=found)


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


def _mlflow(settings: Settings) -> DoctorItem:
    """An MLflow server that is not the stack's: whether it answers, and lets us in."""
    from infra.lineage.connection import Connection

    uri = settings.mlflow_uri()
    try:
        connection = Connection(uri)
        with connection.errors_of("read its experiments"):
            connection.client.search_experiments(max_results=1)
    except Eagle3Error as error:
        mend = f"{error}. Credentials: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return DoctorItem(name="mlflow (not the stack's)", ok=False, found=uri, mend=mend)
    return DoctorItem(name="mlflow (not the stack's)", ok=True, found=f"{uri} answers")


def _store(settings: Settings) -> DoctorItem:
    """A bucket or folder that is not the stack's: whether it is there and may be read."""
    where = f"{settings.store} at {settings.s3_endpoint}" if settings.s3_endpoint else settings.store
    try:
        store = open_store(settings.store, settings.model_copy(update={"s3_retries": 0}))
        next(iter(store.list("runs/")), None)
    except Eagle3Error as error:
        return DoctorItem(name="store (not the stack's)", ok=False, found=where, mend=str(error))
    return DoctorItem(name="store (not the stack's)", ok=True, found=f"{where} answers")
