"""Prompt files: three forms, every mistake named with its line; a split that cannot leak; tokens that fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.digests import sha256_file
from eagle3.errors import Eagle3Error
from eagle3.prompts import Prompt, PromptError, PromptSet, load_prompts, ngram_overlap, split_prompts, tokenize
from eagle3.target import Target

pytestmark = pytest.mark.unit


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def make_set(*prompts: dict[str, Any]) -> PromptSet:
    return PromptSet(
        tuple(
            Prompt(
                id=p.get("id", f"q{n}"),
                messages=({"role": "user", "content": p.get("text", f"question {n}")},),
                split=p.get("split"),
            )
            for n, p in enumerate(prompts)
        ),
        sha256="0" * 64,
        name="set.jsonl",
    )


def ids(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_the_three_forms_are_read(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Who are you?", "name": None},
    ]
    file = write(
        tmp_path / "prompts.jsonl",
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Compose a blog post.", "Now with the letter A.", "Again."],
        },
        {"id": "chat", "messages": conversation, "split": "heldout"},
        {"prompt": "What is 3 + 4?", "answer": "7", "split": "train"},
    )
    loaded = load_prompts(file)
    turns, chat, plain = loaded.prompts
    assert (turns.id, turns.category, turns.split, turns.ignored_turns) == ("81", "writing", None, 2)
    assert turns.messages == ({"role": "user", "content": "Compose a blog post."},)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user"]
    assert chat.messages[-1] == {"role": "user", "content": "Who are you?"}
    assert (chat.split, plain.split) == ("heldout", "train")
    assert plain.text == "What is 3 + 4?"
    assert loaded.ignored_turns == 2
    assert (loaded.sha256, loaded.name) == (sha256_file(file), "prompts.jsonl")


def test_made_ids_follow_the_text_not_the_line(tmp_path: Path) -> None:
    one = load_prompts(write(tmp_path / "a", {"prompt": "first"}, {"prompt": "second"}))
    two = load_prompts(write(tmp_path / "b", {"prompt": "second"}, {"prompt": "zeroth"}, {"prompt": "first"}))
    assert one.prompts[0].id == two.prompts[2].id
    assert one.prompts[1].id == two.prompts[0].id
    assert one.prompts[0].id.startswith("p-")


def test_a_byte_order_mark_windows_line_ends_and_a_missing_last_newline_are_harmless(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n{"prompt": "two"}')
    assert [p.text for p in load_prompts(file).prompts] == ["café", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2 is empty: expected one object"),
        ("   \t", "line 2 is empty"),
        ('{"prompt": "a"', r"line 2 is not valid JSON: .* at column \d+"),
        ('{"prompt": "a"} {"prompt": "b"}', r"line 2 is not valid JSON: Extra data at column 17"),
        ("[" * 100_000, "line 2 is not usable JSON"),
        ('["a"]', "line 2 holds a list; expected one object"),
        ('"a"', "line 2 holds text"),
        ("null", "line 2 holds nothing"),
        ("{}", "line 2: exactly one of `prompt`, `turns` and `messages` is the prompt; its keys are none"),
        ('{"question": "a", "text": "b"}', "its keys are 'question', 'text'"),
        ('{"prompt": "a", "turns": ["b"]}', "it has turns and prompt"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"prompt": " \\n "}', "line 2: prompt is empty"),
        ('{"prompt": 7}', "line 2: prompt must be text; it is a number"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"turns": []}', "turns must be a list with at least one entry; it is an empty list"),
        ('{"turns": "a"}', "turns must be a list with at least one entry; it is text"),
        ('{"turns": ["a", ""]}', "turn 2 is empty"),
        ('{"turns": [{"content": "a"}]}', "turn 1 must be text; it is an object"),
        ('{"messages": [{"content": "a"}]}', "message 1 needs a `role`"),
        (
            '{"messages": [{"role": "bot", "content": "a"}]}',
            r"message 1 needs a `role` \(system, user, assistant, tool\)",
        ),
        ('{"messages": ["a"]}', "message 1 needs a `role`"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 1 must be text; it is nothing"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message 1 must be text; it is a list"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}', "message 1 has tool_calls"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "`tools` would change the prompt"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "the last message is the assistant's; the target writes the answer itself",
        ),
        ('{"prompt": "a", "id": 1.5}', "id must be text or a whole number"),
        ('{"prompt": "a", "id": true}', "id must be text or a whole number"),
        ('{"prompt": "a", "id": ""}', "id is empty"),
        ('{"prompt": "a", "id": "a\\nb"}', "printable characters"),
        (json.dumps({"prompt": "a", "id": "x" * 201}), "at most 200 printable characters"),
        ('{"prompt": "a", "category": 3}', "category must be text"),
        ('{"prompt": "a", "split": "test"}', 'split must be "train" or "heldout"; it is \'test\''),
        ('{"prompt": "a", "id": "one"}', "line 2: the id 'one' stands in line 1 already"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "prompts.jsonl", {"prompt": "fine", "id": "one"}, line, {"prompt": "fine too"})
    with pytest.raises(PromptError, match=message) as caught:
        load_prompts(file)
    assert str(file) in str(caught.value)


def test_an_empty_line_at_the_end_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="line 2 is empty"):
        load_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, ""))


def test_the_same_prompt_twice_without_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="line 3: the same prompt stands in line 1 already"):
        load_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}))


def test_a_file_that_is_no_prompts_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"there is no prompts file .*missing\.jsonl"):
        load_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(PromptError, match=r"cannot read the prompts file .*directory"):
        load_prompts(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(PromptError, match="is empty"):
        load_prompts(tmp_path / "empty")
    (tmp_path / "latin1").write_bytes('{"prompt": "fine"}\n{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"line 2 is not UTF-8 \(byte 16\)"):
        load_prompts(tmp_path / "latin1")
    (tmp_path / "array").write_text(json.dumps([{"prompt": "x" * 1000}] * 2000))
    with pytest.raises(PromptError, match=r"line 1 is longer than 1048576 bytes.*one JSON array"):
        load_prompts(tmp_path / "array")


def test_a_split_honours_marks_and_deals_the_rest_by_hash() -> None:
    marked = [{"id": "t", "split": "train"}, {"id": "h", "split": "heldout"}]
    prompts = make_set(*marked, *({"id": f"f{n}"} for n in range(20)))
    train, heldout = split_prompts(prompts, num_train=10, num_heldout=5, seed=0)
    assert (len(train), len(heldout)) == (10, 5)
    assert "t" in ids(train)
    assert "h" in ids(heldout)
    assert not set(ids(train)) & set(ids(heldout))
    order = ids(prompts.prompts)
    assert ids(train) == sorted(ids(train), key=order.index)

    assert split_prompts(prompts, num_train=10, num_heldout=5, seed=0) == (train, heldout)
    assert split_prompts(prompts, num_train=10, num_heldout=5, seed=1) != (train, heldout)
    reordered = PromptSet(tuple(reversed(prompts.prompts)), prompts.sha256, prompts.name)
    again = split_prompts(reordered, num_train=10, num_heldout=5, seed=0)
    assert [set(ids(part)) for part in again] == [set(ids(train)), set(ids(heldout))]


def test_more_training_prompts_never_move_a_held_out_one() -> None:
    prompts = make_set(*({} for _ in range(30)))
    small, large, rest = (split_prompts(prompts, num_train=n, num_heldout=6, seed=3) for n in (4, 20, None))
    assert small[1] == large[1] == rest[1]
    assert set(ids(small[0])) < set(ids(large[0])) < set(ids(rest[0]))
    assert len(rest[0]) == 24


@pytest.mark.parametrize(("num_train", "num_heldout"), [(5, 2), (3, 4), (None, 6)])
def test_too_few_prompts_are_counted(num_train: int | None, num_heldout: int) -> None:
    prompts = make_set({"split": "train"}, {"split": "heldout"}, {}, {}, {"split": "train"}, {"split": "train"})
    with pytest.raises(PromptError, match=r"it has 6 \(3 marked train, 1 marked heldout, 2 free\)"):
        split_prompts(prompts, num_train=(num_train or 0) + 1 if num_train else None, num_heldout=num_heldout, seed=0)


def test_a_held_out_text_that_is_trained_on_is_refused() -> None:
    prompts = make_set(
        {"id": "a", "text": "How many apples?", "split": "train"},
        {"id": "b", "text": " how MANY  apples?", "split": "heldout"},
    )
    with pytest.raises(PromptError, match=r"1 held-out prompts also stand among the training prompts .*b = a"):
        split_prompts(prompts, num_train=1, num_heldout=1, seed=0)


def test_tokens_come_with_the_chat_template(tiny_llama: Path) -> None:
    tokenizer = Target.open(tiny_llama).tokenizer()
    prompt = Prompt("q1", ({"role": "user", "content": "Hello world!"},), category="greeting")
    (tokenized,) = tokenize([prompt], tokenizer, context_length=2048, max_new_tokens=96)
    assert (tokenized.id, tokenized.category) == ("q1", "greeting")
    assert tokenizer.decode(tokenized.input_ids) == "user: Hello world!\nassistant: "
    assert all(type(i) is int for i in tokenized.input_ids)


def test_a_prompt_that_leaves_no_room_for_the_answer_is_named(tiny_llama: Path) -> None:
    tokenizer = Target.open(tiny_llama).tokenizer()
    prompt = Prompt("long-one", ({"role": "user", "content": "word " * 50},))
    (fits,) = tokenize([prompt], tokenizer, context_length=2048, max_new_tokens=8)
    length = len(fits.input_ids)
    assert tokenize([prompt], tokenizer, context_length=length + 8, max_new_tokens=8) == [fits]
    with pytest.raises(
        PromptError, match=rf"prompt long-one has {length} tokens .* leaves {length - 1} beside .* of 8"
    ):
        tokenize([prompt], tokenizer, context_length=length + 7, max_new_tokens=8)


def test_a_template_that_refuses_or_is_missing_is_named(tiny_llama: Path) -> None:
    tokenizer = Target.open(tiny_llama).tokenizer()
    prompt = Prompt("q1", ({"role": "user", "content": "Hi"},))
    tokenizer.chat_template = "{{ raise_exception('no user here') }}"
    with pytest.raises(PromptError, match="prompt q1: the target's chat template refuses it: no user here"):
        tokenize([prompt], tokenizer, context_length=100, max_new_tokens=8)
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(PromptError, match="prompt q1 becomes no tokens"):
        tokenize([prompt], tokenizer, context_length=100, max_new_tokens=8)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"no chat template.*chat_template\.jinja"):
        tokenize([prompt], tokenizer, context_length=100, max_new_tokens=8)


def test_overlap_is_the_share_of_held_out_ngrams_seen_in_training() -> None:
    train = ["Tom has three apples.", "Ann buys two pens"]
    assert ngram_overlap(train, ["tom HAS three pens"], 2) == pytest.approx(2 / 3)
    assert ngram_overlap(train, ["tom has three apples"], 3) == 1.0
    assert ngram_overlap(train, ["apples Ann buys"], 3) == 0.0, "an n-gram never crosses from one text to the next"
    assert ngram_overlap(train, ["two pens", "no pens"], 2) == 0.5
    with pytest.raises(PromptError, match="no held-out text has 5 words"):
        ngram_overlap(train, ["too short"], 5)
    with pytest.raises(PromptError, match="n >= 1"):
        ngram_overlap(train, ["a"], 0)
