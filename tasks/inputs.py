"""The parts of the checks before a server starts: prompts that fit, layer ids, a store that works, enough disk."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from eagle3.capture import CaptureError, CaptureSpec
from eagle3.conventions import EngineIds, ids_of
from eagle3.conversations import tokenize_given
from eagle3.digests import sha256_ids, sha256_json
from eagle3.prompts import Prompt, PromptError, TokenizedPrompt, load_prompts, split_prompts, tokenize
from infra.settings import Settings
from infra.sglang.installed import sglang_version
from infra.sglang.launch import CPU_MAX_TOKENS, resolve_device
from infra.store import Store, StoreError
from tasks.params import AnswerParams, PipelineParams, PromptParams, ServingParams

if TYPE_CHECKING:
    from eagle3.target import Target
    from infra.sglang.info import ServerInfo

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROW_BYTES = 9  # beside the states: an int64 token id and a mask
_TOUCHED = "checks/writable.txt"
# SGLang's longest request, prompt and answer, has this many tokens more than its max_req_input_len (tp_worker.py).
_INPUT_MARGIN = 5


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

    def most_answer_tokens(self, max_new_tokens: int) -> int:
        """Of all answers together: those that are given, else as long as allowed."""
        return sum(prompt.most_answer_tokens(max_new_tokens) for prompt in self.prompts)

    def first(self, most: int) -> "PromptFile":
        """The first `most` prompts as a set of its own; this very one where it has no more."""
        if most >= len(self.prompts):
            return self
        return PromptFile(f"{self.name}, first {most}", self.prompts[:most])


def partitioned(prompts: Sequence[TokenizedPrompt], count: int, most: int) -> tuple[tuple[TokenizedPrompt, ...], ...]:
    """The prompts in `count` parts of about as many tokens, an answer of `most` counted; each in the given order.

    The same prompts give the same parts on every machine: the longest goes first, always to the lightest part. Raises
    PromptError where there are fewer prompts than parts.
    """
    if count > len(prompts):
        raise PromptError(
            f"{len(prompts)} prompts cannot be split into {count} partitions: every one needs a prompt. Set partitions "
            f"to {len(prompts)} or less"
        )
    tokens = {prompt.id: len(prompt.input_ids) + prompt.most_answer_tokens(most) for prompt in prompts}
    weights, place = [0] * count, {}
    for name in sorted(tokens, key=lambda name: (-tokens[name], name)):
        lightest = weights.index(min(weights))
        place[name] = lightest
        weights[lightest] += tokens[name]
    return tuple(tuple(prompt for prompt in prompts if place[prompt.id] == part) for part in range(count))


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
    from eagle3.target import quiet_transformers

    with quiet_transformers():  # it warns of what is refused here
        return tuple(
            tokenize(
                [prompt.opening for prompt in prompts],
                target.tokenizer(),
                context_length=target.context_length,
                max_new_tokens=answers.max_new_tokens,
            )
        )


def _given(prompts: Sequence[Prompt], answers: AnswerParams, target: "Target") -> tuple[TokenizedPrompt, ...]:
    from eagle3.target import quiet_transformers

    with quiet_transformers():
        return tuple(tokenize_given(prompts, target.tokenizer(), answers.given, context_length=target.context_length))


def _ignored(prompts: Sequence[Prompt]) -> int:
    return sum(prompt.ignored_turns for prompt in prompts)


def check_lengths(
    info: "ServerInfo", prompts: Sequence[TokenizedPrompt], max_new_tokens: int, *, read_again: bool = False
) -> None:
    """PromptError where this server would refuse the longest prompt, or silently cut its answer short.

    Its limit is the smaller of context and KV cache. `read_again`: prompt and answer are also sent as one prompt.
    """
    if info.max_req_input_len is not None:
        check_limit(info.max_req_input_len, prompts, max_new_tokens, read_again=read_again)


def known_limit(serving: ServingParams, context_length: int, settings: Settings) -> int:
    """The max_req_input_len, at most, of a server that is yet to be started: by the context, and a cache that is set.

    SGLang 0.5.23 (tp_worker.py): one token of the context and one of the cache are never used.
    """
    cache = serving.max_total_tokens
    if cache is None and resolve_device(serving.device, settings) == "cpu":
        cache = CPU_MAX_TOKENS
    return min(context_length, cache or context_length) - 1 - _INPUT_MARGIN


def check_limit(
    limit: int, prompts: Sequence[TokenizedPrompt], max_new_tokens: int, *, read_again: bool = False
) -> None:
    """`check_lengths` for a server that takes prompts under `limit` tokens."""
    given = max((p for p in prompts if p.given), key=_read_tokens, default=None)
    if given is not None and _read_tokens(given) >= limit:
        raise PromptError(
            f"conversation {given.id} has {_read_tokens(given)} tokens, but the server takes prompts under {limit}: "
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
        f"prompt {longest.id} has {tokens} tokens and its answer up to {max_new_tokens}, but the server takes prompts "
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


def reads_again(answers: AnswerParams, serving: ServingParams, settings: Settings) -> bool:
    """Whether answers are captured by a second pass; `auto` takes one where decode graphs are on: never on a CPU."""
    if answers.source != "auto":
        return answers.source == "answer_then_prefill"
    return resolve_device(serving.device, settings) == "cuda" and not serving.disable_decode_graphs


def most_bytes(prompts: Sequence[TokenizedPrompt], max_new_tokens: int, per_token: int) -> int:
    """Upper bound of a dump: every prompt's tokens and the longest answer, whose last token has no row."""
    rows = sum(len(prompt.input_ids) + prompt.most_answer_tokens(max_new_tokens) - 1 for prompt in prompts)
    return rows * (per_token + ROW_BYTES)


def touch_store(store: Store) -> None:
    """Write a small object and look for it: what is wrong with a store shows before the work, not after it."""
    store.put_bytes(_TOUCHED, b"eagle3 can write here\n")
    if not store.exists(_TOUCHED):
        raise StoreError(f"{store.uri_of(_TOUCHED)} was written and is not there: this store loses objects.")


def plan_version(params: PipelineParams, settings: Settings) -> str:
    """Version of the SGLang of this machine; the configuration's where there is none."""
    from infra.sglang.client import SglangError

    try:
        return sglang_version(settings)
    except SglangError:
        return params.plan_engine_version
