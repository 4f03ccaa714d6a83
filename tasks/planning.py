"""What a pipeline would do, without doing it: launch command, layer ids, sizes."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3.conventions import EngineIds
from eagle3.prompts import load_prompts, split_prompts
from eagle3.training.config import TrainingConfig
from infra.settings import Settings
from infra.sglang.launch import LaunchPlan, launch_plan
from tasks.inputs import bytes_per_token, plan_version, resolve_ids, states_dtype
from tasks.params import DEMO_TARGET, PipelineParams, TargetShape
from tasks.serving import capture_config
from tasks.targets import open_target, target_folder

_PLAN_PORT = 30000


class Plan(BaseModel):
    """A dry run's answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    target: str
    shape: TargetShape
    shape_from: str = Field(description="Where the shape was taken from")
    points: tuple[str, ...]
    ids: EngineIds
    command: tuple[str, ...]
    environment: dict[str, str]
    num_prompts: int
    prompts_from: str
    longest_answer: int
    bytes_per_token: int
    most_bytes: int = Field(description="Upper bound for the answers' rows; prompts come on top")
    training: TrainingConfig
    passes: float | None = Field(description="Over the samples, where the budget is in steps")


def plan_pipeline(params: PipelineParams, settings: Settings) -> Plan:
    """Resolve everything that can be resolved without a server."""
    shape, shape_from, folder = _shape(params, settings)
    ids = resolve_ids(
        params.capture,
        version=plan_version(params, settings),
        model_class=shape.model_class,
        num_layers=shape.num_layers,
    )
    staging = settings.root / "staging" / params.name
    config = capture_config(params.extraction(), folder, ids, staging)
    launch: LaunchPlan = launch_plan(config, _PLAN_PORT, settings)
    num_prompts, prompts_from = _prompts(params)
    per_token = bytes_per_token(params.capture, shape.hidden_size, shape.dtype)
    return Plan(
        name=params.name,
        target=str(folder),
        shape=shape,
        shape_from=shape_from,
        points=tuple(params.capture.points),
        ids=ids,
        command=tuple(launch.command),
        environment=launch.env,
        num_prompts=num_prompts,
        prompts_from=prompts_from,
        longest_answer=params.answers.max_new_tokens,
        bytes_per_token=per_token,
        most_bytes=per_token * params.answers.max_new_tokens * num_prompts,
        training=params.training,
        passes=_passes(params.training, num_prompts),
    )


def _passes(training: TrainingConfig, num_samples: int) -> float | None:
    return training.budget * training.batch_size / num_samples if training.budget_unit == "steps" else None


def _shape(params: PipelineParams, settings: Settings) -> tuple[TargetShape, str, Path]:
    named = Path(params.target.path).expanduser()
    if params.target.path != DEMO_TARGET and params.target.shape and not named.exists():
        return params.target.shape, "the configuration (the target's folder is not on this machine)", named
    target = open_target(params.target, settings)
    shape = TargetShape.model_validate(
        {
            "model_class": target.model_class,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "dtype": states_dtype(params.serving, target, settings),
        }
    )
    return shape, "config.json", target_folder(params.target, settings)


def _prompts(params: PipelineParams) -> tuple[int, str]:
    path = Path(params.prompts.file)
    if not path.exists() and params.prompts.num_train:
        return params.prompts.num_train, f"the configuration ({path} is not on this machine)"
    train, _ = split_prompts(
        load_prompts(path),
        num_train=params.prompts.num_train,
        num_heldout=params.prompts.num_heldout,
        seed=params.prompts.seed,
    )
    return len(train), str(path)
