"""What a stage would refuse after minutes and is known now: looked at before the first stage, and by a dry run."""

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.capture import CaptureError
from eagle3.conventions import EngineIds, ids_of
from infra.settings import Settings
from infra.store import open_store
from tasks.advice import data_advice
from tasks.drafters import new_config
from tasks.inputs import (
    PromptFile,
    check_limit,
    further_prompts,
    known_limit,
    named_apart,
    plan_version,
    prompt_parts,
    reads_again,
    resolve_ids,
    tell_ignored,
    touch_store,
)
from tasks.params import ALSO_PROMPTS, DEMO_TARGET, PipelineParams
from tasks.targets import open_target, target_folder

if TYPE_CHECKING:
    from eagle3.target import Target


def check_points(params: PipelineParams, *, version: str, model_class: str, num_layers: int) -> EngineIds:
    """SGLang's ids for the capture. CaptureError where a point, also of the mismatch, is not there or not delivered."""
    ids = resolve_ids(params.capture, version=version, model_class=model_class, num_layers=num_layers)
    if params.mismatch:
        points = params.mismatch.points
        try:
            ids_of(points, engine="sglang", version=version, model_class=model_class, num_layers=num_layers)
        except CaptureError as error:
            raise CaptureError(
                f"mismatch.points: {error}. Name others, or set `mismatch: null` (the default is the demo's)"
            ) from None
    return ids


def check_drafter(params: PipelineParams, target: "Target") -> None:
    """DrafterConfigError where the drafter's own size fits no drafter of this target. A parent brings its own shape."""
    if params.parent is None:
        size = min(params.drafter.draft_vocab_size, target.vocab_size)
        new_config(params.drafter, target, num_slots=len(params.capture.aux), draft_vocab_size=size)


def check_prompts(
    params: PipelineParams, target: "Target", settings: Settings
) -> tuple[PromptFile, tuple[PromptFile, ...]]:
    """The training prompts and the files that are measured on, the held-out prompts first; all of them as tokens.

    PromptError, with the prompt named, for what cannot be asked: longer than the target's context or the KV cache that
    is set, empty, standing twice, too few for the split.
    """
    train, heldout = prompt_parts(params.prompts, params.answers, target)
    further = [further_prompts(name, ALSO_PROMPTS, params.answers, target) for name in params.also]
    measured = named_apart([heldout, *further])
    limit, most = known_limit(params.serving, target.context_length, settings), params.answers.max_new_tokens
    if params.serving.attach is None:  # else that server's own limit, asked when the extraction starts
        again = reads_again(params.answers, params.serving, settings)
        check_limit(limit, train.prompts, most, read_again=again)
    for file in measured:
        check_limit(limit, file.prompts, most)
    return train, measured


@task(name="check inputs", cache_policy=NO_CACHE)
def check_inputs(params: PipelineParams, settings: Settings) -> None:
    """Everything that can be refused before anything starts.

    Where the target's folder is not on this worker, its checks are left to the extraction, and that is logged.
    """
    logger = get_run_logger()
    touch_store(open_store(settings.store, settings))
    if params.target.path != DEMO_TARGET and not target_folder(params.target, settings).exists():
        logger.warning(
            "the target's folder %s is not on this worker: prompts and layer ids are checked by the extraction",
            params.target.path,
        )
        return
    target = open_target(params.target, settings, logger.info)
    version = plan_version(params, settings)
    check_points(params, version=version, model_class=target.model_class, num_layers=target.num_layers)
    check_drafter(params, target)
    train, measured = check_prompts(params, target, settings)
    tell_ignored(train, *measured)
    for file in (train, *measured):
        logger.info("%s: %d prompts fit the target", file.name, len(file.prompts))
    for line in data_advice(params, len(train.prompts), train.most_answer_tokens(params.answers.max_new_tokens)):
        logger.warning(line)
