"""Prompts: JSON lines read without guessing, a split that cannot leak, tokens that fit the context."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eagle3.digests import sha256_bytes, sha256_json
from eagle3.errors import Eagle3Error

MAX_LINE_BYTES = 2**20
# As long as a sample's id may be in a dump (SampleRecord.id).
MAX_ID_LENGTH = 200

Split = Literal["train", "heldout"]
_FORMS = ("turns", "messages", "prompt")
_ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = 'expected one object such as {"prompt": "..."}, {"turns": ["..."]} or {"messages": [...]}'
REASONING = "reasoning_content"
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class PromptError(Eagle3Error, ValueError):
    """A prompt file that cannot be used as it is; the message names file and line."""


@dataclass(frozen=True)
class Prompt:
    """One conversation that ends where the target begins to answer; or, if it is given whole, with an answer."""

    id: str
    messages: tuple[dict[str, str], ...]
    """OpenAI form: `role` and `content`, of a given answer also `reasoning_content`."""
    category: str | None = None
    split: Split | None = None
    ignored_turns: int = 0
    """MT-bench's later user turns: they need an answer to the first one and are not asked."""

    @property
    def text(self) -> str:
        """All that is said in it, for comparing prompts."""
        return "\n".join(message["content"] for message in self.messages)

    @property
    def is_given(self) -> bool:
        """Whether it ends with an answer."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def opening(self) -> "Prompt":
        """What is asked where it is not given: everything before a given conversation's first answer."""
        if not self.is_given:
            return self
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        return replace(self, messages=self.messages[:first])


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    sha256: str
    """Of the file's bytes."""
    name: str
    """The file's name without its folder."""

    @property
    def ignored_turns(self) -> int:
        """How many later turns of MT-bench prompts are not asked."""
        return sum(prompt.ignored_turns for prompt in self.prompts)


@dataclass(frozen=True)
class GivenAnswers:
    """The rest of a given conversation, from its first answer on."""

    output_ids: tuple[int, ...] = field(repr=False)  # from the first token that is learned from to the last
    spans: tuple[tuple[int, int], ...]  # [start, end) of what is learned from, in the whole conversation
    texts: tuple[str, ...] = field(repr=False)  # of each span, without special tokens
    finish_reason: str  # "given", or "length" where the length cap left messages out
    left_out: int = 0  # how many


@dataclass(frozen=True)
class TokenizedPrompt:
    id: str
    input_ids: tuple[int, ...] = field(repr=False)
    """Token ids with the chat template and its generation prompt."""
    category: str | None = None
    given: GivenAnswers | None = None
    """What follows, where the target does not answer itself."""

    def most_answer_tokens(self, max_new_tokens: int) -> int:
        """How many tokens may follow the prompt."""
        return max_new_tokens if self.given is None else len(self.given.output_ids)


def load_prompts(path: Path, *, given: bool = False) -> PromptSet:
    """Read a UTF-8 file of one JSON object a line: `prompt`, MT-bench `turns` or OpenAI `messages`.

    Optional keys: `id` or `question_id`, `category`, `split` ("train" or "heldout"); others are left alone. Of `turns`
    the first is asked, the rest is counted. Without an id a prompt gets one made from its text. Raises PromptError
    with file and line for whatever is not a prompt: nothing is skipped.

    `given`: conversations with their answers, for a target that reads them only: `messages` that end with the
    assistant's, or MT-bench `turns` with an answer to each in `reference`.
    """
    digest = hashlib.sha256()
    prompts: dict[str, tuple[int, Prompt]] = {}
    for number, line in _lines(path):
        digest.update(line)
        where = f"{path}, line {number}"
        prompt = (_given if given else _prompt)(_object(line, number, where), where)
        if prompt.id in prompts:
            first, other = prompts[prompt.id]
            same = "the same prompt" if other.messages == prompt.messages else f"the id {prompt.id!r}"
            raise PromptError(f"{where}: {same} stands in line {first} already; every prompt may appear once")
        prompts[prompt.id] = number, prompt
    if not prompts:
        raise PromptError(f"{path} is empty: {_EXPECTED} a line")
    return PromptSet(tuple(prompt for _, prompt in prompts.values()), digest.hexdigest(), path.name)


def split_prompts(
    prompts: PromptSet, *, num_train: int | None, num_heldout: int, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts, both in the file's order.

    A prompt that names its split stays there; the others are dealt by the hash of seed and id, held-out first, so that
    asking for more training prompts never moves a held-out one. `num_train` None takes all that are left. Raises
    PromptError where there are too few, or where a text stands on both sides.
    """
    by_hash = sorted(prompts.prompts, key=lambda prompt: sha256_bytes(f"{seed}:{prompt.id}".encode()))
    named = {split: [p for p in by_hash if p.split == split] for split in ("train", "heldout")}
    free = [p for p in by_hash if p.split is None]
    num_free_heldout = max(0, num_heldout - len(named["heldout"]))
    heldout = named["heldout"][:num_heldout] + free[:num_free_heldout]
    train = named["train"] + free[num_free_heldout:]
    if len(heldout) < num_heldout or len(train) < (num_train or 1):
        raise PromptError(
            f"{prompts.name}: asked for {num_train or 'at least 1'} training and {num_heldout} held-out prompts; it "
            f"has {len(prompts.prompts)} ({len(named['train'])} marked train, {len(named['heldout'])} marked heldout, "
            f"{len(free)} free). Ask for fewer, or add prompts."
        )
    train = train[:num_train]
    _check_no_leak(prompts.name, train, heldout)
    chosen = {p.id for p in train}, {p.id for p in heldout}
    in_train, in_heldout = (tuple(p for p in prompts.prompts if p.id in ids) for ids in chosen)
    return in_train, in_heldout


def tokenize(
    prompts: Iterable[Prompt], tokenizer: Any, *, context_length: int, max_new_tokens: int
) -> list[TokenizedPrompt]:
    """Apply the chat template with its generation prompt.

    Raises PromptError for a prompt that leaves no room for `max_new_tokens` in a context of `context_length` tokens,
    and for one that the template refuses.
    """
    check_template(tokenizer)
    room = context_length - max_new_tokens
    tokenized = []
    for prompt in prompts:
        ids = _apply_template(prompt, tokenizer)
        if len(ids) > room:
            raise PromptError(
                f"prompt {prompt.id} has {len(ids)} tokens with the chat template; the target's context of "
                f"{context_length} leaves {room} beside an answer of {max_new_tokens}. Shorten the prompt, remove it, "
                "or ask for shorter answers."
            )
        tokenized.append(TokenizedPrompt(prompt.id, ids, prompt.category))
    return tokenized


def check_template(tokenizer: Any) -> None:
    """PromptError where conversations cannot be written as tokens."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "the target's tokenizer has no chat template, so a conversation cannot be written as tokens. Put the "
            "model's chat_template.jinja into its folder."
        )


def ngram_overlap(train_texts: Iterable[str], heldout_texts: Iterable[str], n: int) -> float:
    """Share, 0 to 1, of the held-out n-grams that also stand in a training text.

    An n-gram is n lower-cased words in a row inside one text, punctuation left out; a repeated one counts each time.
    """
    if n < 1:
        raise PromptError(f"n-grams need n >= 1; it is {n}")
    known = {gram for text in train_texts for gram in _ngrams(text, n)}
    grams = [gram for text in heldout_texts for gram in _ngrams(text, n)]
    if not grams:
        raise PromptError(f"no held-out text has {n} words, so there is no overlap to state")
    return sum(gram in known for gram in grams) / len(grams)


def _ngrams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    return (tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered raw lines, each within the size limit."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise PromptError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes: {_EXPECTED} a line. Is the "
                        "file one JSON array? Write one object a line."
                    )
                yield number, line
    except FileNotFoundError:
        raise PromptError(f"there is no prompts file {path}: {_EXPECTED} a line") from None
    except OSError as error:
        raise PromptError(f"cannot read the prompts file {path}: {error.strerror or error}") from None


def _object(line: bytes, number: int, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not UTF-8 (byte {error.start + 1}). Save the file as UTF-8.") from None
    if not text.strip():
        raise PromptError(f"{where} is empty: {_EXPECTED}. Delete the line.")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not valid JSON: {error.msg} at column {error.colno}; {_EXPECTED}") from None
    except RecursionError:
        raise PromptError(f"{where} is not usable JSON: nested too deeply; {_EXPECTED}") from None
    if not isinstance(value, dict):
        raise PromptError(f"{where} holds {_kind(value)}; {_EXPECTED}")
    return value


def _prompt(value: dict[str, Any], where: str) -> Prompt:
    forms = [form for form in _FORMS if value.get(form) is not None]
    if len(forms) != 1:
        came = f"it has {' and '.join(forms)}" if forms else f"its keys are {', '.join(map(repr, value)) or 'none'}"
        raise PromptError(f"{where}: exactly one of `prompt`, `turns` and `messages` is the prompt; {came:.300}")
    form = forms[0]
    ignored = 0
    if form == "prompt":
        messages: tuple[dict[str, str], ...] = ({"role": "user", "content": _text(value["prompt"], "prompt", where)},)
    elif form == "turns":
        turns = _list(value["turns"], "turns", where)
        texts = [_text(turn, f"turn {n}", where) for n, turn in enumerate(turns, 1)]
        messages, ignored = ({"role": "user", "content": texts[0]},), len(texts) - 1
    else:
        messages = _messages(value, where)
    return Prompt(
        id=_id(value, messages, where),
        messages=messages,
        category=_optional_text(value.get("category"), "category", where),
        split=_split(value.get("split"), where),
        ignored_turns=ignored,
    )


def _given(value: dict[str, Any], where: str) -> Prompt:
    """A conversation with its answers."""
    if value.get("prompt") is not None or (value.get("messages") is None) == (value.get("turns") is None):
        raise PromptError(
            f"{where}: a given conversation is either `messages` that end with the assistant's, or `turns` with an "
            f"answer to each in `reference`; the keys are {', '.join(map(repr, value)) or 'none'}"
        )
    if value.get("turns") is None:
        messages = _messages(value, where, given=True)
    else:
        turns, answers = (_list(value.get(key), key, where) for key in ("turns", "reference"))
        if len(turns) != len(answers):
            raise PromptError(f"{where}: {len(turns)} turns and {len(answers)} answers in `reference`")
        said = [text for pair in zip(turns, answers, strict=True) for text in pair]
        messages = tuple(
            {"role": ("user", "assistant")[n % 2], "content": _text(text, f"text {n + 1}", where)}
            for n, text in enumerate(said)
        )
    return Prompt(
        id=_id(value, messages, where),
        messages=messages,
        category=_optional_text(value.get("category"), "category", where),
        split=_split(value.get("split"), where),
    )


def _messages(value: dict[str, Any], where: str, *, given: bool = False) -> tuple[dict[str, str], ...]:
    for key in ("tools", "functions"):
        if value.get(key):
            raise PromptError(f"{where}: `{key}` would change the prompt and is not supported; remove it")
    messages = []
    for number, message in enumerate(_list(value["messages"], "messages", where), 1):
        name = f"message {number}"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise PromptError(
                f"{where}: {name} needs a `role` ({', '.join(_ROLES)}) and a `content`; it is {message!r:.120}"
            )
        thinks = given and message["role"] == "assistant" and message.get(REASONING) is not None
        known = ("role", "content", *([REASONING] if thinks else []))
        extra = sorted(key for key, item in message.items() if key not in known and item is not None)
        if extra:
            raise PromptError(f"{where}: {name} has {', '.join(extra)}; only `role` and `content` are supported")
        reasoning = {REASONING: _text(message[REASONING], f"{REASONING} of {name}", where)} if thinks else {}
        messages.append({"role": message["role"], "content": _text(message.get("content"), name, where), **reasoning})
    if given:
        roles = [message["role"] for message in messages]
        if roles[-1] != "assistant" or roles[0] == "assistant":
            raise PromptError(
                f"{where}: a given conversation begins with what was asked and ends with the assistant's answer; the "
                f"first message is the {roles[0]}'s and the last the {roles[-1]}'s"
            )
    elif messages[-1]["role"] in ("assistant", "system"):
        raise PromptError(
            f"{where}: the last message is the {messages[-1]['role']}'s; the target writes the answer itself, so a "
            "conversation must end with the user. Remove that message."
        )
    return tuple(messages)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where}: {name} must be text; it is {_kind(value)}")
    if not value.strip():
        raise PromptError(f"{where}: {name} is empty. Give it a text, or delete the line.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where}: {name} holds half of a surrogate pair, which is no character") from None
    return value


def _optional_text(value: Any, name: str, where: str) -> str | None:
    return None if value is None else _text(value, name, where)


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: {name} must be a list with at least one entry; it is {_kind(value)}")
    return value


def _split(value: Any, where: str) -> Split | None:
    if value in (None, "train", "heldout"):
        return value
    raise PromptError(f'{where}: split must be "train" or "heldout"; it is {value!r:.80}')


def _id(value: dict[str, Any], messages: Sequence[Mapping[str, str]], where: str) -> str:
    given = value["id"] if value.get("id") is not None else value.get("question_id")
    if given is None:
        return f"p-{sha256_json(list(messages))[:16]}"
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise PromptError(f"{where}: id must be text or a whole number; it is {_kind(given)}")
    name = _text(str(given), "id", where)
    if len(name) > MAX_ID_LENGTH or not name.isprintable():
        raise PromptError(f"{where}: id must be at most {MAX_ID_LENGTH} printable characters; it is {name!r:.80}")
    return name


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else "an empty list" if value == [] else names.get(type(value), repr(value)[:80])


def _check_no_leak(name: str, train: Iterable[Prompt], heldout: Iterable[Prompt]) -> None:
    trained = {_normal(prompt.opening.text): prompt.id for prompt in train}
    asked = [(p.id, _normal(p.opening.text)) for p in heldout]
    leaks = [(held, trained[text]) for held, text in asked if text in trained]
    if leaks:
        pairs = ", ".join(f"{held} = {seen}" for held, seen in leaks[:3])
        raise PromptError(
            f"{name}: {len(leaks)} held-out prompts also stand among the training prompts (held-out = training: "
            f"{pairs}). A benchmark on them would prove nothing: remove one of each pair."
        )


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _apply_template(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        raise PromptError(f"prompt {prompt.id}: the target's chat template refuses it: {error}") from None
    if isinstance(ids, Mapping):  # a tokenizer's own code may not know `return_dict`
        ids = ids["input_ids"]
    if not ids:
        raise PromptError(f"prompt {prompt.id} becomes no tokens at all with the target's chat template")
    return tuple(int(i) for i in ids)
