"""Typed parameters of the flows. The Prefect UI makes its forms from them: titles, units, examples and defaults count.

Light on purpose (no torch, no mlflow): a worker and the UI load a flow in about a second.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from eagle3.acceptance.definitions import SpecSettings
from eagle3.capture import CapturePoint, CapturePoints, CaptureSpec
from eagle3.conversations import GivenSettings
from eagle3.errors import Eagle3Error
from eagle3.refs import CheckpointRef, DumpRef
from eagle3.training.config import TrainingConfig
from infra.sglang.launch import CPU_MAX_TOKENS
from tasks.estimate import PlanParams
from tasks.fields import Partitions, Resume, ShardMib, StagingMib
from tasks.param_errors import NAME_PATTERN, fault_lines, with_points

DEMO_TARGET = "smollm2"
ALSO_PROMPTS = 24  # of each further prompt file


class ParamsError(Eagle3Error, ValueError):
    """A configuration file that cannot be used."""


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _OfATarget(_Params):
    """Parameters that name points of `target`: what is wrong with a point is told beside what that target has."""

    @model_validator(mode="wrap")
    @classmethod
    def _tell_points(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            target = data.get("target") if isinstance(data, dict) else None
            raise with_points(error, target, DEMO_TARGET) from None


class TargetShape(_Params):
    """What a dry run must know of a target whose files are not on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Shape, for a plan without the files")

    model_class: str = Field(title="Model class", examples=["KimiK25ForConditionalGeneration"])
    num_layers: int = Field(gt=0, title="Decoder layers")
    hidden_size: int = Field(gt=0, title="Hidden size")
    vocab_size: int = Field(gt=0, title="Vocabulary size")
    context_length: int | None = Field(None, gt=0, title="Context", description="Tokens of the longest sequence")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", title="Type of the states")


class TargetParams(_Params):
    """The model that the drafter drafts for."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Target")

    path: str = Field(
        DEMO_TARGET,
        title="Folder",
        description="A Hugging Face folder on the worker, or `smollm2` for the demo's model. A relative path starts in "
        "the project's folder; `eagle3 run` looks in your own folder first",
        examples=["smollm2", "models/kimi-k2.5"],
    )
    trust_remote_code: bool = Field(
        False, title="Trust remote code", description="Lets the target's folder run its own tokenizer code; recorded"
    )
    shape: TargetShape | None = Field(None, description="Used by a dry run where the folder is not there")


class ServingParams(_Params):
    """How SGLang serves the target on the worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Serving")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", title="Device")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "float32", title="Type", description="float32 on a CPU: greedy text is identical only there"
    )
    tensor_parallel: int = Field(1, ge=1, title="Tensor parallel size", description="GPUs per replica")
    threads: int = Field(2, ge=1, title="CPU threads", description="Used on a CPU only")
    streams: int = Field(64, ge=1, title="Streams", description="Requests that run at once")
    max_total_tokens: int | None = Field(
        None, ge=1, title="KV cache", description=f"Tokens; unset: SGLang's own choice, on a CPU {CPU_MAX_TOKENS}"
    )
    chunked_prefill_size: int | None = Field(None, title="Chunked prefill", description="Tokens a chunk; -1: off")
    disable_decode_graphs: bool = Field(
        False, title="No decode graphs", description="Needed to capture while answering on a GPU"
    )
    extra_args: tuple[str, ...] = Field((), title="More SGLang arguments", examples=[["--mem-fraction-static", "0.8"]])
    attach: str | None = Field(
        None,
        pattern=r"^https?://[^@\s]+$",
        title="Attach",
        description="Extraction only: URL of a running SGLang server with the tap and its flags; unset: one is started",
        examples=["http://127.0.0.1:30000"],
    )
    attach_staging: str | None = Field(
        None, title="Its staging folder", description="That server's EAGLE3_TAP_DIR, as this worker sees it"
    )

    @model_validator(mode="after")
    def _attach_is_whole(self) -> Self:
        if (self.attach is None) != (self.attach_staging is None):
            raise ParamsError("attach and attach_staging belong together: the server's URL and its EAGLE3_TAP_DIR")
        return self


class PromptParams(_Params):
    """Which prompts are answered, and how they are split."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Prompts")

    file: str = Field(
        "examples/word_problems.jsonl",
        title="File",
        description="JSON lines on the worker: `turns` (MT-bench), `messages` (OpenAI) or `prompt`; where answers are "
        "given, `messages` that end with one, or `turns` and `reference`. A relative path starts in the project's "
        "folder; `eagle3 run` looks in your own folder first",
    )
    num_train: int | None = Field(None, ge=1, title="Training prompts", description="Unset: all that are not held out")
    num_heldout: int = Field(24, ge=1, title="Held-out prompts", description="For the benchmark; never trained on")
    seed: int = Field(0, title="Seed of the split", description="Used where the file names no split")


class AnswerParams(_Params):
    """How the target answers, and when its states are captured."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Answers")

    max_new_tokens: int = Field(96, ge=2, title="Longest answer", description="Tokens")
    source: Literal["auto", "while_answering", "answer_then_prefill", "given"] = Field(
        "auto",
        title="Capture",
        description="while_answering needs decode graphs off; auto takes it where the server says so. given: the "
        "prompts file holds whole conversations, which the target reads and does not answer",
    )
    given: GivenSettings = Field(GivenSettings(), description="Used where the answers are given")


class ExtractParams(_OfATarget):
    """Answers prompts with the target and captures its states into a dump."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Extraction")

    name: str = Field("smollm2-demo", pattern=NAME_PATTERN, title="Name")
    target: TargetParams = TargetParams()
    prompts: PromptParams = PromptParams()
    capture: CaptureSpec = Field(
        CaptureSpec(aux=(CapturePoint("layers.2"), CapturePoint("layers.15"), CapturePoint("layers.27"))),
        title="Capture",
    )
    answers: AnswerParams = AnswerParams()
    serving: ServingParams = ServingParams()
    shard_mib: ShardMib = 1024
    staging_mib: StagingMib = 16384
    resume: Resume = "auto"
    partitions: Partitions = 1
    plan: PlanParams = PlanParams()


class PartitionParams(_Params):
    """One part of an extraction that was split; the extraction starts it."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Partition")

    extraction: ExtractParams
    uri: str = Field(pattern=r"^(s3|file)://", title="Place of the whole extraction")
    number: int = Field(ge=0, title="Number of this part, from 0")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.number >= self.extraction.partitions:
            raise ParamsError(f"there is no part {self.number} of {self.extraction.partitions}, counted from 0")
        return self


class ValidateParams(_Params):
    """Checks a dump's claims against its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Validation")

    dump: DumpRef
    target: TargetParams = TargetParams()
    reference: Literal["auto", "target", "probe"] = Field(
        "auto",
        title="Compared with",
        description="What the slots are held against: the target itself, or the dump's probe; auto takes the target "
        "where it fits into this machine's memory",
    )


class DrafterParams(_Params):
    """The drafter's own size; the rest follows from the target."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Drafter")

    draft_vocab_size: int = Field(4096, ge=16, title="Draft vocabulary", description="Tokens it can propose")
    attention: Literal["llama", "latent"] = Field(
        "llama", title="Attention", description="latent: DeepSeek's own (MLA), for DeepSeek and Kimi targets"
    )
    intermediate_size: int | None = Field(None, ge=8, title="MLP width", description="Unset: the target's")
    num_kv_heads: int | None = Field(None, ge=1, title="Key/value heads", description="Unset: the target's")
    head_dim: int | None = Field(None, ge=8, title="Head size", description="Unset: the target's")

    def overrides(self) -> dict[str, int]:
        """What differs from the target's own geometry."""
        return self.model_dump(exclude_none=True, exclude={"draft_vocab_size", "attention"})


class ParentParams(_Params):
    """The drafter that a training starts from: ours, or a public one with what its file does not say."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Parent drafter")

    drafter: str = Field(min_length=1, title="Drafter", description="A folder, or the s3:// prefix of one of ours")
    engine: str | None = Field(None, title="Engine", description="Of a public one: whose layer ids it names")
    engine_version: str | None = Field(None, title="Its version", description="Of a public one")
    accept_default_layers: bool = Field(
        False, title="Accept the default layers", description="It names no ids: take that engine's default list"
    )


Parent = Annotated[
    ParentParams | None,
    Field(title="Parent drafter", description="Start from its weights, shape and draft vocabulary"),
]


class TrainParams(_Params):
    """Trains an EAGLE-3 drafter on a dump whose report passed."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Training")

    name: str = Field("smollm2-demo", pattern=NAME_PATTERN, title="Name")
    dump: DumpRef
    target: TargetParams = TargetParams()
    drafter: DrafterParams = DrafterParams()
    parent: Parent = None
    training: TrainingConfig = TrainingConfig()
    heldout_samples: int = Field(
        8, ge=0, title="Samples of the simulation", description="Taken out of the dump; at most a fifth of it"
    )
    threads: int = Field(2, ge=1, title="CPU threads", description="Used on a CPU only")


class MismatchParams(_Params):
    """Serves the same weights with other layers, to show what a wrong list costs."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Deliberate mismatch")

    points: CapturePoints = Field(
        (CapturePoint("embed"), CapturePoint("layers.2"), CapturePoint("layers.15")), title="Wrong layers"
    )
    num_prompts: int = Field(8, ge=1, title="Prompts")


class BenchmarkParams(_OfATarget):
    """Serves held-out prompts without and with the drafter, and compares."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Benchmark")

    checkpoint: CheckpointRef
    model_id: str | None = Field(
        None, title="MLflow model", description="Logged model of the drafter; unset: found by the contract's digest"
    )
    target: TargetParams = TargetParams()
    prompts: PromptParams = PromptParams()
    answers: AnswerParams = AnswerParams()
    serving: ServingParams = ServingParams()
    spec: SpecSettings = SpecSettings.chain(3)
    mismatch: MismatchParams | None = Field(MismatchParams(), description="Unset: not served")
    also: tuple[str, ...] = Field((), title="More prompt files", description="Reported beside the held-out prompts")
    also_prompts: int = Field(ALSO_PROMPTS, ge=1, title="Prompts of each further file")


class RegisterParams(_Params):
    """What happens to the drafter in the registry."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Registration")

    model_name: str = Field(
        "eagle3-smollm2", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$", title="Registered model", description="In MLflow"
    )
    alias: str = Field("champion", pattern=r"^[a-z][a-z0-9_-]{0,49}$", title="Alias")


class PipelineParams(_OfATarget):
    """From prompts to a registered drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Pipeline")

    name: str = Field("smollm2-demo", pattern=NAME_PATTERN, title="Name")
    target: TargetParams = TargetParams()
    prompts: PromptParams = PromptParams()
    capture: CaptureSpec = ExtractParams.model_fields["capture"].default
    answers: AnswerParams = AnswerParams()
    serving: ServingParams = ServingParams()
    shard_mib: ShardMib = 1024
    staging_mib: StagingMib = 16384
    resume: Resume = "auto"
    partitions: Partitions = 1
    drafter: DrafterParams = DrafterParams()
    parent: Parent = None
    training: TrainingConfig = TrainingConfig()
    spec: SpecSettings = SpecSettings.chain(3)
    mismatch: MismatchParams | None = MismatchParams()
    also: tuple[str, ...] = Field((), title="More prompt files", description="Reported beside the held-out prompts")
    plan_engine_version: str = Field(
        "0.5.23",
        title="SGLang version of a plan",
        description="Used by a dry run on a machine without SGLang; a run takes the version that serves",
    )
    plan: PlanParams = PlanParams()
    register_as: RegisterParams = RegisterParams()

    @model_validator(mode="after")
    def _mismatch_differs(self) -> Self:
        if self.mismatch and self.mismatch.points == self.capture.aux:
            raise ParamsError(f"the mismatch serves {', '.join(self.capture.aux)}, which are the right layers")
        if self.mismatch and len(self.mismatch.points) != len(self.capture.aux):
            raise ParamsError(
                f"mismatch.points has {len(self.mismatch.points)} points and capture.aux {len(self.capture.aux)}: the "
                "same weights are served on both, so name as many, or set `mismatch: null`"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file; every key that is not a parameter is an error."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ParamsError(
                f"cannot read the configuration {path} ({reason}): expected a YAML file such as configs/smollm2.yaml"
            ) from None
        try:
            data = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ParamsError(f"{path} is not YAML: {error}") from None
        return cls.parse(data, where=str(path))

    @classmethod
    def parse(cls, data: Any, *, where: str) -> Self:
        """Check values that came from `where`; ParamsError names every one that does not fit."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = "".join(f"\n  {line}" for line in fault_lines(error, cls))
            raise ParamsError(f"{where}: not the pipeline's parameters:{lines}") from None

    def extraction(self) -> ExtractParams:
        shared = ExtractParams.model_fields.keys()
        return ExtractParams(**{field: getattr(self, field) for field in shared})

    def validation(self, dump: DumpRef) -> ValidateParams:
        return ValidateParams(dump=dump, target=self.target)

    def train(self, dump: DumpRef) -> TrainParams:
        shared = {"name", "target", "drafter", "parent", "training"}
        return TrainParams(dump=dump, threads=self.serving.threads, **{field: getattr(self, field) for field in shared})

    def benchmark(self, checkpoint: CheckpointRef, model_id: str) -> BenchmarkParams:
        shared = {"target", "prompts", "answers", "serving", "spec", "mismatch", "also"}
        return BenchmarkParams(
            checkpoint=checkpoint, model_id=model_id, **{field: getattr(self, field) for field in shared}
        )
