"""What a slot really holds is named, whatever its label says: right dumps and one test per kind of mistake."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint, all_points
from eagle3.dump.content import dtype_name
from eagle3.evidence.attribution import (
    Attribution,
    Candidate,
    NothingToCompare,
    SlotAttribution,
    SlotSample,
    TargetReference,
    WrongTarget,
    attribute,
)
from eagle3.evidence.matching import SlotsIncomplete
from eagle3.target import Target
from tests import targets
from tests.dumps import SPEC, Capture, capture

pytestmark = pytest.mark.unit

States = Mapping[CapturePoint, torch.Tensor]
MODEL_CLASSES = {"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}


# The whole table of mistakes x targets x dtypes stands in test_pitfalls.
KINDS = {"llama-float32": torch.float32, "deepseek-bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str, tiny_llama: Path, tiny_deepseek: Path) -> Path:
    return tiny_llama if kind.startswith("llama") else tiny_deepseek


@pytest.fixture(scope="module")
def reference(target: Path) -> TargetReference:
    return TargetReference(Target.open(target))


@pytest.fixture(scope="module")
def captured(kind: str, target: Path) -> Capture:
    """In bfloat16 the target itself ran in bfloat16, as a server's would."""
    return capture(target, dtype=KINDS[kind])


def attributed(
    captured: Capture, reference: TargetReference, plant: Callable[[States], dict[str, torch.Tensor]] | None = None
) -> Attribution:
    """Attribute the slots of SPEC; `plant` gives what a faulty capture would have stored under some of the labels."""
    samples = []
    for sample in captured.samples:
        states = {str(p): sample.states[p] for p in SPEC.points} | (plant(sample.states) if plant else {})
        samples.append(SlotSample(sample.id, sample.input_ids, states))
    return attribute(
        samples,
        {str(point): point for point in SPEC.points},
        reference,
        dtype=dtype_name(captured.samples[0].states[SPEC.final].dtype),
        model_class=captured.identity.model_class,
    )


def of(attribution: Attribution, label: str) -> SlotAttribution:
    return next(slot for slot in attribution.slots if slot.label == label)


def at(states: States, point: str) -> torch.Tensor:
    return states[CapturePoint(point)]


def late(state: torch.Tensor, by: int) -> torch.Tensor:
    return state.roll(by, dims=0)


def under_norm(reference: TargetReference, state: torch.Tensor) -> torch.Tensor:
    normed = reference.norm(state)
    assert normed is not None
    return normed.to(state.dtype)


def test_a_right_dump_is_proven_with_room(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference)
    assert found.verdict == "proven"
    assert (found.reference, found.samples, found.misfits, found.causes) == ("target", 8, (), ())
    for slot in found.slots:
        assert slot.found == Candidate(point=CapturePoint(slot.label))
        assert slot.error < 0.4 * slot.bound
        assert slot.error < 0.2 * slot.runner_up_error
        assert slot.rows_fitting == 1
        assert slot.errors[CapturePoint(slot.label)] == slot.error == slot.claimed_error
    assert list(found.profile) == list(all_points(targets.LAYERS)) == list(found.slots[0].errors)


def test_a_target_in_int8_is_proven_against_its_exact_weights(target: Path, reference: TargetReference) -> None:
    opened = Target.open(target)
    model = opened.load_model(torch.float32)
    for weight in model.parameters():
        if weight.dim() >= 2:
            step = weight.abs().amax(dim=-1, keepdim=True) / 127
            weight.data = (weight / step).round() * step
    samples = [
        SlotSample(s.id, s.input_ids, {str(p): t for p, t in opened.hidden_states(model, s.input_ids).items()})
        for s in capture(target).samples
    ]
    claims = {str(point): point for point in all_points(opened.num_layers)}
    found = attribute(samples, claims, reference, dtype="float32", model_class=opened.model_class)
    assert found.verdict == "proven", [slot.sentence for slot in found.slots if slot.verdict != "proven"]
    assert max(slot.error / slot.bound for slot in found.slots) < 0.7


@pytest.mark.parametrize(
    ("label", "really"),
    [
        ("layers.1", "layers.0"),
        ("layers.3", "layers.4"),
        ("layers.1", "embed"),
        ("layers.5", "layers.7"),
        ("norm", "layers.7"),
    ],
)
def test_another_boundary_is_named(captured: Capture, reference: TargetReference, label: str, really: str) -> None:
    found = attributed(captured, reference, lambda states: {label: at(states, really)})
    slot = of(found, label)
    assert (slot.verdict, slot.found) == ("refuted", Candidate(point=CapturePoint(really)))
    assert f"{label} holds {really}" in slot.sentence
    assert [s.verdict for s in found.slots if s.label != label] == ["proven"] * 3
    assert found.causes


def test_a_layer_under_the_label_embed_is_named(target: Path, reference: TargetReference) -> None:
    captured = capture(target)
    samples = [SlotSample(s.id, s.input_ids, {"embed": at(s.states, "layers.2")}) for s in captured.samples]
    found = attribute(
        samples, {"embed": CapturePoint("embed")}, reference, dtype="float32", model_class=captured.identity.model_class
    )
    assert found.slots[0].found == Candidate(point=CapturePoint("layers.2"))
    assert found.verdict == "refuted"


def test_swapped_slots_are_named_together(captured: Capture, reference: TargetReference) -> None:
    found = attributed(
        captured,
        reference,
        lambda states: {"layers.1": at(states, "layers.5"), "layers.5": at(states, "layers.1")},
    )
    assert [slot.verdict for slot in found.slots] == ["refuted", "proven", "refuted", "proven"]
    assert "in another order" in found.causes[0]


def test_one_slot_three_times_is_named(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference, lambda states: dict.fromkeys(map(str, SPEC.aux), at(states, "layers.1")))
    assert [str(slot.found) for slot in found.slots] == ["layers.1"] * 3 + ["norm"]
    assert "layers.1, layers.3, layers.5 hold one tensor, layers.1" in found.causes[0]


def test_the_final_norm_on_a_slot_is_named(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference, lambda states: {"layers.3": under_norm(reference, at(states, "layers.3"))})
    assert of(found, "layers.3").found == Candidate(point=CapturePoint("layers.3"), norms=1)
    assert found.verdict == "refuted"
    assert "layers.3 was through the final norm" in found.causes[0]


def test_a_final_state_normed_twice_is_named(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference, lambda states: {"norm": under_norm(reference, at(states, "norm"))})
    assert of(found, "norm").found == Candidate(point=CapturePoint("norm"), norms=1)
    assert "twice" in found.causes[0]


def test_a_final_state_never_normed_is_named(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference, lambda states: {"norm": at(states, f"layers.{targets.LAYERS - 1}")})
    assert "The final state was taken before the final norm" in found.causes[0]


def test_a_final_state_of_the_last_layer_but_one_is_named(captured: Capture, reference: TargetReference) -> None:
    before = f"layers.{targets.LAYERS - 2}"
    found = attributed(captured, reference, lambda states: {"norm": under_norm(reference, at(states, before))})
    assert of(found, "norm").found == Candidate(point=CapturePoint(before), norms=1)
    assert "another layer than the last" in found.causes[0]


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.25, -1.0])
def test_a_scale_is_named_with_its_factor(captured: Capture, reference: TargetReference, factor: float) -> None:
    found = attributed(captured, reference, lambda states: {"layers.3": at(states, "layers.3") * factor})
    slot = of(found, "layers.3")
    assert (slot.verdict, slot.found.point) == ("refuted", "layers.3")
    assert slot.found.scale == pytest.approx(factor, rel=0.02)
    assert "layers.3 was multiplied by" in found.causes[0]


@pytest.mark.parametrize("by", [1, 2, -1, -2])
def test_shifted_rows_are_named(captured: Capture, reference: TargetReference, by: int) -> None:
    found = attributed(captured, reference, lambda states: {str(p): late(at(states, str(p)), by) for p in SPEC.points})
    assert [slot.found for slot in found.slots] == [Candidate(point=p, shift=-by) for p in SPEC.points]
    assert found.verdict == "refuted"
    assert f"Rows are {'late' if by > 0 else 'early'} by {abs(by)} in {', '.join(SPEC.points)}" in found.causes[0]


def test_samples_that_exchanged_their_rows_are_named_one_by_one(captured: Capture, reference: TargetReference) -> None:
    samples = [SlotSample(s.id, s.input_ids, {str(p): s.states[p] for p in SPEC.points}) for s in captured.samples]
    a, b = samples[6], samples[7]
    rows = len(a.input_ids)
    samples[6] = SlotSample(a.id, a.input_ids, {p: state[:rows] for p, state in b.states.items()})
    found = attribute(
        samples,
        {str(point): point for point in SPEC.points},
        reference,
        dtype=dtype_name(captured.samples[0].states[SPEC.final].dtype),
        model_class=captured.identity.model_class,
    )
    assert [slot.verdict for slot in found.slots] == ["proven"] * 4, "the others are right"
    assert found.verdict == "refuted"
    assert {(m.sample, m.label) for m in found.misfits} == {(a.id, str(p)) for p in SPEC.points}
    assert f"of sample {b.id!r}" in found.misfits[0].sentence


def test_one_late_sample_among_right_ones_is_named(captured: Capture, reference: TargetReference) -> None:
    spoilt = captured.samples[3]

    def plant(states: States) -> dict[str, torch.Tensor]:
        return {"norm": late(at(states, "norm"), 1)} if states is spoilt.states else {}

    found = attributed(captured, reference, plant)
    assert [(m.sample, m.label) for m in found.misfits] == [(spoilt.id, "norm")]
    assert "norm, 1 row late" in found.misfits[0].sentence


def test_rows_of_other_tokens_fit_nothing(captured: Capture, reference: TargetReference) -> None:
    found = attributed(captured, reference, lambda states: {"layers.3": late(at(states, "layers.3"), 5)})
    slot = of(found, "layers.3")
    assert slot.verdict == "refuted"
    assert "none of the target's tensors" in slot.sentence


def test_a_spoilt_beginning_of_every_sample_is_found(captured: Capture, reference: TargetReference) -> None:
    def plant(states: States) -> dict[str, torch.Tensor]:
        state = at(states, "layers.3").clone()
        cut = len(state) // 3 + 1
        state[:cut] = state[-1]  # as where a prefix came from a cache
        return {"layers.3": state}

    slot = of(attributed(captured, reference, plant), "layers.3")
    assert slot.verdict == "refuted"
    assert "not in the first third" in slot.sentence


def test_other_weights_fit_nothing(captured: Capture, target: Path, tmp_path: Path) -> None:
    make = targets.make_llama if captured.identity.model_class == MODEL_CLASSES["llama"] else targets.make_deepseek
    other = TargetReference(Target.open(make(tmp_path / "other", seed=5)))
    found = attributed(captured, other)
    assert [slot.verdict for slot in found.slots] == ["refuted"] * 4
    with pytest.raises(WrongTarget, match=r"weights_sha256 is .* here and .* in the dump"):
        other.check(captured.identity)


def test_two_boundaries_that_are_equal_cannot_be_decided(tiny_llama: Path) -> None:
    opened = Target.open(tiny_llama)
    model = opened.load_model(torch.float32)
    layer = model.model.layers[3]
    for idle in (layer.self_attn.o_proj, layer.mlp.down_proj):  # the layer adds nothing
        idle.weight.data.zero_()
    samples = [
        SlotSample(s.id, s.input_ids, {"layers.3": opened.hidden_states(model, s.input_ids)[CapturePoint("layers.3")]})
        for s in capture(tiny_llama).samples
    ]
    reference = TargetReference(opened, model)
    found = attribute(
        samples, {"layers.3": CapturePoint("layers.3")}, reference, dtype="float32", model_class="LlamaForCausalLM"
    )
    assert found.verdict == found.slots[0].verdict == "undecided"
    assert "nearly equal in this target" in found.slots[0].sentence


def test_too_few_rows_cannot_be_decided(tiny_llama: Path) -> None:
    sample = capture(tiny_llama).samples[0]
    short = SlotSample("short", sample.input_ids[:5], {"layers.1": at(sample.states, "layers.1")[:5]})
    found = attribute(
        [short],
        {"layers.1": CapturePoint("layers.1")},
        TargetReference(Target.open(tiny_llama)),
        dtype="float32",
        model_class=None,
    )
    assert found.verdict == "undecided"
    assert "5 rows to compare, 8 are needed" in found.slots[0].sentence


def test_a_text_of_one_token_cannot_tell_a_shift(tiny_llama: Path) -> None:
    opened = Target.open(tiny_llama)
    ids = torch.full((40,), 7)
    states = opened.hidden_states(opened.load_model(torch.float32), ids)
    sample = SlotSample("same", ids, {"layers.1": at(states, "layers.1")})
    found = attribute(
        [sample],
        {"layers.1": CapturePoint("layers.1")},
        TargetReference(opened),
        dtype="float32",
        model_class=None,
    )
    assert found.verdict == "undecided"
    assert "repeats one token" in found.slots[0].sentence


def test_slots_that_claim_nothing_are_identified(tiny_llama: Path) -> None:
    samples = [
        SlotSample(s.id, s.input_ids, {"aux_0": at(s.states, "layers.2"), "final": at(s.states, "norm")})
        for s in capture(tiny_llama).samples
    ]
    found = attribute(
        samples,
        {"aux_0": None, "final": None},
        TargetReference(Target.open(tiny_llama)),
        dtype="float32",
        model_class=None,
    )
    assert [(s.label, str(s.found), s.claimed_error) for s in found.slots] == [
        ("aux_0", "layers.2", None),
        ("final", "norm", None),
    ]
    assert found.verdict == "proven"


def test_zeros_and_nan_fit_nothing(tiny_llama: Path) -> None:
    samples = [
        SlotSample(
            s.id,
            s.input_ids,
            {"layers.1": at(s.states, "layers.1") * 0, "layers.3": at(s.states, "layers.3") * torch.nan},
        )
        for s in capture(tiny_llama).samples
    ]
    claims = {name: CapturePoint(name) for name in ("layers.1", "layers.3")}
    found = attribute(
        samples, claims, TargetReference(Target.open(tiny_llama)), dtype="float32", model_class="LlamaForCausalLM"
    )
    assert [slot.verdict for slot in found.slots] == ["refuted", "refuted"]


def test_a_target_in_kimis_form_is_attributed(tmp_path: Path) -> None:
    """Nested text_config, a mixture of experts in bfloat16: single rows jump where the routing flips."""
    opened = Target.open(targets.make_kimi(tmp_path / "kimi"))
    model = opened.load_model(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(6):
        ids = torch.randint(3, targets.VOCAB, (32,), generator=generator)
        states = opened.hidden_states(model, ids)
        slots = {"layers.1": at(states, "layers.1"), "layers.3": at(states, "layers.4"), "norm": at(states, "norm")}
        samples.append(SlotSample(f"k{index}", ids, slots))
    claims = {label: CapturePoint(label) for label in ("layers.1", "layers.3", "norm")}
    found = attribute(samples, claims, TargetReference(opened), dtype="bfloat16", model_class=opened.model_class)
    assert [(slot.verdict, str(slot.found)) for slot in found.slots] == [
        ("proven", "layers.1"),
        ("refuted", "layers.4"),
        ("proven", "norm"),
    ]


def test_the_result_is_the_same_every_time(tiny_llama: Path) -> None:
    captured = capture(tiny_llama)
    once, again = (attributed(captured, TargetReference(Target.open(tiny_llama))) for _ in range(2))
    assert once == again
    assert Attribution.model_validate_json(once.model_dump_json()) == once


def test_what_cannot_be_compared_is_an_error_that_says_why(tiny_llama: Path) -> None:
    sample = capture(tiny_llama).samples[0]
    reference = TargetReference(Target.open(tiny_llama))

    def run(*samples: SlotSample) -> Attribution:
        return attribute(samples, {"layers.1": CapturePoint("layers.1")}, reference, dtype="float32", model_class=None)

    state = at(sample.states, "layers.1")
    with pytest.raises(NothingToCompare, match="none of the 0 samples"):
        run()
    with pytest.raises(SlotsIncomplete, match=r"has no layers\.1; it has norm"):
        run(SlotSample("s", sample.input_ids, {"norm": state}))
    with pytest.raises(SlotsIncomplete, match="a row for each of the 28 tokens was expected"):
        run(SlotSample("s", sample.input_ids, {"layers.1": state[1:]}))
    with pytest.raises(WrongTarget, match="states of width 32, and the target's are 64 wide"):
        run(SlotSample("s", sample.input_ids, {"layers.1": state[:, :32]}))
    with pytest.raises(WrongTarget, match=r"token id 600, and .* has ids 0 \.\.\. 511"):
        run(SlotSample("s", sample.input_ids.clone().fill_(600), {"layers.1": state}))
