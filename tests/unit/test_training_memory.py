"""The formula of a step's memory against what torch allocates in a step."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from eagle3.training.loss import training_batch, unroll_loss
from eagle3.training.memory import step_bytes
from eagle3.training.samples import NORM, TrainingSample
from tests.drafters import DRAFT_VOCAB, HIDDEN, SLOTS, VOCAB, make_drafter, make_parts, make_vocab

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("num_steps", [2, 5])
def test_the_formula_is_within_a_fifth_of_what_a_step_allocates(bf16: bool, num_steps: int) -> None:
    rows, number = 512, 8
    drafter, parts, vocab = make_drafter(max_positions=1024), make_parts(), make_vocab()
    head, valid = parts.head[vocab.target_ids], [torch.arange(rows + 1) >= 1] * number
    samples = [
        TrainingSample(
            id=str(i),
            input_ids=torch.randint(VOCAB, (rows + 2,)),
            aux=torch.randn(rows + 1, SLOTS * HIDDEN),
            final=torch.randn(rows + 1, HIDDEN),
            loss_mask=torch.ones(rows + 2, dtype=torch.bool),
        )
        for i in range(number)
    ]
    optimizer = torch.optim.AdamW(drafter.parameters(), fused=True)

    def step() -> None:
        batch, targets = training_batch(samples, valid, parts, NORM, num_steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss, _ = unroll_loss(
                drafter, parts.embedding, head, batch, targets, num_steps=num_steps, decay=0.8, with_metrics=False
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the moments
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    resident = 12 * sum(p.numel() for p in drafter.parameters()) + 4 * (2 * VOCAB + DRAFT_VOCAB) * HIDDEN
    formula = step_bytes(drafter.config, rows=rows * number, num_steps=num_steps, bf16=bf16, table_bytes=4)
    assert sum(formula.values()) == pytest.approx(peak + resident, rel=0.2)
