"""What each stage hands on: references, ids and the few figures that people ask for. Never a tensor."""

from pydantic import BaseModel, ConfigDict, Field

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.capture import CapturePoint
from eagle3.refs import CheckpointRef, DumpRef


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float = Field(ge=0, description="Wall time of the stage")


class ExtractResult(_Result):
    dump: DumpRef
    mlflow_run_id: str
    num_samples: int
    num_tokens: int
    num_bytes: int


class ValidateResult(_Result):
    dump: DumpRef
    verdict: str
    report_sha256: str
    mlflow_run_id: str
    num_checks: int


class TrainResult(_Result):
    checkpoint: CheckpointRef
    mlflow_run_id: str
    model_id: str
    simulated_length: float | None = Field(
        description="Acceptance length predicted by one unroll over held-out samples; None: none was held out"
    )
    steps: int


class ServedFigure(BaseModel):
    """One prompt set on one server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    points: tuple[CapturePoint, ...] | None = Field(
        description="Captured layers that the drafter was served; None: none"
    )
    prompts: str
    num_prompts: int
    tokens_per_second: float
    acceptance: AcceptanceFigure | None
    same_text: int | None = Field(description="Prompts whose answer equals plain greedy decoding's, token by token")
    right_length: float | None = Field(
        None, description="Of a deliberate mismatch: acceptance length of the right layers on these same prompts"
    )
    findings: tuple[str, ...] = Field(
        (), description="What the contract check said of the running server, a line each; nothing where all is right"
    )
    delivered: tuple[str, ...] = Field(
        (),
        description="What the slots of the drafter really held, by the tensors that this server delivered; empty "
        "where nobody looked",
    )


class BenchmarkResult(_Result):
    checkpoint: CheckpointRef
    served: tuple[ServedFigure, ...]
    dtype: str = Field(description="Type that was served, as the server was told: `auto` is never float32 in SGLang")
    mlflow_run_id: str

    def right(self) -> ServedFigure:
        """The drafter as it was trained, on the held-out prompts."""
        return next(s for s in self.served if s.label == RIGHT)

    def wrong(self) -> ServedFigure | None:
        return next((s for s in self.served if s.label == WRONG), None)


PLAIN = "no drafter"
RIGHT = "drafter, right layers"
WRONG = "same weights, wrong layers"


class PipelineResult(_Result):
    extracted: ExtractResult
    validated: ValidateResult
    trained: TrainResult
    measured: BenchmarkResult
    model_name: str
    model_version: str
    alias: str
    links: dict[str, str] = Field(description="Pages of this very run, by name")
