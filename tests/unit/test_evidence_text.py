"""Tokens against rows where the answer is not greedy: sampled answers, prompts, and dumps that are not ours."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conversations import GivenSettings
from eagle3.dump.manifest import Generation
from eagle3.dump.reader import DumpReader
from eagle3.dump.slots import SlotSample
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.head import score
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.text_alignment import judge_alignment
from eagle3.evidence.validate import validate_dump
from tests import targets
from tests.dumps import Capture, capture, states_of, with_states, write_dump

pytestmark = pytest.mark.unit

VOCAB = targets.VOCAB


def examine(captured: Capture, folder: Path, temperature: float = 0.0, **options: Any) -> EvidenceReport:
    generation = Generation(source="while_answering", temperature=temperature, max_new_tokens=captured.max_new_tokens)
    write_dump(captured, folder, **{"generation": generation} | options)
    return validate_dump(DumpReader.open(folder), captured.parts)


def check_of(report: EvidenceReport, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def sampled(target: Path, temperature: float, **options: Any) -> Capture:
    return capture(target, temperature=temperature, num_samples=8, max_new_tokens=40, seed=3, **options)


def rolled(by: int) -> Callable[[CapturedSample], CapturedSample]:
    return lambda s: with_states(s, {"norm": s.states["norm"].roll(by, 0)})


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("make", "dtype"), [(targets.make_llama, torch.float32), (targets.make_deepseek, torch.bfloat16)]
)
def test_right_rows_of_sampled_answers_pass(tmp_path: Path, make: Any, dtype: torch.dtype, temperature: float) -> None:
    captured = sampled(make(tmp_path / "target", dtype=dtype), temperature, dtype=dtype)
    report = examine(captured, tmp_path / "dump", temperature, dtype=torch.bfloat16)
    check = check_of(report, "final_state")
    assert check.verdict == "pass", f"{check.value}: {check.sentence}"
    assert check_of(report, "prompt_rows").verdict == "pass"
    costs = {o.offset: o.nll for o in report.offsets}
    assert min(costs, key=lambda offset: costs[offset] or 0.0) == 0


@pytest.mark.parametrize(("by", "words"), [(1, "late by 1"), (2, "late by 2"), (-1, "early by 1"), (-2, "early by 2")])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_shifted_rows_of_sampled_answers_are_named(
    tiny_llama: Path, tmp_path: Path, temperature: float, by: int, words: str
) -> None:
    check = check_of(examine(sampled(tiny_llama, temperature), tmp_path, temperature, alter=rolled(by)), "final_state")
    assert check.verdict == "fail"
    assert words in check.sentence


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_sample_with_the_rows_of_another_sampled_answer_is_named(
    tiny_llama: Path, tmp_path: Path, temperature: float
) -> None:
    captured = sampled(tiny_llama, temperature)
    other = captured.samples[3].states["norm"]

    def exchange(sample: CapturedSample) -> CapturedSample:
        return with_states(sample, {"norm": other[: len(sample.input_ids)]}) if sample.id == "p00002" else sample

    check = check_of(examine(captured, tmp_path, temperature, alter=exchange), "final_state")
    assert check.verdict == "fail"
    assert "sample 'p00002'" in check.sentence
    assert "rows of another request" in check.sentence
    assert "p00003" not in check.sentence


def not_normed(sample: CapturedSample, _parts: FinalStateParts) -> torch.Tensor:
    return sample.states[CapturePoint("layers.7")]


def another_layer(sample: CapturedSample, parts: FinalStateParts) -> torch.Tensor:
    return normed(sample.states[CapturePoint("layers.3")], parts)


def normed(state: torch.Tensor, parts: FinalStateParts) -> torch.Tensor:
    x = state.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + parts.rms_norm_eps) * parts.final_norm).to(state.dtype)


@pytest.mark.parametrize("wrong", [not_normed, another_layer])
def test_sampled_answers_refute_a_final_state_of_another_kind(tiny_llama: Path, tmp_path: Path, wrong: Any) -> None:
    captured = sampled(tiny_llama, 0.7)
    alter = lambda s: with_states(s, {"norm": wrong(s, captured.parts)})  # noqa: E731
    check = check_of(examine(captured, tmp_path, 0.7, alter=alter), "final_state")
    assert check.verdict == "fail"
    assert "not from what these rows predict" in check.sentence


def test_a_temperature_so_high_that_nothing_is_predicted_is_not_decided(tiny_llama: Path, tmp_path: Path) -> None:
    check = check_of(examine(sampled(tiny_llama, 50.0), tmp_path, 50.0), "final_state")
    assert check.verdict == "warn"
    assert "cannot be decided" in check.sentence


@pytest.fixture(scope="module")
def fluent(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A target whose text is predictable, on prompts of that text: token x is mostly followed by 7x + 3."""
    folder = targets.make_llama(tmp_path_factory.mktemp("targets") / "fluent")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
        follower = (7 * torch.arange(VOCAB) + 3) % VOCAB
        model.lm_head.weight[follower] = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
    model.save_pretrained(folder)
    greedy = capture(folder, num_samples=10)
    generator = torch.Generator().manual_seed(5)
    samples = tuple(
        replace(sample, **_with_prompt(model, _chain(20 + index, generator), sample))
        for index, sample in enumerate(greedy.samples)
    )
    return replace(greedy, samples=samples)


def _chain(length: int, generator: torch.Generator) -> torch.Tensor:
    ids = [int(torch.randint(3, VOCAB, (1,), generator=generator))]
    while len(ids) < length:
        jump = torch.rand(1, generator=generator) < 0.1
        ids.append(int(torch.randint(3, VOCAB, (1,), generator=generator)) if jump else (7 * ids[-1] + 3) % VOCAB)
    return torch.tensor(ids)


def _with_prompt(model: Any, prompt: torch.Tensor, sample: CapturedSample) -> dict[str, Any]:
    full = model.generate(prompt[None], max_new_tokens=24, do_sample=False)[0]
    return {
        "input_ids": full[:-1].clone(),
        "last_token_id": int(full[-1]),
        "prompt_tokens": len(prompt),
        "output_tokens": len(full) - len(prompt),
        "states": states_of(model, full[:-1]),
    }


def test_prompts_that_the_target_predicts_prove_their_rows(fluent: Capture, tmp_path: Path) -> None:
    check = check_of(examine(fluent, tmp_path), "prompt_rows")
    assert check.verdict == "pass"
    assert "fit their rows at offset 0 and at no other" in check.sentence


def test_rows_that_are_shifted_in_the_prompt_alone_are_found_there(fluent: Capture, tmp_path: Path) -> None:
    def late(sample: CapturedSample) -> CapturedSample:
        state = sample.states[CapturePoint("norm")].clone()
        end = sample.prompt_tokens - 1
        state[:end] = state[:end].roll(1, 0)
        return with_states(sample, {"norm": state})

    report = examine(fluent, tmp_path, alter=late)
    assert check_of(report, "final_state").verdict == "pass"
    assert "late by 1" in check_of(report, "prompt_rows").sentence
    assert check_of(report, "prompt_rows").verdict == "fail"


def test_prompt_rows_that_two_requests_exchanged_are_named_with_their_owner(fluent: Capture, tmp_path: Path) -> None:
    pair = {"p00002": fluent.samples[6], "p00006": fluent.samples[2]}

    def exchange(sample: CapturedSample) -> CapturedSample:
        if sample.id not in pair:
            return sample
        state, other = sample.states[CapturePoint("norm")].clone(), pair[sample.id]
        end = min(sample.prompt_tokens, other.prompt_tokens) - 1
        state[:end] = other.states[CapturePoint("norm")][:end]
        return with_states(sample, {"norm": state})

    check = check_of(examine(fluent, tmp_path, alter=exchange), "prompt_rows")
    assert check.verdict == "fail"
    assert "sample 'p00002' (its rows fit the tokens of 'p00006')" in check.sentence
    assert "sample 'p00006' (its rows fit the tokens of 'p00002')" in check.sentence


@pytest.mark.parametrize("by", [0, 1, -1])
def test_random_prompts_decide_nothing_and_fail_nothing(tiny_llama: Path, tmp_path: Path, by: int) -> None:
    """Random ids have no structure: whether their rows are shifted cannot be known from them."""
    check = check_of(examine(capture(tiny_llama, num_samples=12), tmp_path, alter=rolled(by)), "prompt_rows")
    assert check.verdict == "pass"
    assert "Cannot be decided" in check.sentence
    assert "final_state" in check.sentence


def test_a_random_prompt_among_predictable_ones_is_said_and_not_failed(fluent: Capture, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(fluent.target)
    noise = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(8))
    odd = replace(fluent.samples[4], **_with_prompt(model, noise, fluent.samples[4]))
    samples = tuple(odd if sample.id == odd.id else sample for sample in fluent.samples)
    check = check_of(examine(replace(fluent, samples=samples), tmp_path), "prompt_rows")
    assert check.verdict == "pass"
    assert "except sample 'p00004': not predictable" in check.sentence


GIVEN = Generation(source="given", max_new_tokens=None, given=GivenSettings())


def conversations(captured: Capture, text: Callable[[int], torch.Tensor]) -> Capture:
    """Text that nobody generated, read by the target; two answers in each."""
    model = AutoModelForCausalLM.from_pretrained(captured.target)
    samples = []
    for index in range(8):
        ids = text(40 + 3 * index)
        end = len(ids)
        samples.append(
            CapturedSample(
                id=f"c{index:05d}",
                input_ids=ids[:-1].clone(),
                last_token_id=int(ids[-1]),
                prompt_tokens=6,
                output_tokens=end - 6,
                finish_reason="given",
                states=states_of(model, ids[:-1]),
                spans=((6, 18), (25, end)),
            )
        )
    return replace(captured, samples=tuple(samples))


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def given(fluent: Capture) -> Capture:
    generator = torch.Generator().manual_seed(9)
    return conversations(fluent, lambda length: _chain(length, generator))


def test_given_answers_need_not_be_what_the_target_would_have_said(given: Capture, tmp_path: Path) -> None:
    report = examine(given, tmp_path / "given", generation=GIVEN)
    check = check_of(report, "final_state")
    assert check.verdict == "pass", f"{check.value}: {check.sentence}"
    assert check.sentence == "The given answers fit their rows at offset 0 and at no other."
    assert {o.offset for o in report.offsets} == {-2, -1, 0, 1, 2}
    # The same rows as greedy answers: a tenth of the tokens is not what they give.
    assert check_of(examine(given, tmp_path / "greedy"), "final_state").verdict == "fail"


@pytest.mark.parametrize(("by", "words"), [(1, "late by 1"), (-2, "early by 2")])
def test_shifted_rows_of_given_answers_are_named(given: Capture, tmp_path: Path, by: int, words: str) -> None:
    check = check_of(examine(given, tmp_path, generation=GIVEN, alter=rolled(by)), "final_state")
    assert check.verdict == "fail"
    assert words in check.sentence


def test_given_answers_with_the_rows_of_another_conversation_are_named(given: Capture, tmp_path: Path) -> None:
    pair = {"c00002": given.samples[3], "c00003": given.samples[2]}

    def exchange(sample: CapturedSample) -> CapturedSample:
        if sample.id not in pair:
            return sample
        state, other = sample.states[CapturePoint("norm")].clone(), pair[sample.id].states[CapturePoint("norm")]
        rows = min(len(state), len(other))
        state[:rows] = other[:rows]
        return with_states(sample, {"norm": state})

    check = check_of(examine(given, tmp_path, generation=GIVEN, alter=exchange), "final_state")
    assert check.verdict == "fail"
    assert "sample 'c00002' (its rows fit the tokens of 'c00003')" in check.sentence


def test_given_answers_that_the_target_does_not_predict_decide_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    check = check_of(examine(conversations(capture(tiny_llama), random_ids), tmp_path, generation=GIVEN), "final_state")
    assert check.verdict == "warn"
    assert "Attribution and the probe decide" in check.sentence


def slots(captured: Capture, label: str = "final", by: int = 0) -> list[SlotSample]:
    return [
        SlotSample(s.id, s.input_ids, {label: s.states[CapturePoint("norm")].roll(by, 0)}) for s in captured.samples
    ]


def test_the_alignment_of_a_dump_without_a_manifest_is_judged(fluent: Capture) -> None:
    right = judge_alignment(slots(fluent), "final", fluent.parts, normed=True)
    assert (right.name, right.verdict) == ("alignment", "pass")
    before_norm = [SlotSample(s.id, s.input_ids, {"final": s.states[CapturePoint("layers.7")]}) for s in fluent.samples]
    assert judge_alignment(before_norm, "final", fluent.parts, normed=False).verdict == "pass"
    for by, words in ((1, "late by 1"), (-2, "early by 2")):
        late = judge_alignment(slots(fluent, by=by), "final", fluent.parts, normed=True)
        assert late.verdict == "fail"
        assert words in late.sentence


def test_the_alignment_of_random_ids_cannot_be_decided(tiny_llama: Path) -> None:
    captured = capture(tiny_llama)
    noise = [
        SlotSample(s.id, s.input_ids[: s.prompt_tokens], {"final": s.states[CapturePoint("norm")][: s.prompt_tokens]})
        for s in captured.samples
    ]
    check = judge_alignment(noise, "final", captured.parts, normed=True)
    assert check.verdict == "warn"
    assert check.sentence.startswith("Cannot be decided")


def test_a_head_of_another_width_is_not_compared(fluent: Capture) -> None:
    parts = replace(fluent.parts, head=torch.zeros(VOCAB, 32))
    check = judge_alignment(slots(fluent), "final", parts, normed=True)
    assert (check.verdict, check.value) == ("warn", "not measured")


def test_a_dump_whose_final_state_is_no_final_state_is_not_judged(fluent: Capture, tmp_path: Path) -> None:
    spec = CaptureSpec(aux=("layers.1", "layers.3", "layers.5"), final=CapturePoint("layers.6"))
    check = check_of(examine(fluent, tmp_path, 1.0, spec=spec, probe=False), "prompt_rows")
    assert check.verdict == "fail"
    assert "`layers.6` is not the target's final state" in check.sentence


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scores_are_those_of_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch, temperature: float, softcap: float | None
) -> None:
    monkeypatch.setattr("eagle3.evidence.head.VOCAB_CHUNK", 10)
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(5, 16, generator=generator), torch.randn(43, 16, generator=generator)
    tokens = torch.tensor([[0, 42, 43]] * 5)
    parts = FinalStateParts(head, torch.ones(16), 1e-5, logit_scale=0.5, softcap=softcap)
    found = score(states, tokens, parts, 43, normed=True, temperature=temperature)
    logits = 0.5 * states @ head.T
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    expected = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(found.nll[:, :2], -expected[:, [0, 42]])
    torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(-1))
    assert bool(found.nll[:, 2].isinf().all())  # no token of the vocabulary
