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
from tasks.advice import data_advice, passes_over
from tasks.estimate import Estimate, PromptTokens, estimate, most_staged
from tasks.input_checks import check_drafter, check_points, check_prompts
from tasks.inputs import ROW_BYTES, bytes_per_token, plan_version, reads_again, states_dtype
from tasks.params import DEMO_TARGET, ExtractParams, PipelineParams, TargetShape
from tasks.room import NoRoom, Room, refuse_lacking, staging_elsewhere, staging_room, store_rooms
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
    advice: tuple[str, ...] = Field(description="What is allowed and probably not wanted, with figures")

    @property
    def verdict(self) -> Literal["fits", "lacking", "unknown"]:
        verdicts = {room.verdict for room in self.rooms}
        return "lacking" if "lacking" in verdicts else "unknown" if "unknown" in verdicts else "fits"


def plan_pipeline(
    params: PipelineParams,
    settings: Settings,
    staging: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """Resolve everything that can be resolved without a server; refuse what the pipeline's own start would refuse.

    Writes nothing but the demo's model, where that is the target and not made yet; `on_progress` is told. A store that
    cannot be written to is found by the start only.

    `staging` is a folder on the disk where captured rows will wait; unset: this machine's own, where the target is on
    this machine, else the worker's, which cannot be asked from here.
    """
    shape, shape_from, folder, target = _shape(params, settings, on_progress)
    version = plan_version(params, settings)
    ids = check_points(params, version=version, model_class=shape.model_class, num_layers=shape.num_layers)
    if target:
        check_drafter(params, target)
    extraction = params.extraction()
    config = capture_config(extraction, folder, ids, settings.root / "staging" / params.name)
    launch: LaunchPlan = launch_plan(config, _PLAN_PORT, settings)
    per_token = bytes_per_token(params.capture, shape.hidden_size, shape.dtype)
    tokens, remarks = _prompt_tokens(params, shape, target, settings)
    figures = _estimate(extraction, tokens, per_token, settings)
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
        passes=passes_over(params, tokens.num_prompts),
        advice=(*remarks, *data_advice(params, tokens.num_prompts, figures.most_answer_tokens)),
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
    return estimate(
        params.plan,
        prompts,
        # SGLang generates one token even where it is to read only.
        max_new_tokens=params.answers.max_new_tokens,
        bytes_per_token=per_token,
        row_bytes=ROW_BYTES,
        read_again=reads_again(params.answers, serving, settings),
        num_gpus=serving.tensor_parallel if on_gpu else 0,
        partitions=1 if serving.attach else params.partitions,  # one running server is as fast as it is
    )


def _shape(
    params: PipelineParams, settings: Settings, on_progress: Callable[[str], None] | None
) -> "tuple[TargetShape, str, Path, Target | None]":
    """The target's shape, where that is known from, its folder, and the target where it is on this machine."""
    named = Path(params.target.path).expanduser()
    if params.target.path != DEMO_TARGET and params.target.shape and not named.exists():
        return params.target.shape, "the configuration (the target's folder is not on this machine)", named, None
    target = open_target(params.target, settings, on_progress)
    shape = TargetShape.model_validate(
        {
            "model_class": target.model_class,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "context_length": target.context_length,
            "dtype": states_dtype(params.serving, target, settings),
        }
    )
    return shape, "config.json", target_folder(params.target, settings), target


def _prompt_tokens(
    params: PipelineParams, shape: TargetShape, target: "Target | None", settings: Settings
) -> tuple[PromptTokens, tuple[str, ...]]:
    """Tokenised where prompts and tokenizer are here, estimated from the text, or assumed where there is no text.

    And what an estimate cannot refuse: PromptError is raised for what is known.
    """
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
        ), ()
    if target is not None:
        train, _ = check_prompts(params, target, settings)
        return _tokenized(train.prompts, str(path)), ()
    chosen, heldout = split_prompts(
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
    ), _probably_too_long((*chosen, *heldout), params, shape)


def _probably_too_long(prompts: Sequence[Prompt], params: PipelineParams, shape: TargetShape) -> tuple[str, ...]:
    per_token, most = params.plan.text_bytes_per_token, params.answers.max_new_tokens
    longest, tokens = max(
        ((prompt, _text_tokens(prompt.opening, per_token)) for prompt in prompts), key=lambda pair: pair[1]
    )
    if shape.context_length is None or tokens + most <= shape.context_length:
        return ()
    return (
        f"prompt {longest.id} has about {tokens:,} tokens (estimated): with an answer of up to {most:,} that is more "
        f"than the target's context of {shape.context_length:,}, and the run would refuse it",
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
