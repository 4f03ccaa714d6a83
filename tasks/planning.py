"""What a pipeline would do, without doing it: launch command, layer ids, sizes, time, money, and whether it fits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3.conventions import EngineIds
from eagle3.prompts import Prompt, TokenizedPrompt, load_prompts, split_prompts
from eagle3.training.config import TrainingConfig
from infra.settings import Settings
from infra.sglang.launch import LaunchPlan, launch_plan, resolve_device
from tasks.estimate import Estimate, PromptTokens, estimate, most_staged
from tasks.inputs import ROW_BYTES, NoRoom, bytes_per_token, plan_version, prompt_parts, resolve_ids, states_dtype
from tasks.params import DEMO_TARGET, ExtractParams, PipelineParams, TargetShape
from tasks.room import Room, refuse_lacking, staging_elsewhere, staging_room, store_rooms
from tasks.serving import capture_config
from tasks.targets import open_target, target_folder

if TYPE_CHECKING:
    from eagle3.target import Target

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
    estimate: Estimate
    rooms: tuple[Room, ...]
    training: TrainingConfig
    passes: float | None = Field(description="Over the samples, where the budget is in steps")

    @property
    def verdict(self) -> Literal["fits", "lacking", "unknown"]:
        verdicts = {room.verdict for room in self.rooms}
        return "lacking" if "lacking" in verdicts else "unknown" if "unknown" in verdicts else "fits"


def plan_pipeline(params: PipelineParams, settings: Settings, staging: Path | None = None) -> Plan:
    """Resolve everything that can be resolved without a server.

    `staging` is a folder on the disk where captured rows will wait; unset: this machine's own, where the target is on
    this machine, else the worker's, which cannot be asked from here.
    """
    shape, shape_from, folder, target = _shape(params, settings)
    ids = resolve_ids(
        params.capture,
        version=plan_version(params, settings),
        model_class=shape.model_class,
        num_layers=shape.num_layers,
    )
    extraction = params.extraction()
    config = capture_config(extraction, folder, ids, settings.root / "staging" / params.name)
    launch: LaunchPlan = launch_plan(config, _PLAN_PORT, settings)
    per_token = bytes_per_token(params.capture, shape.hidden_size, shape.dtype)
    figures = _estimate(extraction, _prompt_tokens(params, target), per_token, settings)
    here = staging or (settings.root if target else None)
    needed = _staging_need(extraction, figures)
    waiting = staging_room(here, needed) if here else staging_elsewhere(needed)
    return Plan(
        name=params.name,
        target=str(folder),
        shape=shape,
        shape_from=shape_from,
        points=tuple(params.capture.points),
        ids=ids,
        command=tuple(launch.command),
        environment=launch.env,
        num_prompts=figures.prompts.num_prompts,
        prompts_from=figures.prompts.where,
        longest_answer=params.answers.max_new_tokens,
        estimate=figures,
        rooms=(waiting, *store_rooms(settings, figures.most_bytes, waiting)),
        training=params.training,
        passes=_passes(params.training, figures.prompts.num_prompts),
    )


def announce_extraction(
    params: ExtractParams,
    prompts: Sequence[TokenizedPrompt],
    per_token: int,
    settings: Settings,
    log: Callable[[str], None],
) -> Estimate:
    """Say what the capture of these prompts is going to take, before a server starts.

    NoRoom where the store has no room for it, or cannot be asked whether its quota suffices. The staging disk is the
    extraction's own to check: it knows its folders.
    """
    tokens = _tokenized(prompts, params.prompts.file)
    figures = _estimate(params, tokens, per_token, settings)
    for heading, line in figures.lines().items():
        log(f"plan: {heading}: {line}")
    log(f"plan: assumed: {'; '.join(figures.assumptions)}")
    rooms = store_rooms(settings, figures.most_bytes)
    for room in rooms:
        log(f"plan: {room.sentence()}")
    refuse_lacking(rooms)
    if unknown := [room.sentence() for room in rooms if room.verdict == "unknown"]:
        raise NoRoom(f"{'; '.join(unknown)}. Mend that, or unset EAGLE3_STORE_QUOTA")
    return figures


def _staging_need(params: ExtractParams, figures: Estimate) -> int:
    """What may lie on the staging disk at once: a small dump's rows and shards, all of them; of a larger one a part."""
    prompts = figures.prompts
    longest = prompts.longest + (0 if prompts.given is not None else params.answers.max_new_tokens)
    most = most_staged(
        params.staging_mib * 2**20,
        shard_bytes=params.shard_mib * 2**20,
        longest=longest,
        row_bytes=figures.bytes_per_token + ROW_BYTES,
    )
    return min(2 * figures.most_bytes, most)


def _estimate(params: ExtractParams, prompts: PromptTokens, per_token: int, settings: Settings) -> Estimate:
    serving = params.serving
    on_gpu = resolve_device(serving.device, settings) == "cuda"
    source = params.answers.source
    return estimate(
        params.plan,
        prompts,
        # SGLang generates one token even where it is to read only.
        max_new_tokens=params.answers.max_new_tokens,
        bytes_per_token=per_token,
        row_bytes=ROW_BYTES,
        # `auto` captures while answering where decode graphs are off, as they are on a CPU.
        read_again=source == "answer_then_prefill"
        or (source == "auto" and on_gpu and not serving.disable_decode_graphs),
        num_gpus=serving.tensor_parallel if on_gpu else 0,
    )


def _passes(training: TrainingConfig, num_samples: int) -> float | None:
    if training.budget_unit != "steps":
        return None
    return training.budget * training.batch_size * training.gradient_accumulation / num_samples


def _shape(params: PipelineParams, settings: Settings) -> "tuple[TargetShape, str, Path, Target | None]":
    """The target's shape, where that is known from, its folder, and the target where it is on this machine."""
    named = Path(params.target.path).expanduser()
    if params.target.path != DEMO_TARGET and params.target.shape and not named.exists():
        return params.target.shape, "the configuration (the target's folder is not on this machine)", named, None
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
    return shape, "config.json", target_folder(params.target, settings), target


def _prompt_tokens(params: PipelineParams, target: "Target | None") -> PromptTokens:
    """Tokenised where prompts and tokenizer are here, estimated from the text, or assumed where there is no text."""
    path, given = Path(params.prompts.file), params.answers.source == "given"
    if not path.exists() and params.prompts.num_train:
        count, mean, plan = params.prompts.num_train, params.plan.mean_prompt_tokens, params.plan
        answer = plan.mean_answer_tokens or params.answers.max_new_tokens
        return PromptTokens(
            num_prompts=count,
            tokens=count * mean,
            given=count * answer if given else None,
            longest=mean + (answer if given else 0),
            known="assumed",
            where=f"the configuration ({path} is not on this machine)",
        )
    if target is not None:
        train, _ = prompt_parts(params.prompts, params.answers, target)
        return _tokenized(train.prompts, str(path))
    chosen, _ = split_prompts(
        load_prompts(path, given=given),
        num_train=params.prompts.num_train,
        num_heldout=params.prompts.num_heldout,
        seed=params.prompts.seed,
    )
    opening, whole = (
        [_text_tokens(prompt, params.plan.text_bytes_per_token) for prompt in prompts]
        for prompts in ([prompt.opening for prompt in chosen], chosen)
    )
    return PromptTokens(
        num_prompts=len(chosen),
        tokens=sum(opening),
        given=max(sum(whole) - sum(opening), len(chosen)) if given else None,
        longest=max(whole),
        known="estimated",
        where=str(path),
    )


def _tokenized(prompts: Sequence[TokenizedPrompt], where: str) -> PromptTokens:
    answers = [prompt.most_answer_tokens(0) for prompt in prompts]  # 0 where the target answers
    return PromptTokens(
        num_prompts=len(prompts),
        tokens=sum(len(prompt.input_ids) for prompt in prompts),
        given=sum(answers) if any(prompt.given for prompt in prompts) else None,
        longest=max(len(prompt.input_ids) + answer for prompt, answer in zip(prompts, answers, strict=True)),
        known="tokenised",
        where=where,
    )


def _text_tokens(prompt: Prompt, bytes_per_token: float) -> int:
    return max(1, round(len(prompt.text.encode()) / bytes_per_token))
