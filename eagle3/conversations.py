"""Given conversations as tokens: which tokens are the assistant's, and which of those a drafter learns from.

What is sent to the target ends with the last token under the loss, so that a conversation is a sample like any other:
tokens before the first answer, then answers (`spans`) with other people's turns between them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3.prompts import REASONING, GivenAnswers, Prompt, PromptError, TokenizedPrompt, check_template

MAX_SPANS = 1024
_OPEN, _CLOSE = "<think>", "</think>"
_THINKING = re.compile(rf"(?:{_OPEN}|\A(?=(?:(?!{_OPEN}).)*?{_CLOSE})).*?(?:{_CLOSE}|\Z)", re.DOTALL)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class GivenSettings(BaseModel):
    """How given conversations become samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Given conversations")

    turns: Literal["all", "last"] = Field(
        "all", title="Turns", description="The assistant's turns that are learned from: all of them, or the last one"
    )
    thinking: Literal["keep", "mask", "remove"] = Field(
        "keep",
        title="Thinking parts",
        description="`<think>...</think>` and `reasoning_content`: learned from, read but not learned from, or taken "
        "out of the text",
    )
    max_tokens: int | None = Field(
        None, ge=2, title="Longest conversation", description="Tokens; unset: as many as the target's context holds"
    )
    too_long: Literal["refuse", "cut"] = Field(
        "refuse", title="Longer ones", description="Are refused, or cut after the last assistant's turn that fits"
    )


@dataclass(frozen=True)
class _Rendered:
    """A conversation as the template writes it."""

    ids: tuple[int, ...] = field(repr=False)
    turns: tuple[tuple[int, Span], ...]
    """Message number (from 1) and tokens of the assistant's turns that are learned from, in order."""


def tokenize_given(
    conversations: Iterable[Prompt], tokenizer: Any, settings: GivenSettings, *, context_length: int
) -> list[TokenizedPrompt]:
    """Apply the chat template and find the assistant's tokens, by its generation markers or turn by turn.

    Raises PromptError, which names conversation and message: what the template refuses, a turn whose place cannot be
    told, a thinking part that the template drops although it should be kept, and what is longer than the cap.
    """
    check_template(tokenizer)
    limit = min(settings.max_tokens or context_length, context_length)
    return [_sample(conversation, tokenizer, settings, limit) for conversation in conversations]


def _sample(conversation: Prompt, tokenizer: Any, settings: GivenSettings, limit: int) -> TokenizedPrompt:
    messages = conversation.messages
    if settings.thinking == "remove":
        messages = tuple(_without_thinking(conversation, messages))
    rendered, kept = _fitting(conversation, messages, tokenizer, settings, limit)
    spans: list[Span] = []
    for number, span in rendered.turns:
        where = f"conversation {conversation.id}, message {number}"
        reasoning = messages[number - 1].get(REASONING, "").strip()
        spans += _learned(rendered.ids, span, reasoning, tokenizer, settings, where)
    if not spans:
        raise PromptError(
            f"conversation {conversation.id}: nothing is left to learn from: its answers are thinking parts alone, and "
            f"answers.given.thinking is {settings.thinking}. Remove it, or keep them."
        )
    if len(spans) > MAX_SPANS:
        raise PromptError(f"conversation {conversation.id} has {len(spans)} answers; at most {MAX_SPANS} are possible")
    start, end = spans[0][0], spans[-1][1]
    if start == 0:
        raise PromptError(f"conversation {conversation.id}: the chat template writes nothing before its first answer")
    left_out = len(messages) - kept
    return TokenizedPrompt(
        conversation.id,
        rendered.ids[:start],
        conversation.category,
        GivenAnswers(
            output_ids=rendered.ids[start:end],
            spans=tuple(spans),
            texts=tuple(tokenizer.decode(rendered.ids[a:b], skip_special_tokens=True) for a, b in spans),
            finish_reason="length" if left_out else "given",
            left_out=left_out,
        ),
    )


def _fitting(
    conversation: Prompt, messages: Sequence[Mapping[str, str]], tokenizer: Any, settings: GivenSettings, limit: int
) -> tuple[_Rendered, int]:
    """The conversation, or as many of its turns as fit into `limit` tokens; and how many messages that are.

    A shorter one is written anew: templates may treat the last turn otherwise than those before it.
    """
    ends = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    whole = 0
    while ends:
        rendered = _render(conversation, messages[: ends[-1]], tokenizer, settings)
        _, (_, size) = rendered.turns[-1]
        if size <= limit:
            return rendered, ends[-1]
        whole = whole or size
        ends.pop()
        if settings.too_long == "refuse":
            break
    mend = (
        "Shorten it, remove it, or set answers.given.too_long to cut"
        if settings.too_long == "refuse"
        else "Its first answer alone does not fit, so it cannot be cut between turns: shorten or remove it"
    )
    raise PromptError(
        f"conversation {conversation.id} has {whole} tokens with the chat template; the cap is {limit} "
        f"(answers.given.max_tokens, at most the target's context). {mend}."
    )


def _render(
    conversation: Prompt, messages: Sequence[Mapping[str, str]], tokenizer: Any, settings: GivenSettings
) -> _Rendered:
    numbers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    first = 0 if settings.turns == "all" else len(numbers) - 1
    if _has_markers(tokenizer):
        return _by_markers(conversation, messages, numbers, tokenizer, first)
    whole = _ids(conversation, messages, tokenizer)
    turns = []
    for number in numbers[first:]:
        where = f"conversation {conversation.id}, message {number} (the assistant's)"
        start = _end_of(_ids(conversation, messages[: number - 1], tokenizer, prompt=True), whole, tokenizer)
        through = _end_of(_ids(conversation, messages[:number], tokenizer), whole, tokenizer)
        if not start or not through:
            what = "everything up to its end" if start else "what comes before it"
            raise PromptError(
                f"{where}: its place among the tokens cannot be told: {what}, written alone, is not how the whole "
                "conversation begins. The chat template writes a turn otherwise when others follow (many drop earlier "
                "thinking parts): set answers.given.turns to last, give each turn as a conversation of its own, or "
                "give the target a template with {% generation %} markers."
            )
        end = _closed(whole, start, through, tokenizer)
        if end <= start:
            raise PromptError(f"{where}: the chat template writes nothing for it")
        turns.append((number, (start, end)))
    return _Rendered(whole, tuple(turns))


def _by_markers(
    conversation: Prompt, messages: Sequence[Mapping[str, str]], numbers: Sequence[int], tokenizer: Any, first: int
) -> _Rendered:
    """The turns from `numbers[first]` on, where the template itself marks what the assistant says."""
    encoded = _apply(
        conversation,
        messages,
        tokenizer,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
    )
    ids, mask = tuple(encoded["input_ids"]), encoded["assistant_masks"]
    edges = [i for i, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if len(spans) != len(numbers):
        raise PromptError(
            f"conversation {conversation.id} has {len(numbers)} answers, but the chat template's {{% generation %}} "
            f"markers mark {len(spans)}: turns side by side, or a template that marks other things"
        )
    return _Rendered(ids, tuple(zip(numbers, spans, strict=True))[first:])


def _learned(
    ids: Sequence[int], span: Span, reasoning: str, tokenizer: Any, settings: GivenSettings, where: str
) -> list[Span]:
    """The parts of a turn that are learned from."""
    start, end = span
    text = _text(ids[start:end], tokenizer)
    if settings.thinking != "mask":
        if settings.thinking == "keep" and reasoning and reasoning not in text:
            raise PromptError(
                f"{where}: the chat template leaves its {REASONING} out, so it cannot be kept: set "
                "answers.given.thinking to remove, or write it into `content` as the target would"
            )
        return [span]
    masked = [match.span() for match in _THINKING.finditer(text) if match.group()]
    if reasoning and not masked and reasoning in text:  # written without tags
        masked = [(text.index(reasoning), text.index(reasoning) + len(reasoning))]
    spans, at = [], start
    for first, last in masked:
        a, b = (start + _token_at(ids[start:end], place, tokenizer) for place in (first, last - 1))
        part = text[first:last].strip()
        if part not in _text(ids[a : b + 1], tokenizer):
            raise PromptError(
                f"{where}: the tokens of its thinking part cannot be told; remove them (thinking: remove)"
            )
        spans.append((at, a))
        at = b + 1
    return [(a, b) for a, b in [*spans, (at, end)] if a < b]


def _token_at(ids: Sequence[int], place: int, tokenizer: Any) -> int:
    """The token that writes character `place` of the decoded text."""
    low, high = 0, len(ids) - 1
    while low < high:  # text grows with tokens; a character in several tokens belongs to the first of them
        middle = (low + high) // 2
        if len(_text(ids[: middle + 1], tokenizer)) > place:
            high = middle
        else:
            low = middle + 1
    return low


def _end_of(part: Sequence[int], whole: Sequence[int], tokenizer: Any) -> int:
    """How many tokens of the whole are those of its beginning `part`; 0 where it does not begin so.

    A blank at the part's end may have become one token with the word that follows: then that token follows.
    """
    same = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    return same if not _text(part[same:], tokenizer).strip() else 0


def _closed(ids: Sequence[int], start: int, end: int, tokenizer: Any) -> int:
    """The end of a turn without the blank that a template writes after its end-of-turn token: nobody generates it."""
    special = set(tokenizer.all_special_ids)
    at = end
    while at > start and ids[at - 1] not in special and not _text(ids[at - 1 : at], tokenizer).strip():
        at -= 1
    return at if at > start and ids[at - 1] in special else end


def _without_thinking(conversation: Prompt, messages: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            yield dict(message)
            continue
        content = message["content"]
        if _OPEN in content or _CLOSE in content:
            content = _THINKING.sub("", content).strip()
        if not content:
            raise PromptError(
                f"conversation {conversation.id}, message {number}: without its thinking part nothing is left of it"
            )
        yield {"role": "assistant", "content": content}


def _has_markers(tokenizer: Any) -> bool:
    """Whether the template marks what the assistant says. Only fast tokenizers can map that to tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    template = tokenizer.get_chat_template()
    return isinstance(template, str) and bool(_MARKERS.search(template))


def _ids(
    conversation: Prompt, messages: Sequence[Mapping[str, str]], tokenizer: Any, *, prompt: bool = False
) -> tuple[int, ...]:
    ids = _apply(conversation, messages, tokenizer, return_dict=False, add_generation_prompt=prompt)
    if isinstance(ids, Mapping):  # a tokenizer's own code may not know `return_dict`
        ids = ids["input_ids"]
    return tuple(int(i) for i in ids)


def _apply(conversation: Prompt, messages: Sequence[Mapping[str, str]], tokenizer: Any, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=True, **options)
    except TemplateError as error:
        raise PromptError(f"conversation {conversation.id}: the target's chat template refuses it: {error}") from None


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
