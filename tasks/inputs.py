"""What is known before a server starts: prompts that fit, layer ids that exist, a store that works, enough disk."""

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.capture import CaptureError, CaptureSpec
from eagle3.conventions import EngineIds, ids_of
from eagle3.conversations import tokenize_given
from eagle3.digests import sha256_ids, sha256_json
from eagle3.errors import Eagle3Error
from eagle3.prompts import Prompt, PromptError, TokenizedPrompt, load_prompts, split_prompts, tokenize
from infra.settings import Settings
from infra.sglang.installed import sglang_version
from infra.sglang.launch import resolve_device
from infra.store import Store, StoreError, open_store
from tasks.params import ALSO_PROMPTS, DEMO_TARGET, AnswerParams, PipelineParams, PromptParams, ServingParams
from tasks.targets import open_target, target_folder

if TYPE_CHECKING:
    from eagle3.target import Target
    from infra.sglang.info import ServerInfo

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROW_BYTES = 9  # beside the states: an int64 token id and a mask
_TOUCHED = "checks/writable.txt"
# SGLang's longest request, prompt and answer, has this many tokens more than its max_req_input_len (tp_worker.py).
_INPUT_MARGIN = 5


class NoRoom(Eagle3Error):
    """A disk that is too small for what is about to be written."""


@dataclass(frozen=True)
class PromptFile:
    """Prompts of one file, ready to send."""

    name: str
    prompts: tuple[TokenizedPrompt, ...]
    ignored_turns: int = 0

    @property
    def sha256(self) -> str:
        """Of these prompts, not of the file's bytes: the file may hold more than was chosen."""
        return prompts_sha256(self.prompts)

    def first(self, most: int) -> "PromptFile":
        """The first `most` prompts as a set of its own; this very one where it has no more."""
        if most >= len(self.prompts):
            return self
        return PromptFile(f"{self.name}, first {most}", self.prompts[:most])


def prompts_sha256(prompts: Iterable[TokenizedPrompt]) -> str:
    """Digest over prompts in order: ids and tokens, and answers that are given."""
    return sha256_json([[prompt.id, sha256_ids(prompt.input_ids), *_given_parts(prompt)] for prompt in prompts])


def _given_parts(prompt: TokenizedPrompt) -> list[Any]:
    given = prompt.given
    return [] if given is None else [sha256_ids(given.output_ids), [[*span] for span in given.spans], given.left_out]


def prompt_parts(prompts: PromptParams, answers: AnswerParams, target: "Target") -> tuple[PromptFile, PromptFile]:
    """The training and the held-out prompts as tokens. Raises PromptError for any that cannot be asked.

    Where answers are given, the training prompts bring theirs; of held-out conversations the opening is asked.
    """
    given = answers.source == "given"
    loaded = load_prompts(Path(prompts.file), given=given)
    train, heldout = split_prompts(
        loaded, num_train=prompts.num_train, num_heldout=prompts.num_heldout, seed=prompts.seed
    )
    return (
        PromptFile(loaded.name, (_given if given else _tokens)(train, answers, target), _ignored(train)),
        PromptFile(f"{loaded.name} (held out)", _tokens(heldout, answers, target), _ignored(heldout)),
    )


def further_prompts(file: str, most: int, answers: AnswerParams, target: "Target") -> PromptFile:
    """The first `most` prompts of another file, as tokens."""
    loaded = load_prompts(Path(file))
    chosen = loaded.prompts[:most]
    return PromptFile(loaded.name, _tokens(chosen, answers, target), _ignored(chosen))


def named_apart(files: Sequence[PromptFile]) -> tuple[PromptFile, ...]:
    """The same files; names that several of them share get the digest of their prompts. Figures are kept by name.

    Raises PromptError where the same prompts stand twice under one name.
    """
    count = Counter(file.name for file in files)
    apart = tuple(
        replace(file, name=f"{file.name} ({file.sha256[:8]})") if count[file.name] > 1 else file for file in files
    )
    for name, times in Counter(file.name for file in apart).items():
        if times > 1:
            raise PromptError(f"{name}: the same prompts are named {times} times: name each prompt file once")
    return apart


def _tokens(prompts: Sequence[Prompt], answers: AnswerParams, target: "Target") -> tuple[TokenizedPrompt, ...]:
    return tuple(
        tokenize(
            [prompt.opening for prompt in prompts],
            target.tokenizer(),
            context_length=target.context_length,
            max_new_tokens=answers.max_new_tokens,
        )
    )


def _given(prompts: Sequence[Prompt], answers: AnswerParams, target: "Target") -> tuple[TokenizedPrompt, ...]:
    return tuple(tokenize_given(prompts, target.tokenizer(), answers.given, context_length=target.context_length))


def _ignored(prompts: Sequence[Prompt]) -> int:
    return sum(prompt.ignored_turns for prompt in prompts)


def check_lengths(
    info: "ServerInfo", prompts: Sequence[TokenizedPrompt], max_new_tokens: int, *, read_again: bool = False
) -> None:
    """PromptError where this server would refuse the longest prompt, or silently cut its answer short.

    Its limit is the smaller of context and KV cache. `read_again`: prompt and answer are also sent as one prompt.
    """
    limit = info.max_req_input_len
    if limit is None:
        return
    given = max((p for p in prompts if p.given), key=_read_tokens, default=None)
    if given is not None and _read_tokens(given) >= limit:
        raise PromptError(
            f"conversation {given.id} has {_read_tokens(given)} tokens, but this server takes prompts under {limit}: "
            "enlarge the KV cache (serving.max_total_tokens) where the target's context is longer, or cut longer "
            "conversations (answers.given.max_tokens, answers.given.too_long)"
        )
    asked = [prompt for prompt in prompts if not prompt.given]
    if not asked:
        return
    longest = max(asked, key=lambda prompt: len(prompt.input_ids))
    tokens = len(longest.input_ids)
    most = limit if read_again else limit + _INPUT_MARGIN - 1
    if tokens < limit and tokens + max_new_tokens <= most:
        return
    raise PromptError(
        f"prompt {longest.id} has {tokens} tokens and its answer up to {max_new_tokens}, but this server takes prompts "
        f"under {limit} tokens and {most} with the answer: enlarge the KV cache (serving.max_total_tokens) where the "
        "target's context is longer, take shorter prompts, or ask for shorter answers (answers.max_new_tokens)"
    )


def _read_tokens(prompt: TokenizedPrompt) -> int:
    """How many tokens of a given conversation the target reads: all but the last."""
    return len(prompt.input_ids) + prompt.most_answer_tokens(0) - 1


def tell_ignored(*files: PromptFile) -> None:
    """Log what is not asked, in a flow run."""
    for file in files:
        if file.ignored_turns:
            get_run_logger().warning("%s: the first turn is asked, %d later ones not", file.name, file.ignored_turns)
        cut = [prompt.given.left_out for prompt in file.prompts if prompt.given and prompt.given.left_out]
        if cut:
            get_run_logger().warning(
                "%s: the length cap cuts %d of %d conversations, by %d messages",
                file.name,
                len(cut),
                len(file.prompts),
                sum(cut),
            )


def resolve_ids(capture: CaptureSpec, *, version: str, model_class: str, num_layers: int) -> EngineIds:
    """SGLang's ids for the capture spec; an error where the target lacks a point, or SGLang cannot deliver it."""
    if capture.final != "norm":
        raise CaptureError(
            f"capture.final is {capture.final}, but SGLang delivers the state after the final norm: set it to norm. "
            f"({capture.final} can be a slot of the drafter: name it in capture.aux.)"
        )
    capture.check_target(num_layers)
    return ids_of(capture.aux, engine="sglang", version=version, model_class=model_class, num_layers=num_layers)


def states_dtype(serving: ServingParams, target: "Target", settings: Settings) -> str:
    """The type that the states will have; `auto` is float32 on a CPU, else the target's own."""
    if serving.dtype != "auto":
        return serving.dtype
    return "float32" if resolve_device(serving.device, settings) == "cpu" else target.dtype


def bytes_per_token(capture: CaptureSpec, hidden_size: int, dtype: str) -> int:
    """Bytes of the states of one token."""
    return len(capture.points) * hidden_size * _BYTES[dtype]


def most_bytes(prompts: Sequence[TokenizedPrompt], max_new_tokens: int, per_token: int) -> int:
    """Upper bound of a dump: every prompt's tokens and the longest answer, whose last token has no row."""
    rows = sum(len(prompt.input_ids) + prompt.most_answer_tokens(max_new_tokens) - 1 for prompt in prompts)
    return rows * (per_token + ROW_BYTES)


def check_room(folder: Path, needed: int) -> None:
    """NoRoom where the disk of `folder` has less than `needed` bytes free.

    Rows wait in the staging folder while a shard is uploaded, so a slow store can hold all of them here at once.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoom(
            f"the captured states may need {needed / 1e9:.2f} GB at {folder}, {free / 1e9:.2f} GB are free: "
            f"{(needed - free) / 1e9:.2f} GB lack. Free them, set EAGLE3_HOME to a larger disk, or take fewer prompts "
            "(prompts.num_train) or shorter answers (answers.max_new_tokens)."
        )


def touch_store(store: Store) -> None:
    """Write a small object and look for it: what is wrong with a store shows before the work, not after it."""
    store.put_bytes(_TOUCHED, b"eagle3 can write here\n")
    if not store.exists(_TOUCHED):
        raise StoreError(f"{store.uri_of(_TOUCHED)} was written and is not there: this store loses objects.")


@task(name="check inputs", cache_policy=NO_CACHE)
def check_inputs(params: PipelineParams, settings: Settings) -> None:
    """Everything that a stage would refuse after minutes and that is known now. Starts nothing.

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
    resolve_ids(params.capture, version=version, model_class=target.model_class, num_layers=target.num_layers)
    files = [*prompt_parts(params.prompts, params.answers, target)]
    files += [further_prompts(name, ALSO_PROMPTS, params.answers, target) for name in params.also]
    files = [files[0], *named_apart(files[1:])]  # the training prompts are not measured on
    tell_ignored(*files)
    for file in files:
        logger.info("%s: %d prompts fit the target", file.name, len(file.prompts))


def plan_version(params: PipelineParams, settings: Settings) -> str:
    """Version of the SGLang of this machine; the configuration's where there is none."""
    from infra.sglang.client import SglangError

    try:
        return sglang_version(settings)
    except SglangError:
        return params.plan_engine_version
