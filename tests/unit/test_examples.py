"""The example prompts: their form, that they differ from one another, and that their README states what is measured."""

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from eagle3.prompts import load_prompts, ngram_overlap

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_SHARED_RUN = 7
MAX_JACCARD = 0.5

Row = dict[str, str]


def words(text: str) -> list[str]:
    """The words of a text, lower-cased and without punctuation."""
    return re.findall(r"\w+", text.lower())


def ngrams(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    lines = (EXAMPLES / "word_problems.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def readme() -> str:
    return (EXAMPLES / "README.md").read_text(encoding="utf-8")


def part(rows: list[Row], split: str) -> list[str]:
    return [row["prompt"] for row in rows if row["split"] == split]


def test_lines_have_the_stated_form_and_ids_count_up(rows: list[Row]) -> None:
    assert all(set(row) == {"id", "split", "category", "prompt"} for row in rows)
    assert all(isinstance(value, str) and value for row in rows for value in row.values())
    assert [row["id"] for row in rows] == [f"wp-{i:03d}" for i in range(1, 157)]


def test_pipeline_reads_every_line_with_its_split_and_category(rows: list[Row]) -> None:
    read = load_prompts(EXAMPLES / "word_problems.jsonl").prompts
    assert [(p.id, p.split, p.category, p.text) for p in read] == [
        (row["id"], row["split"], row["category"], row["prompt"]) for row in rows
    ]


def test_training_part_of_126_comes_first_and_30_are_held_out(rows: list[Row]) -> None:
    assert [row["split"] for row in rows] == ["train"] * 126 + ["heldout"] * 30


def test_every_category_occurs_in_both_parts_as_often_as_the_readme_says(rows: list[Row], readme: str) -> None:
    counts = Counter((row["category"], row["split"]) for row in rows)
    categories = sorted({row["category"] for row in rows})
    stated = [(name, int(a), int(b)) for name, a, b in re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", readme, re.M)]

    assert 8 <= len(categories) <= 12
    assert all(counts[name, "train"] and counts[name, "heldout"] for name in categories)
    assert stated == [(name, counts[name, "train"], counts[name, "heldout"]) for name in categories]


def test_prompts_are_a_few_sentences_that_end_with_their_only_question(rows: list[Row], readme: str) -> None:
    lengths = [len(row["prompt"].split()) for row in rows]

    assert 20 <= min(lengths) <= max(lengths) <= 110
    assert f"{min(lengths)} to {max(lengths)} words" in readme
    assert all(row["prompt"].endswith("?") and row["prompt"].count("?") == 1 for row in rows)


def test_no_two_prompts_share_a_long_run_of_words_or_most_of_their_words(rows: list[Row]) -> None:
    tokens = {row["id"]: words(row["prompt"]) for row in rows}
    runs = {key: set(ngrams(value, MAX_SHARED_RUN + 1)) for key, value in tokens.items()}
    vocabularies = {key: set(value) for key, value in tokens.items()}

    alike = [
        (a, b)
        for a, b in combinations(tokens, 2)
        if runs[a] & runs[b]
        or len(vocabularies[a] & vocabularies[b]) > MAX_JACCARD * len(vocabularies[a] | vocabularies[b])
    ]
    assert alike == []


@pytest.mark.parametrize("n", [3, 5, 8])
def test_readme_states_the_measured_overlap(rows: list[Row], readme: str, n: int) -> None:
    measured = ngram_overlap(part(rows, "train"), part(rows, "heldout"), n)
    assert f"| {n}-grams | {measured:.2%} |" in readme


def test_readme_states_the_longest_run_that_both_parts_share(rows: list[Row], readme: str) -> None:
    n = 1
    while ngram_overlap(part(rows, "train"), part(rows, "heldout"), n + 1) > 0:
        n += 1
    assert f"longest run of words that a held-out and a training problem have in common is {n} words" in readme
