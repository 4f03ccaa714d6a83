"""Given conversations: which tokens are the assistant's, which of them are learned from, and what cannot be told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3.conversations import GivenSettings, tokenize_given
from eagle3.prompts import Prompt, PromptError, TokenizedPrompt, load_prompts, split_prompts, tokenize
from tests.targets import CONTEXT

pytestmark = pytest.mark.unit

# SmolLM2's own template, but for its default system message: ChatML, as many models have it.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: the thinking part of a turn is dropped as soon as another turn follows.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Any:
    """The tests' own tokenizer: no special token ends a turn, and a blank ends the generation prompt."""
    return PreTrainedTokenizerFast.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def chatml(tiny_llama: Path) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_llama)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def with_template(tokenizer: Any, template: str) -> Any:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    other.chat_template = template
    return other


def said(*texts: str, **last: str) -> Prompt:
    """User and assistant in turns; `last` goes into the last message."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    messages[-1] |= last
    return Prompt("c1", tuple(messages))


TALK = said("Tom has 3 apples.", "Hello Tom!", "And buys 4 more?", "The sum is 7.")


def sample(conversation: Prompt, tokenizer: Any, limit: int = CONTEXT, **settings: Any) -> TokenizedPrompt:
    [given] = tokenize_given([conversation], tokenizer, GivenSettings(**settings), context_length=limit)
    return given


def learned(given: TokenizedPrompt, tokenizer: Any) -> list[str]:
    """The text under the loss, special tokens and all."""
    assert given.given is not None
    ids = [*given.input_ids, *given.given.output_ids]
    return [tokenizer.decode(ids[start:end]) for start, end in given.given.spans]


def test_the_answers_of_all_turns_are_learned_from_with_the_token_that_ends_them(chatml: Any) -> None:
    given = sample(TALK, chatml)
    assert learned(given, chatml) == ["Hello Tom!<|im_end|>", "The sum is 7.<|im_end|>"]
    assert given.given is not None
    assert given.given.texts == ("Hello Tom!", "The sum is 7.")
    assert (given.given.finish_reason, given.given.left_out) == ("given", 0)


def test_a_sample_is_what_the_template_writes_up_to_the_last_learned_token(chatml: Any) -> None:
    given = sample(TALK, chatml)
    assert given.given is not None
    ids = (*given.input_ids, *given.given.output_ids)
    whole = tuple(chatml.apply_chat_template(list(TALK.messages), return_dict=False))
    assert whole[: len(ids)] == ids
    assert chatml.decode(whole[len(ids) :]) == "\n"
    # What is asked before the first answer is the very prompt that a server would get.
    [asked] = tokenize([TALK.opening], chatml, context_length=CONTEXT, max_new_tokens=2)
    assert given.input_ids == asked.input_ids


def test_the_last_turn_alone_can_be_learned_from(chatml: Any) -> None:
    given = sample(TALK, chatml, turns="last")
    assert learned(given, chatml) == ["The sum is 7.<|im_end|>"]
    assert chatml.decode(given.input_ids).endswith("And buys 4 more?<|im_end|>\n<|im_start|>assistant\n")


def test_a_blank_at_the_end_of_the_generation_prompt_may_belong_to_the_answer(plain: Any) -> None:
    assert [text.strip() for text in learned(sample(TALK, plain), plain)] == ["Hello Tom!", "The sum is 7."]


def test_generation_markers_of_the_template_are_taken_where_there_are_some(chatml: Any) -> None:
    marked = with_template(chatml, MARKED)
    assert sample(TALK, marked) == sample(TALK, chatml)
    assert sample(TALK, marked, turns="last") == sample(TALK, chatml, turns="last")


def test_markers_that_mark_other_things_are_refused(chatml: Any) -> None:
    always = with_template(
        chatml, "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(PromptError, match=r"conversation c1 has 2 answers, but .* mark"):
        sample(TALK, always)


def test_system_and_tool_messages_are_read_and_not_learned_from(chatml: Any) -> None:
    messages = (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "x?"},
        {"role": "assistant", "content": "Let me look."},
        {"role": "tool", "content": "x is 4"},
        {"role": "assistant", "content": "4"},
    )
    assert learned(sample(Prompt("c1", messages), chatml), chatml) == ["Let me look.<|im_end|>", "4<|im_end|>"]


THINKING = said(
    "apples?", "<think>Tom has 3.\nAnd 4.</think>\n\nThe sum is 7.", "more?", "<think>over</think>No apples."
)


def test_thinking_parts_are_kept_masked_or_removed(chatml: Any) -> None:
    kept = sample(THINKING, chatml)
    assert learned(kept, chatml) == [f"{m['content']}<|im_end|>" for m in THINKING.messages[1::2]]
    masked = sample(THINKING, chatml, thinking="mask")
    assert [text.strip() for text in learned(masked, chatml)] == ["The sum is 7.<|im_end|>", "No apples.<|im_end|>"]
    assert masked.given
    assert kept.given
    assert (*masked.input_ids, *masked.given.output_ids) == (
        *kept.input_ids,
        *kept.given.output_ids,
    )  # read all the same
    removed = sample(THINKING, chatml, thinking="remove")
    assert learned(removed, chatml) == ["The sum is 7.<|im_end|>", "No apples.<|im_end|>"]
    assert removed.given is not None
    assert "think" not in chatml.decode([*removed.input_ids, *removed.given.output_ids])


@pytest.mark.parametrize(
    ("content", "rest"),
    [
        (
            "é😀<think>日本 3</think>語 apples",
            ["é😀", "語 apples<|im_end|>"],
        ),  # characters of several tokens beside the tags
        ("Tom has 3.</think> apples", ["apples<|im_end|>"]),  # the opening tag stands in the generation prompt
        ("Hello <think>a</think> Tom <think>b</think>!", ["Hello", "Tom", "!<|im_end|>"]),
    ],
)
def test_thinking_parts_are_found_wherever_they_stand(chatml: Any, content: str, rest: list[str]) -> None:
    found = learned(sample(said("Hi", content), chatml, thinking="mask"), chatml)
    assert [text.strip() for text in found] == rest


def test_an_answer_that_only_thinks_is_refused_where_that_is_not_learned_from(chatml: Any) -> None:
    only = said("Hi", "<think>never ends")
    assert learned(sample(only, chatml), chatml) == ["<think>never ends<|im_end|>"]
    with pytest.raises(PromptError, match="conversation c1: nothing is left to learn from"):
        sample(only, chatml, thinking="mask")
    with pytest.raises(PromptError, match="conversation c1, message 2: without its thinking part nothing is left"):
        sample(only, chatml, thinking="remove")


def test_a_thinking_part_of_its_own_key_goes_through_the_template(chatml: Any) -> None:
    forgetful = with_template(chatml, FORGETFUL)
    thought = said("apples?", "The sum is 7.", reasoning_content="Tom has 3.")
    assert learned(sample(thought, forgetful), forgetful) == [
        "<think>\nTom has 3.\n</think>\n\nThe sum is 7.<|im_end|>"
    ]
    masked = learned(sample(thought, forgetful, thinking="mask"), forgetful)
    assert [text.strip() for text in masked] == ["The sum is 7.<|im_end|>"]
    assert learned(sample(thought, forgetful, thinking="remove"), forgetful) == ["The sum is 7.<|im_end|>"]
    with pytest.raises(PromptError, match="message 2: the chat template leaves its reasoning_content out"):
        sample(thought, chatml)


def test_a_turn_that_is_written_otherwise_when_others_follow_is_named(chatml: Any) -> None:
    forgetful = with_template(chatml, FORGETFUL)
    first = said("apples?", "The sum is 7.", reasoning_content="Tom has 3.")
    both = replace(first, messages=(*first.messages, *said("more?", "No.").messages))
    with pytest.raises(
        PromptError, match=r"conversation c1, message 2 \(the assistant's\): .* everything up to its end"
    ):
        sample(both, forgetful)
    assert learned(sample(both, forgetful, turns="last"), forgetful) == ["No.<|im_end|>"]
    assert learned(sample(both, forgetful, thinking="remove"), forgetful) == [
        "The sum is 7.<|im_end|>",
        "No.<|im_end|>",
    ]


def test_longer_conversations_are_refused_or_cut_after_a_turn_as_asked(chatml: Any) -> None:
    whole = sample(TALK, chatml)
    assert whole.given is not None
    tokens = len(whole.input_ids) + len(whole.given.output_ids)
    assert sample(TALK, chatml, max_tokens=tokens) == whole
    with pytest.raises(
        PromptError, match=f"conversation c1 has {tokens} tokens .* the cap is {tokens - 1} .*too_long to cut"
    ):
        sample(TALK, chatml, max_tokens=tokens - 1)
    cut = sample(TALK, chatml, max_tokens=tokens - 1, too_long="cut")
    assert learned(cut, chatml) == ["Hello Tom!<|im_end|>"]
    assert cut.given is not None
    assert (cut.given.finish_reason, cut.given.left_out) == ("length", 2)
    with pytest.raises(PromptError, match="Its first answer alone does not fit"):
        sample(TALK, chatml, max_tokens=10, too_long="cut")
    with pytest.raises(PromptError, match=f"the cap is {tokens - 1} "):  # the target's context is one as well
        sample(TALK, chatml, limit=tokens - 1)


def test_a_template_that_refuses_a_conversation_is_named_with_it(chatml: Any) -> None:
    strict = with_template(chatml, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        PromptError, match="conversation c1: the target's chat template refuses it: roles must alternate"
    ):
        sample(TALK, strict)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_conversations_are_read_from_messages_and_from_turns_with_their_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.jsonl",
        {"id": "chat", "messages": [*TALK.messages]},
        {"question_id": 81, "category": "math", "turns": ["1 + 1?", "And 3?"], "reference": ["2", "5"]},
        {"id": "r", "messages": said("a", "b", reasoning_content="because").messages},
    )
    chat, bench, thought = load_prompts(file, given=True).prompts
    assert (chat.messages, chat.is_given) == (TALK.messages, True)
    assert [m["content"] for m in bench.messages] == ["1 + 1?", "2", "And 3?", "5"]
    assert (bench.id, bench.category) == ("81", "math")
    assert thought.messages[1]["reasoning_content"] == "because"
    assert chat.opening.messages == TALK.messages[:1]
    assert chat.opening.opening == chat.opening


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": [*TALK.messages[:3]]}, "ends with the assistant's answer; .* the last the user's"),
        ({"messages": [*TALK.messages[1:]]}, "the first message is the assistant's"),
        ({"prompt": "x"}, "`messages` that end with the assistant's"),
        ({"turns": ["x", "y"], "reference": ["1"]}, "2 turns and 1 answers"),
        ({"turns": ["x"]}, "reference must be a list"),
        ({"messages": said("x", "y", tool_calls="z").messages}, "message 2 has tool_calls"),
        ({"messages": said("x", "y", "z", reasoning_content="z").messages}, "message 3 has reasoning_content"),
        ({"messages": said("x", "y", reasoning_content=" ").messages}, "reasoning_content of message 2 is empty"),
    ],
)
def test_what_is_no_given_conversation_is_refused_with_its_line(tmp_path: Path, line: object, words: str) -> None:
    file = write(tmp_path / "c.jsonl", {"messages": [*TALK.messages]}, line)
    with pytest.raises(PromptError, match=f"line 2: .*{words}"):
        load_prompts(file, given=True)


def test_a_held_out_conversation_that_opens_like_a_training_one_is_a_leak(tmp_path: Path) -> None:
    other = replace(TALK, messages=(TALK.messages[0], {"role": "assistant", "content": "Something else."}))
    file = write(
        tmp_path / "c.jsonl",
        {"id": "a", "split": "train", "messages": [*TALK.messages]},
        {"id": "b", "split": "heldout", "messages": [*other.messages]},
    )
    with pytest.raises(PromptError, match="b = a"):
        split_prompts(load_prompts(file, given=True), num_train=1, num_heldout=1, seed=0)
