"""What the local stack remembers between commands: ports, processes, keys; and what a client of it needs to know.

`<home>/stack.json` holds ports and processes, `<home>/s3-keys.json` (mode 0600) the keys of the local S3 server.
"""

import errno
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from eagle3.errors import Eagle3Error
from infra.atomic import new_file
from infra.ports import LOOPBACK
from infra.processes import ProcessRecord
from infra.settings import Settings

ServerName = Literal["s3", "prefect", "mlflow"]
Told = Literal["store", "s3_endpoint", "s3_region", "mlflow_tracking_uri", "gpu_workers"]
Progress = Callable[[str], None]

_LOCK_WAIT_S = 300.0
_ENOUGH_DISK_BYTES = 512 * 2**20


class StackError(Eagle3Error):
    """The local stack cannot do what was asked."""


class StackRecord(BaseModel):
    """The content of stack.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    ports: dict[ServerName, int] = Field(default_factory=dict)
    processes: dict[str, ProcessRecord] = Field(default_factory=dict)
    told: dict[Told, str | int] = Field(default_factory=dict, description="Settings of the stack itself, given to `up`")
    limited: int = Field(1, description="Flow runs at a time that `up` last allowed the GPU pool")
    deployed: str | None = Field(None, description="Digest of the deployments and the code that they were made of")

    def url(self, server: ServerName) -> str | None:
        """Address of a server of the stack, running or not; None before the first `up`."""
        port = self.ports.get(server)
        return None if port is None else f"http://{LOOPBACK}:{port}"


class Keys(BaseModel):
    """The key pair of the local S3 server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    access_key: SecretStr
    secret_key: SecretStr


class StackState(BaseModel):
    """Where the parts of a stack are, for its clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path
    project: Path
    store: str
    prefect_api_url: str
    mlflow_url: str
    s3_endpoint: str | None
    s3_region: str
    s3_keys: Keys | None

    @property
    def prefect_ui_url(self) -> str:
        return self.prefect_api_url.removesuffix("/api")

    def environment(self) -> dict[str, str]:
        """What a process needs to be a client of this stack. Holds the S3 keys: never log it."""
        environment = {
            "EAGLE3_HOME": str(self.home),
            "EAGLE3_PROJECT": str(self.project),
            "EAGLE3_STORE": self.store,
            "EAGLE3_MLFLOW_TRACKING_URI": self.mlflow_url,
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PREFECT_API_URL": self.prefect_api_url,
            "PREFECT_HOME": str(self.home / "prefect"),  # the user's own profiles stay as they are
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        if self.s3_endpoint is not None:
            environment |= {"EAGLE3_S3_ENDPOINT": self.s3_endpoint, "EAGLE3_S3_REGION": self.s3_region}
        if self.s3_keys is not None:
            environment |= {
                "EAGLE3_S3_ACCESS_KEY": self.s3_keys.access_key.get_secret_value(),
                "EAGLE3_S3_SECRET_KEY": self.s3_keys.secret_key.get_secret_value(),
            }
        # A proxy of the machine must not be asked for servers of this machine.
        local = f"{LOOPBACK},localhost"
        for name in ("NO_PROXY", "no_proxy"):
            given = os.environ.get(name, "")
            environment[name] = given if LOOPBACK in given else f"{given},{local}".lstrip(",")
        return environment


def record_path(root: Path) -> Path:
    return root / "stack.json"


def read_record(root: Path) -> StackRecord:
    """The stack's record; an empty one before the first `up`."""
    path = record_path(root)
    try:
        return StackRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return StackRecord()
    except (OSError, ValidationError) as error:
        raise StackError(
            f"{path} cannot be read as the record of a local stack ({type(error).__name__}). `eagle3 down` ends the "
            "stack's processes without it; then delete the file and start again with `eagle3 up`."
        ) from error


def write_record(root: Path, record: StackRecord) -> None:
    with new_file(record_path(root), mode=0o600) as file:
        file.write(record.model_dump_json(indent=1).encode())


def make_keys(settings: Settings) -> None:
    """Make a key pair for the local S3 server, unless the settings name one or it is there."""
    if read_keys(settings) is not None:
        return
    keys = {"access_key": secrets.token_hex(10), "secret_key": secrets.token_hex(20)}
    with new_file(settings.root / "s3-keys.json", mode=0o600) as file:
        file.write(json.dumps(keys).encode())


def read_keys(settings: Settings) -> Keys | None:
    """The settings' keys, else the ones in the home folder; None where there are none yet."""
    if settings.s3_access_key is not None and settings.s3_secret_key is not None:
        return Keys(access_key=settings.s3_access_key, secret_key=settings.s3_secret_key)
    try:
        return Keys.model_validate_json((settings.root / "s3-keys.json").read_bytes())
    except (OSError, ValidationError):
        return None


def told_to_up(settings: Settings, record: StackRecord) -> dict[Told, str | int]:
    """The settings that say where data goes, which a client must have too, and how many workers there are.

    No addresses of the stack's own servers.
    """
    own = {record.url("s3"), record.url("mlflow")}
    names: tuple[Told, ...] = get_args(Told)
    given = {name: getattr(settings, name) for name in names if name in settings.model_fields_set}
    return {name: value for name, value in given.items() if value is not None and value not in own}


def with_told(settings: Settings, record: StackRecord) -> Settings:
    """The settings, with what `up` was told where they say nothing themselves."""
    missing: dict[str, str | int] = {k: v for k, v in record.told.items() if k not in settings.model_fields_set}
    return settings.model_copy(update=missing) if missing else settings


def wanted_servers(settings: Settings, record: StackRecord) -> list[ServerName]:
    """The servers that the stack runs itself: none that the settings name elsewhere, no S3 where the store is a folder.

    Settings that `connect` made name the stack's own servers.
    """
    wanted: list[ServerName] = ["prefect"]
    if settings.mlflow_tracking_uri in {None, record.url("mlflow")}:
        wanted.append("mlflow")
    if settings.store.startswith("s3://") and settings.s3_endpoint in {None, record.url("s3")}:
        wanted.append("s3")
    return wanted


def make_state(settings: Settings, record: StackRecord, project: Path) -> StackState:
    """Addresses and keys for clients, from a record that has the ports of all wanted servers."""
    own_s3 = "s3" in wanted_servers(settings, record)
    endpoint = record.url("s3") if own_s3 else settings.s3_endpoint
    given = settings.s3_access_key is not None and settings.s3_secret_key is not None
    return StackState(
        home=settings.root,
        project=project,
        store=settings.store,
        prefect_api_url=f"{record.url('prefect')}/api",
        mlflow_url=settings.mlflow_tracking_uri or str(record.url("mlflow")),
        s3_endpoint=endpoint,
        s3_region=settings.s3_region,
        s3_keys=read_keys(settings) if own_s3 or given else None,
    )


def prepare_home(root: Path) -> None:
    """Make the home folder if need be, and find out whether a stack can live in it."""
    with clear_home_errors(root):
        if not root.exists():
            root.mkdir(parents=True, mode=0o700)
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(b"x")
        system = os.statvfs(root)
    free = system.f_bavail * system.f_frsize
    if free < _ENOUGH_DISK_BYTES:
        raise StackError(
            f"{root} has {free // 2**20} MiB of free disk space, the stack needs {_ENOUGH_DISK_BYTES // 2**20} MiB to "
            "start. Free some space, or set EAGLE3_HOME to a folder on another disk."
        )


@contextmanager
def clear_home_errors(root: Path) -> Iterator[None]:
    """OSErrors of files in the home folder as a StackError."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StackError(f"the disk of {root} is full. Free some space, or set EAGLE3_HOME.") from error
        raise StackError(
            f"the stack's folder {root} cannot be used: {error.strerror or error} ({error.filename}). Make it writable "
            "for this user, or set EAGLE3_HOME to another folder."
        ) from error


@contextmanager
def stack_lock(root: Path, on_progress: Progress) -> Iterator[None]:
    """One `up` or `down` at a time for one home folder; a second one waits."""
    with clear_home_errors(root):
        lock = (root / "stack.lock").open("ab")
    with lock:
        deadline, told = time.monotonic() + _LOCK_WAIT_S, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StackError(
                        f"another `eagle3 up` or `eagle3 down` has been at work on {root} for {_LOCK_WAIT_S:.0f} s. "
                        "End it, then start again."
                    ) from None
                if not told:
                    on_progress("waiting for another `eagle3 up` or `eagle3 down` of this folder")
                    told = True
                time.sleep(0.2)
        yield
