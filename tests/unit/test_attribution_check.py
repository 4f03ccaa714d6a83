"""The check `attribution` of a report: which rows are looked at, with what, and what a person is told."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.manifest import SampleRecord
from eagle3.dump.probe import read_dump_probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.attribution_check import (
    ANSWER_ROWS,
    MAX_SAMPLES,
    TOKEN_BUDGET,
    check_attribution,
    choose_samples,
)
from eagle3.evidence.calibration import coarser_arithmetic
from eagle3.evidence.references import ProbeReference, TargetReference, WrongTarget, check_identity
from eagle3.target import Target, TargetError
from tasks.references import NoReference, choose_reference
from tests import targets
from tests.dumps import SPEC, capture, engine_record, make_dump, reference_of, with_states, write_dump

pytestmark = pytest.mark.unit


def test_a_right_dump_passes_and_the_check_says_what_was_looked_at(tiny_llama: Path, tmp_path: Path) -> None:
    make_dump(tiny_llama, tmp_path, dtype=torch.bfloat16)
    check, attribution = check_attribution(DumpReader.open(tmp_path), reference_of(tiny_llama))
    assert attribution is not None
    assert check.verdict == "pass"
    prompts = attribution.rows - attribution.answer_rows
    assert check.value.startswith(
        f"{attribution.rows} rows of 8 of 8 samples, {prompts} of prompts and {attribution.answer_rows} of answers; "
    )
    assert attribution.answer_rows > 150
    assert "layers.3 0.0" in check.value
    assert "8 samples were looked at" in check.sentence


def test_the_sentence_names_slot_layer_cause_and_cure(tiny_llama: Path, tmp_path: Path) -> None:
    """The story: the labels say embed, layers.1, layers.3, and the data is layers.1, layers.3, layers.5."""
    spec = CaptureSpec(aux=tuple(map(CapturePoint, ("embed", "layers.1", "layers.3"))))
    really = {"embed": "layers.1", "layers.1": "layers.3", "layers.3": "layers.5"}
    write_dump(
        capture(tiny_llama),
        tmp_path,
        spec=spec,
        alter=lambda s: with_states(s, {label: s.states[CapturePoint(p)] for label, p in really.items()}),
    )
    check, _ = check_attribution(DumpReader.open(tmp_path), reference_of(tiny_llama))
    assert check.verdict == "fail"
    assert check.points == spec.aux
    for label, point in really.items():
        assert f"{label} holds {point}" in check.sentence
    assert "named as if the embedding came first" in check.sentence
    assert "Do not move the serving configuration to the labels" in check.sentence
    assert "The ids that were sent, [-1, 1, 3], do mean embed, layers.1, layers.3 in SGLang 0.5.23" in check.sentence


def test_ids_that_were_wrong_for_the_labels_are_said_with_the_right_ones(tiny_llama: Path, tmp_path: Path) -> None:
    captured = capture(tiny_llama)
    moved = CaptureSpec(aux=tuple(map(CapturePoint, ("layers.1", "layers.3", "layers.4"))))
    write_dump(
        captured,
        tmp_path,
        engine=engine_record(captured.identity, moved),
        alter=lambda s: with_states(s, {"layers.5": s.states[CapturePoint("layers.4")]}),
    )
    check, _ = check_attribution(DumpReader.open(tmp_path), reference_of(tiny_llama))
    assert "layers.5 holds layers.4" in check.sentence
    assert "Right for layers.1, layers.3, layers.5 in SGLang 0.5.23 on LlamaForCausalLM: [1, 3, 5]." in check.sentence


def test_the_same_fault_is_found_by_the_probe_alone(tiny_llama: Path, tmp_path: Path) -> None:
    captured = capture(tiny_llama)
    right = write_dump(captured, tmp_path / "right")
    probe = read_dump_probe(tmp_path / "right", right)
    assert probe is not None
    write_dump(
        captured,
        tmp_path / "wrong",
        alter=lambda s: with_states(s, {"layers.3": s.states[CapturePoint("layers.4")]}),
    )
    verdicts = {}
    for name in ("right", "wrong"):
        check, attribution = check_attribution(DumpReader.open(tmp_path / name), ProbeReference(probe))
        assert attribution is not None
        assert attribution.reference == "probe"
        verdicts[name] = check.verdict
        assert attribution.samples == 3
    assert verdicts == {"right": "warn", "wrong": "fail"}, "a probe holds no answers"
    assert "layers.3 holds layers.4" in check.sentence


def test_without_a_reference_it_warns_and_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    make_dump(tiny_llama, tmp_path)
    check, attribution = check_attribution(DumpReader.open(tmp_path), None, why_none="the target has 600 GB")
    assert attribution is None
    assert check.verdict == "warn"
    assert (
        "No slot was compared with the target's layers: the target has 600 GB. The labels are claims" in check.sentence
    )


def test_a_target_of_another_depth_is_said_to_be_another_one(tiny_llama: Path, tmp_path: Path) -> None:
    manifest = make_dump(tiny_llama, tmp_path)
    reference = TargetReference(Target.open(tiny_llama))
    reference.num_layers = 30
    check, _ = check_attribution(DumpReader.open(tmp_path), reference)
    assert check.verdict == "fail"
    assert "has 30 layers, the dump's target 8: it is another target" in check.sentence
    other = Target.open(targets.make_llama(tmp_path / "other", seed=1))
    with pytest.raises(WrongTarget, match=r"weights_sha256 is \w{16} here and \w{16} in the dump\. Give the folder"):
        check_identity(other, manifest.target)
    check_identity(Target.open(tiny_llama), manifest.target)


def records(*lengths: tuple[int, int]) -> list[SampleRecord]:
    return [
        SampleRecord(
            id=f"p{i}",
            shard=0,
            start=0,
            rows=prompt + output - 1,
            prompt_tokens=prompt,
            output_tokens=output,
            last_token_id=0,
            finish_reason="length",
            ids_sha256="0" * 64,
            digest="0" * 64,
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


def answers(chosen: Sequence[tuple[int, int]], of: Sequence[SampleRecord]) -> int:
    return sum(max(0, tokens - of[index].prompt_tokens) for index, tokens in chosen)


def test_samples_are_spread_over_the_dump_and_bounded() -> None:
    many = records(*[(60, 97)] * 3000)
    chosen = choose_samples(many, None)
    assert chosen == choose_samples(many, None)
    assert len(chosen) == MAX_SAMPLES
    assert sum(tokens for _, tokens in chosen) <= TOKEN_BUDGET
    assert [index // 250 for index, _ in chosen] == list(range(MAX_SAMPLES)), "one of each twelfth"
    assert answers(chosen, many) > 200


def test_what_short_samples_leave_longer_ones_get() -> None:
    mixed = records((5, 6), (5, 6), (40, 2000))
    assert choose_samples(mixed, None) == [(0, 10), (1, 10), (2, 2039)]
    deep = records(*[(100, 200)] * 5, (1500, 2000))
    tokens = dict(choose_samples(deep, None))
    assert tokens[5] > 1900, "half of what is left goes to one that reaches far behind"
    assert sum(tokens.values()) <= TOKEN_BUDGET


@pytest.mark.parametrize("prompts", [(30, 80), (150, 280), (400, 900), (1500, 1200), (3000, 3001)])
def test_every_sample_that_is_looked_at_is_looked_at_in_its_answer(prompts: tuple[int, int]) -> None:
    long = records(*[(tokens, 24 + 8 * (place % 3)) for place, tokens in enumerate(prompts * 40)])
    chosen = choose_samples(long, None)
    assert sum(tokens for _, tokens in chosen) <= TOKEN_BUDGET
    assert len(chosen) == min(MAX_SAMPLES, max(1, TOKEN_BUDGET // (min(prompts) + 23)))
    for index, tokens in chosen:
        assert tokens >= min(long[index].rows, long[index].prompt_tokens + ANSWER_ROWS)


def test_where_no_answer_is_in_reach_the_prompts_are_looked_at_and_it_says_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = records((9000, 50), (8000, 50))
    assert [index for index, _ in choose_samples(beyond, None)] == [0, 1]
    assert sum(tokens for _, tokens in choose_samples(beyond, None)) == TOKEN_BUDGET
    make_dump(tiny_llama, tmp_path)
    monkeypatch.setattr("eagle3.evidence.attribution_check.choose_samples", lambda *_: [(6, 20), (7, 20)])
    check, _ = check_attribution(DumpReader.open(tmp_path), reference_of(tiny_llama))
    assert check.verdict == "warn"
    assert "Only 0 of 184 rows of answers were compared" in check.sentence


def test_samples_that_a_probe_knows_are_the_ones_looked_at() -> None:
    many = records(*[(60, 97)] * 30)
    assert choose_samples(many, {"p3", "p17"}) == [(3, 156), (17, 156)]
    assert choose_samples(many, ()) == []


def test_the_target_is_the_reference_where_it_fits_else_the_probe(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_dump(tiny_llama, tmp_path)
    bare = make_dump(tiny_llama, tmp_path / "bare", probe=False)
    target = Target.open(tiny_llama)
    chosen = choose_reference("auto", target, tmp_path, manifest).reference
    assert isinstance(chosen, TargetReference)
    assert isinstance(choose_reference("probe", target, tmp_path, manifest).reference, ProbeReference)

    monkeypatch.setattr("tasks.references.MEMORY_SHARE", 0.0)
    assert isinstance(choose_reference("auto", target, tmp_path, manifest).reference, ProbeReference)
    with pytest.raises(NoReference, match="do not fit into half of this machine's free memory"):
        choose_reference("target", target, tmp_path, manifest)
    none = choose_reference("auto", target, tmp_path / "bare", bare)
    assert none.reference is None
    assert "do not fit" in none.why_none
    assert "has no probe" in none.why_none
    with pytest.raises(NoReference, match="the dump has no probe"):
        choose_reference("probe", target, tmp_path / "bare", bare)


def test_a_target_that_transformers_does_not_know_is_said_so_and_the_probe_taken(
    tiny_llama: Path, tmp_path: Path
) -> None:
    manifest = make_dump(tiny_llama, tmp_path / "dump")
    folder = shutil.copytree(tiny_llama, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "of_tomorrow"}
    (folder / "config.json").write_text(json.dumps(config))
    target = Target.open(folder)
    with pytest.raises(TargetError, match="transformers cannot load LlamaForCausalLM"):
        choose_reference("target", target, tmp_path / "dump", manifest)
    assert isinstance(choose_reference("auto", target, tmp_path / "dump", manifest).reference, ProbeReference)


def test_coarser_arithmetic_leaves_the_weights_as_they_were(tiny_llama: Path) -> None:
    target = Target.open(tiny_llama)
    model = target.load_model(torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = capture(tiny_llama).samples[5].input_ids
    exact = target.hidden_states(model, ids)
    with coarser_arithmetic(model, target.num_layers, "bfloat16"):
        coarse = target.hidden_states(model, ids)

    def break_off(*_: object) -> None:
        raise RuntimeError("stop")

    model.model.layers[3].mlp.register_forward_pre_hook(break_off)
    with pytest.raises(RuntimeError, match="stop"), coarser_arithmetic(model, target.num_layers, "float32"):
        target.hidden_states(model, ids)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for point in SPEC.points:
        moved = (coarse[point].float() - exact[point]).norm(dim=-1) / exact[point].norm(dim=-1)
        assert 0.005 < moved.median() < 0.1
