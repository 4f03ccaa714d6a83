"""The training loop: it learns what can be learnt, simulates acceptance rightly, and refuses bad input."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from eagle3.acceptance.definitions import AcceptanceError
from eagle3.acceptance.simulation import simulate_acceptance
from eagle3.capture import CapturePoint
from eagle3.drafter.model import Drafter
from eagle3.drafter.unroll import DraftCache, decode_step
from eagle3.drafter.vocab import VocabMap
from eagle3.training.config import TrainingConfig
from eagle3.training.initialise import initialise
from eagle3.training.loop import TrainResult, train
from eagle3.training.run import Progress
from eagle3.training.samples import TargetParts, TrainingError, TrainingSample
from tests.drafters import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    LearnableDump,
    make_config,
    make_drafter,
    make_learnable_dump,
    make_parts,
    make_sample,
    make_vocab,
    roll_slots,
)

pytestmark = pytest.mark.unit

RECIPE = TrainingConfig(budget=150, budget_unit="steps", batch_size=4, learning_rate=1e-2, bf16=False)
FEW = RECIPE.model_copy(update={"budget": 6, "log_every": 2})


@pytest.fixture(scope="module")
def dump() -> LearnableDump:
    return make_learnable_dump()


@pytest.fixture(scope="module")
def trained(dump: LearnableDump) -> TrainResult:
    return train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, RECIPE)


def test_training_raises_acceptance_far_above_its_start(trained: TrainResult) -> None:
    assert trained.acceptance is not None
    assert trained.metrics["heldout_acceptance_length_before"] < 1.2
    assert trained.acceptance.length > 2.2, "the states give two tokens away: 3 is the most"
    assert trained.metrics["heldout_top1_step1"] > 0.8
    assert trained.metrics["heldout_top1_step2"] > 0.6
    assert trained.metrics["heldout_acceptance_length"] == trained.acceptance.length
    assert trained.history[-1].loss < 0.6 * trained.history[0].loss


def test_slots_in_another_order_lose_most_of_it(dump: LearnableDump, trained: TrainResult) -> None:
    wrong = [roll_slots(s) for s in dump.heldout]
    mismatched = simulate_acceptance(trained.drafter, dump.vocab, dump.parts.embedding, wrong)
    assert trained.acceptance is not None
    assert trained.acceptance.length > 2.2, "the floor: an untrained drafter would hide the fault"
    assert mismatched.length < 1.3


def test_trained_on_the_other_order_it_does_as_well(dump: LearnableDump) -> None:
    """The fault is the mismatch between training and serving, not the order."""
    train_set, heldout = [roll_slots(s) for s in dump.train], [roll_slots(s) for s in dump.heldout]
    result = train(train_set, heldout, dump.parts, make_config(), dump.vocab, RECIPE)
    assert result.acceptance is not None
    assert result.acceptance.length > 1.8


def greedy_loop(
    drafter: Drafter, vocab: VocabMap, parts: TargetParts, sample: TrainingSample, num_steps: int
) -> list[int]:
    """The speculative loop as serving runs it, the greedy answer standing for the target: correct drafts each time."""
    fused = drafter.fuse(sample.aux[None])
    cache, written, results = DraftCache(), 0, []
    newest = int(sample.loss_mask.nonzero()[0])  # the answer's first token: the target gave it
    while newest + num_steps < len(sample.input_ids):
        for row in range(written, newest):  # rows of verified tokens, with the target's states
            embed = parts.embedding[sample.input_ids[row + 1]].view(1, 1, -1)
            hidden = decode_step(drafter, cache, embed, fused[:, row : row + 1], row)
        written = newest
        branch, drafts = cache.copy(), []
        for step in range(num_steps):
            drafts.append(int(vocab.target_ids[drafter.logits(hidden)[0, 0].argmax()]))
            embed = parts.embedding[drafts[-1]].view(1, 1, -1)
            hidden = decode_step(drafter, branch, embed, drafter.next_hidden(hidden), newest + step)
        answer = sample.input_ids[newest + 1 : newest + 1 + num_steps].tolist()
        right = next((i for i, (d, a) in enumerate(zip(drafts, answer, strict=True)) if d != a), num_steps)
        results.append(right)
        newest += right + 1
    return results


def test_the_simulation_equals_the_speculative_loop(dump: LearnableDump, trained: TrainResult) -> None:
    samples = dump.heldout[:6]
    figure = simulate_acceptance(trained.drafter, dump.vocab, dump.parts.embedding, samples, num_steps=3, batch_size=4)
    with torch.no_grad():
        loops = [greedy_loop(trained.drafter, dump.vocab, dump.parts, s, 3) for s in samples]
    everything = [right for loop in loops for right in loop]
    assert figure.histogram == tuple(everything.count(i) for i in range(4))
    assert figure.request_lengths == tuple(1 + sum(loop) / len(loop) for loop in loops)
    assert len(set(everything)) > 2, "the loop must have seen right and wrong drafts"


def test_an_answer_shorter_than_the_chain_is_counted_apart(dump: LearnableDump, trained: TrainResult) -> None:
    short = replace(
        dump.heldout[0], loss_mask=torch.arange(len(dump.heldout[0].input_ids)) >= len(dump.heldout[0].aux) - 1
    )
    embedding = dump.parts.embedding
    figure = simulate_acceptance(trained.drafter, dump.vocab, embedding, [short, dump.heldout[1]])
    assert (figure.num_requests, figure.num_without_verification) == (1, 1)
    with pytest.raises(AcceptanceError, match="too short"):
        simulate_acceptance(trained.drafter, dump.vocab, embedding, [short])


def test_every_answer_of_a_conversation_is_walked(dump: LearnableDump, trained: TrainResult) -> None:
    sample = dump.heldout[0]
    turns = torch.zeros_like(sample.loss_mask)
    turns[4:10] = turns[14:22] = True
    single = [torch.zeros_like(turns), torch.zeros_like(turns)]
    single[0][4:10], single[1][14:22] = True, True

    def histogram(mask: torch.Tensor) -> tuple[int, ...]:
        chosen = [replace(sample, loss_mask=mask)]
        return simulate_acceptance(trained.drafter, dump.vocab, dump.parts.embedding, chosen).histogram

    assert histogram(turns) == tuple(a + b for a, b in zip(histogram(single[0]), histogram(single[1]), strict=True))


def test_the_same_seed_gives_the_same_weights_and_another_one_others(dump: LearnableDump) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        config = FEW.model_copy(update={"seed": seed})
        return train(dump.train, [], dump.parts, make_config(), dump.vocab, config).drafter.state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_progress_tells_stage_fraction_and_figures(dump: LearnableDump) -> None:
    seen: list[Progress] = []
    train(dump.train[:8], dump.heldout[:4], dump.parts, make_config(), dump.vocab, FEW, seen.append)
    stages = [p.stage for p in seen]
    assert stages == sorted(stages, key=["prepare", "train", "evaluate"].index), "a bar that never goes back"
    assert set(stages) == {"prepare", "train", "evaluate"}
    assert (seen[-1].fraction, seen[-1].seconds_left) == (1.0, 0.0)
    steps = [p for p in seen if p.stage == "train" and p.loss is not None]
    assert [p.step for p in steps] == [1, 3, 5]
    for p in steps:
        assert p.rows_per_second is not None
        assert p.rows_per_second > 0
        assert p.seconds_left is not None
        assert p.seconds_left >= 0
        assert len(p.top1) == 3
    assert [p.fraction for p in steps] == pytest.approx([1 / 6, 3 / 6, 5 / 6])


@pytest.mark.parametrize("unit", ["seconds", "cpu_seconds"])
def test_a_budget_of_time_is_kept(dump: LearnableDump, unit: str) -> None:
    config = TrainingConfig.model_validate({**FEW.model_dump(), "budget": 0.3, "budget_unit": unit})
    result = train(dump.train[:8], [], dump.parts, make_config(), dump.vocab, config)
    spent = result.metrics["train_seconds" if unit == "seconds" else "train_cpu_seconds"]
    assert spent >= 0.3
    assert result.metrics["steps"] > 1
    assert result.history[-1].fraction < 1


def test_the_learning_rate_warms_up_and_then_falls_along_a_cosine(dump: LearnableDump) -> None:
    config = RECIPE.model_copy(update={"budget": 40, "log_every": 1, "warmup_steps": 4})
    result = train(dump.train[:8], [], dump.parts, make_config(), dump.vocab, config)
    rates = [r.learning_rate / config.learning_rate for r in result.history]
    assert rates[:2] == pytest.approx([0.25, 0.5], rel=0.02)
    assert rates[20] == pytest.approx(0.5, rel=0.01)
    assert rates[-1] == pytest.approx(0.02)
    assert max(rates) < 1


def test_the_head_learns_slower_by_its_scale(dump: LearnableDump) -> None:
    def movement(scale: float) -> float:
        config = FEW.model_copy(update={"budget": 1.0, "head_learning_rate_scale": scale})
        head = train(dump.train[:8], [], dump.parts, make_config(), dump.vocab, config).drafter.lm_head.weight
        return float((head - dump.parts.head[dump.vocab.target_ids]).abs().mean())

    assert movement(0.25) == pytest.approx(0.25 * movement(1.0), rel=0.01)


def test_samples_without_a_token_to_learn_are_counted(dump: LearnableDump) -> None:
    empty = replace(dump.train[0], loss_mask=torch.zeros_like(dump.train[0].loss_mask))
    result = train([empty, *dump.train[1:4]], [], dump.parts, make_config(), dump.vocab, FEW)
    assert result.metrics["samples_without_rows"] == 1
    with pytest.raises(TrainingError, match="none of the 1 samples has a token to learn"):
        train([empty], [], dump.parts, make_config(), dump.vocab, FEW)


def damage(sample: TrainingSample, **change: object) -> TrainingSample:
    return replace(sample, **change)  # type: ignore[arg-type]


def nan_in_row(states: torch.Tensor, row: int) -> torch.Tensor:
    states = states.clone()
    states[row, 3] = float("nan")
    return states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"aux": nan_in_row(s.aux, 5)}, "sample text-2: aux holds NaN or inf in 1 of .* first in row 5"),
        (lambda s: {"final": nan_in_row(s.final, 2) * 1}, "sample text-2: final holds NaN"),
        (lambda s: {"aux": s.aux[:, :HIDDEN]}, r"sample text-2: aux is \[\d+, 32\], expected \[\d+, 96\]"),
        (lambda s: {"input_ids": s.input_ids[:-1]}, "sample text-2: input_ids"),
        (lambda s: {"input_ids": s.input_ids + VOCAB}, "sample text-2: token ids outside 0 ... 63"),
    ],
)
def test_a_bad_sample_is_named_before_training_starts(dump: LearnableDump, change: object, message: str) -> None:
    samples: Sequence[TrainingSample] = [
        damage(s, **change(s)) if s.id == "text-2" else s  # type: ignore[operator]
        for s in dump.train[:4]
    ]
    with pytest.raises(TrainingError, match=message):
        train(samples, [], dump.parts, make_config(), dump.vocab, FEW)


def test_a_sample_longer_than_the_drafters_positions_is_refused(dump: LearnableDump) -> None:
    with pytest.raises(TrainingError, match="a drafter of 20 positions cannot hold"):
        train(dump.train[:2], [], dump.parts, make_config(max_positions=20), dump.vocab, FEW)


def test_an_exploding_loss_stops_and_names_the_batch(dump: LearnableDump) -> None:
    wild = FEW.model_copy(update={"budget": 200.0, "learning_rate": 1e30, "warmup_steps": 0})
    with pytest.raises(TrainingError, match=r"step \d+: the loss is .* with samples text-\d+.*lower the learning rate"):
        train(dump.train[:8], [], dump.parts, make_config(), dump.vocab, wild)


def test_parts_of_another_target_are_refused(dump: LearnableDump) -> None:
    parts = replace(dump.parts, head=torch.zeros(VOCAB + 1, HIDDEN))
    with pytest.raises(TrainingError, match=r"head is \[65, 32\], the drafter is shaped for \[64, 32\]"):
        train(dump.train[:2], [], parts, make_config(), dump.vocab, FEW)


def test_a_vocabulary_of_another_size_is_refused(dump: LearnableDump) -> None:
    with pytest.raises(TrainingError, match="48 of 64 tokens, the drafter is shaped for 40 of 64"):
        train(dump.train[:2], [], dump.parts, make_config(draft_vocab_size=40), dump.vocab, FEW)


def test_a_final_state_from_the_middle_of_the_target_is_refused(dump: LearnableDump) -> None:
    with pytest.raises(TrainingError, match=r"only from `norm` or layers\.7"):
        train(dump.train[:2], [], dump.parts, make_config(), dump.vocab, FEW, final=CapturePoint("layers.6"))


def llama_layer() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (64, HIDDEN),
        "self_attn.k_proj.weight": (32, HIDDEN),
        "self_attn.v_proj.weight": (32, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 64),
        "mlp.gate_proj.weight": (48, HIDDEN),
        "mlp.up_proj.weight": (48, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 48),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_a_warm_start_takes_the_targets_last_layer() -> None:
    parts, vocab, layer = make_parts(), make_vocab(), llama_layer()
    drafter = make_drafter()
    taken = initialise(
        drafter, vocab, replace(parts, last_layer=layer), warm_start=True, generator=torch.Generator().manual_seed(0)
    )
    assert len(taken) == 11
    assert torch.equal(drafter.lm_head.weight, parts.head[vocab.target_ids])
    assert torch.equal(drafter.norm.weight, parts.final_norm)
    assert torch.equal(drafter.midlayer.self_attn.k_proj.weight[:, HIDDEN:], layer["self_attn.k_proj.weight"])
    assert torch.equal(drafter.midlayer.hidden_norm.weight, layer["input_layernorm.weight"])
    assert torch.equal(drafter.midlayer.mlp.down_proj.weight, layer["mlp.down_proj.weight"])
    identity = drafter.fc.weight[:, -HIDDEN:] - torch.eye(HIDDEN)
    assert identity.abs().max() < 0.1, "the last slot passes through"


def test_what_does_not_fit_stays_random_and_is_not_listed() -> None:
    layer = llama_layer()
    layer["mlp.gate_proj.weight"] = torch.randn(50, HIDDEN)
    del layer["self_attn.q_proj.weight"]
    taken = initialise(
        make_drafter(),
        make_vocab(),
        replace(make_parts(), last_layer=layer),
        warm_start=True,
        generator=torch.Generator().manual_seed(0),
    )
    assert "midlayer.mlp.gate_proj.weight" not in taken
    assert "midlayer.self_attn.q_proj.weight" not in taken
    assert "midlayer.mlp.up_proj.weight" in taken


def test_a_cold_start_takes_head_and_norm_only() -> None:
    taken = initialise(
        make_drafter(),
        make_vocab(),
        replace(make_parts(), last_layer=llama_layer()),
        warm_start=False,
        generator=torch.Generator().manual_seed(0),
    )
    assert taken == ("lm_head.weight", "norm.weight")


def test_a_layer_of_which_nothing_fits_is_an_error() -> None:
    parts = replace(make_parts(), last_layer={"self_attn.kv_a_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(TrainingError, match="kv_a_proj"):
        initialise(make_drafter(), make_vocab(), parts, warm_start=True, generator=torch.Generator())


def test_bf16_trains_as_well(dump: LearnableDump) -> None:
    config = RECIPE.model_copy(update={"bf16": True, "budget": 60.0})
    result = train(dump.train, dump.heldout, dump.parts, make_config(), dump.vocab, config)
    assert result.acceptance is not None
    assert result.acceptance.length > 1.4
    assert result.drafter.fc.weight.dtype == torch.float32


@pytest.mark.parametrize("sample_rows", [2, 3, 5])
def test_samples_of_a_few_rows_train(sample_rows: int) -> None:
    full = VocabMap(torch.arange(VOCAB), VOCAB)
    samples = [make_sample(sample_rows, prompt=1, seed=i) for i in range(4)]
    result = train(samples, [], make_parts(), make_config(draft_vocab_size=VOCAB), full, FEW)
    assert result.metrics["steps"] == 6
    assert all(torch.isfinite(w).all() for w in result.drafter.state_dict().values())


def test_the_form_explains_every_setting() -> None:
    properties = TrainingConfig.model_json_schema()["properties"]
    assert all("title" in p and "description" in p for p in properties.values())
    with pytest.raises(ValidationError):
        TrainingConfig(budget=0)
    with pytest.raises(ValidationError):
        TrainingConfig(budget_unit="epochs")  # type: ignore[arg-type]


def test_draft_vocabulary_of_the_made_up_dump_covers_its_text(dump: LearnableDump) -> None:
    """Guards the dump itself: were its text outside the draft vocabulary, the tests above would test nothing."""
    assert len(dump.vocab) == DRAFT_VOCAB
    assert all(bool(torch.isin(s.input_ids, dump.vocab.target_ids).all()) for s in dump.train)
