"""Settings from the environment (EAGLE3_*). Secrets are SecretStr: they never reach a log, a manifest or MLflow."""

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from eagle3.errors import Eagle3Error


class WrongSetting(Eagle3Error):
    """A variable EAGLE3_* whose value does not fit."""


class MissingSetting(Eagle3Error):
    """A setting that this action needs and nobody made."""


class Settings(BaseSettings):
    """Every setting with its unit. `EAGLE3_HOME=/data eagle3 up` sets the first."""

    model_config = SettingsConfigDict(env_prefix="EAGLE3_", extra="ignore")

    home: Path = Field(Path(".eagle3"), description="Folder of all local data: databases, logs, dumps, staging, caches")

    s3_endpoint: str | None = Field(None, description="URL of the S3 server; unset: the local stack's, or AWS's own")
    s3_region: str = "us-east-1"
    s3_access_key: SecretStr | None = Field(None, description="Unset: boto3's own credential chain")
    s3_secret_key: SecretStr | None = None
    s3_retries: int = Field(3, ge=0, description="Attempts after the first one, per request")
    s3_timeout: float = Field(20.0, gt=0, description="Seconds to connect and to read")
    s3_part_size: int = Field(
        8 * 2**20, ge=5 * 2**20, description="Bytes of one part; larger files go up in parts, at most 11 in memory"
    )

    store: str = Field("s3://eagle3", pattern=r"^(s3|file)://", description="Where dumps and checkpoints go")
    store_quota: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes that the store may hold, all objects together, e.g. 20TB; unset: no limit of ours",
    )
    dump_streaming: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether training reads a dump from the store as it goes; auto: where this disk cannot hold it",
    )
    dump_cache: ByteSize = Field(
        ByteSize(16 * 2**30), ge=2**30, description="Bytes that streamed dumps may take on this disk, all together"
    )
    map_runner: Literal["threads", "ray"] = Field(
        "threads", description="What reads the shards of a dump side by side when it is validated"
    )
    map_workers: int | None = Field(
        None, ge=1, le=256, description="Shards at a time, by threads or by a local Ray; unset: one a core, at most 8"
    )
    ray_address: str | None = Field(
        None,
        pattern=r"^(auto|[\w.-]+:\d+)$",
        description="A running Ray that this machine is a node of: `auto` or host:port; unset: a local one for a run",
    )
    mlflow_tracking_uri: str | None = Field(None, description="URL of the MLflow server; unset: the local stack's")

    ports: str = Field("20000-32767", pattern=r"^\d+-\d+$", description="Loopback ports that local servers may take")
    gpu_workers: int = Field(
        1, ge=1, le=64, description="Workers of the GPU pool that the local stack starts, a flow run at a time each"
    )
    stack_start_timeout: float = Field(120.0, gt=0, description="Seconds until a started part must answer")

    sglang_python: Path | None = Field(None, description="Interpreter that has SGLang; unset: the one that runs this")
    sglang_command: str | None = Field(
        None,
        description="Instead of an interpreter: a command that ends with `-m sglang.launch_server`, e.g. of a "
        "container. The tap must be installed there, the environment handed on, the folders be at the same paths",
        examples=[
            "docker run --rm --gpus all --network host -v /data:/data -e EAGLE3_TAP_DIR -e HF_HUB_OFFLINE sglang "
            "python3 -m sglang.launch_server"
        ],
    )
    sglang_device: Literal["auto", "cpu", "cuda"] = "auto"
    sglang_api_key: SecretStr | None = None
    sglang_start_timeout: float = Field(900.0, gt=0, description="Seconds until a starting server must answer")

    @classmethod
    def load(cls) -> "Settings":
        """The settings of the environment; WrongSetting names each variable that does not fit. No value is shown."""
        try:
            return cls()
        except ValidationError as error:
            wrong = [f"EAGLE3_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors(include_input=False)]
            raise WrongSetting("; ".join(wrong) + ". See the table of settings in docs/install.md") from None

    @property
    def root(self) -> Path:
        """`home` as an absolute path."""
        return self.home.expanduser().resolve()

    def mlflow_uri(self) -> str:
        """The MLflow server's URL; MissingSetting where nobody named one."""
        if not self.mlflow_tracking_uri:
            raise MissingSetting(
                "no MLflow server is known: start the local stack with `eagle3 up`, or set EAGLE3_MLFLOW_TRACKING_URI"
            )
        return self.mlflow_tracking_uri
