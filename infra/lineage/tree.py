"""The lineage of one registered drafter, as read and checked by the walk."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from eagle3.capture import CaptureSpec
from eagle3.contract import DrafterContract
from eagle3.conventions import EngineIds
from eagle3.dump.manifest import LiveCapture, TargetIdentity


class _Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="The node's page in MLflow")


class RunNode(_Node):
    """A finished run of a stage."""

    run_id: str
    name: str
    started_at: datetime
    prefect_url: str | None
    metrics: dict[str, float]


class ValidationNode(RunNode):
    verdict: str
    report_sha256: str


class BenchmarkNode(RunNode):
    prompts: str
    prompts_sha256: str
    settings: dict[str, str]


class TargetNode(_Node):
    model_id: str
    identity: TargetIdentity


class DumpNode(_Node):
    """Read from the manifest whose digest is `sha256`, not from a tag."""

    uri: str
    sha256: str
    capture: CaptureSpec
    engine_ids: EngineIds
    live: LiveCapture
    num_samples: int
    num_tokens: int


class DrafterNode(_Node):
    model_id: str
    name: str
    checkpoint_uri: str
    contract_sha256: str
    contract: DrafterContract


class VersionNode(_Node):
    name: str
    version: str
    aliases: tuple[str, ...]
    description: str
    tags: dict[str, str]


class LineageTree(BaseModel):
    """version -> drafter -> training run -> dump -> extraction run -> target, and who checked and measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: VersionNode
    drafter: DrafterNode
    training: RunNode
    dump: DumpNode
    extraction: RunNode
    target: TargetNode
    validations: tuple[ValidationNode, ...]
    benchmarks: tuple[BenchmarkNode, ...]
