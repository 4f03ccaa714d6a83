"""The small values that travel between stages: where a thing lies, and the digest that it must have."""

from pydantic import BaseModel, ConfigDict, Field

_SHA256 = r"^[0-9a-f]{64}$"


class DumpRef(BaseModel):
    """A dump: its prefix, and the digest of its manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Dump")

    uri: str = Field(
        pattern=r"^(s3|file)://",
        title="Dump URI",
        description="Prefix that holds manifest.json",
        examples=["s3://eagle3/dumps/smollm2-demo"],
    )
    sha256: str = Field(pattern=_SHA256, title="Manifest digest", description="sha256 of the canonical manifest JSON")


class CheckpointRef(BaseModel):
    """A drafter's checkpoint: its prefix, and the digest of its contract (which covers the weights)."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Checkpoint")

    uri: str = Field(
        pattern=r"^(s3|file)://",
        title="Checkpoint URI",
        description="Prefix that holds contract.json, config.json and model.safetensors",
        examples=["s3://eagle3/drafters/smollm2-demo"],
    )
    sha256: str = Field(pattern=_SHA256, title="Contract digest", description="sha256 of the canonical contract JSON")
