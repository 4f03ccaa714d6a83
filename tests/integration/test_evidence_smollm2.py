"""Clean text of unlike kinds under a real target: right rows never fail, shifted ones are named where text tells."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.dump.slots import SlotSample
from eagle3.evidence.compare import compare_captures
from eagle3.evidence.head import FinalStateParts
from eagle3.evidence.text import Judgement, TextRows
from eagle3.evidence.text_alignment import judge_alignment
from eagle3.target import Target
from infra.settings import Settings
from infra.smollm2 import ensure_smollm2
from tests.texts import DOMAINS, texts

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NORM = CapturePoint("norm")
PROBLEMS = Path(__file__).resolve().parents[2] / "examples" / "word_problems.jsonl"
ROWS = 96


class Real:
    """The target, loaded once."""

    def __init__(self) -> None:
        self.target = Target.open(ensure_smollm2(Settings().root))
        self.model: Any = self.target.load_model("bfloat16")
        self.tokenizer = self.target.tokenizer()
        self.parts = FinalStateParts.of(self.target)

    def given(self, domain: str, count: int = 4) -> list[SlotSample]:
        if domain == "random ids":
            generator = torch.Generator().manual_seed(4)
            ids = [torch.randint(0, self.target.vocab_size, (ROWS,), generator=generator) for _ in range(count)]
        else:
            ids = [torch.tensor(self.tokenizer(text)["input_ids"][:ROWS]) for text in texts(domain)[-count:]]
        points = [CapturePoint("layers.2"), CapturePoint("layers.15"), NORM]
        return [
            SlotSample(f"{domain} {i}", tokens, {p: states[p] for p in points})
            for i, tokens in enumerate(ids)
            for states in [self.target.hidden_states(self.model, tokens)]
        ]

    def answers(self, temperature: float) -> list[tuple[torch.Tensor, int]]:
        torch.manual_seed(9)
        lines = PROBLEMS.read_text(encoding="utf-8").splitlines()[40:46]
        found = []
        for line in lines:
            asked = next(str(value) for key, value in json.loads(line).items() if key in ("prompt", "turns"))
            chat = [{"role": "user", "content": asked}]
            ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            full = self.model.generate(
                torch.tensor([ids]), max_new_tokens=40, do_sample=True, temperature=temperature, top_k=0, top_p=1.0
            )[0]
            found.append((full, len(ids)))
        return found


@pytest.fixture(scope="module")
def real() -> Real:
    return Real()


@pytest.mark.parametrize("domain", DOMAINS)
def test_given_text_of_every_kind_never_fails_where_its_rows_are_right(real: Real, domain: str) -> None:
    samples = real.given(domain)
    right = judge_alignment(samples, NORM, real.parts, normed=True)
    late = [SlotSample(s.id, s.input_ids, {NORM: s.states[NORM].roll(1, 0)}) for s in samples]
    wrong = judge_alignment(late, NORM, real.parts, normed=True)
    if domain == "random ids":
        assert (right.verdict, wrong.verdict) == ("warn", "warn")
        assert right.sentence.startswith("Cannot be decided")
    else:
        assert right.verdict in ("pass", "warn"), f"{right.value}: {right.sentence}"
        assert "at offset 0" in right.sentence
        assert wrong.verdict == "fail"
        assert "late by 1" in wrong.sentence


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_answers_cost_what_their_rows_expect(real: Real, temperature: float) -> None:
    answers = real.answers(temperature)
    states = [real.target.hidden_states(real.model, full[:-1])[NORM] for full, _ in answers]

    def judge(change: Callable[[int], torch.Tensor]) -> Judgement:
        rows = TextRows(real.parts, real.target.vocab_size, normed=True, drawn_at=temperature)
        for i, (full, prompt) in enumerate(answers):
            rows.add(f"a{i}", change(i), full, torch.arange(prompt - 1, len(full) - 1), first=prompt)
        return rows.judge()

    right = judge(lambda i: states[i])
    assert right.outcome == "aligned"
    assert right.foreign.count == 0
    assert abs(right.nll[2] - right.entropy) < 0.3
    assert judge(lambda i: states[i].roll(1, 0)).offset == -1
    assert judge(lambda i: states[i].roll(-2, 0)).offset == 2
    longest = max(states, key=len)
    other = judge(lambda i: longest[: len(states[i])] if i == 0 and len(longest) > len(states[0]) else states[i])
    assert "'a0'" in str(other.foreign)


def test_statistics_of_any_two_domains_do_not_fail(real: Real) -> None:
    captures = {domain: real.given(domain, 2) for domain in DOMAINS}
    for one, first in captures.items():
        for other, second in captures.items():
            found = compare_captures(first, second, dtypes=("bfloat16", "bfloat16"), names=(one, other))
            assert found.verdict != "fail", found.sentences()
