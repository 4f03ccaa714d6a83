"""Targets and loss: the alignment of training.md, the masks, the final norm, and equality with a plain dense loss."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.capture import CapturePoint
from eagle3.drafter.model import Drafter, rotate
from eagle3.drafter.vocab import VocabMap
from eagle3.training.loss import training_batch, unroll_loss, valid_states
from eagle3.training.samples import NORM, TargetParts, TrainingSample
from tests.drafters import HIDDEN, VOCAB, make_drafter, make_parts, make_sample, make_vocab

pytestmark = pytest.mark.unit

STEPS, DECAY = 3, 0.8


def all_valid(sample: TrainingSample) -> Tensor:
    valid = sample.loss_mask[1:].clone()
    valid[0] = False
    return valid


def test_the_table_of_four_tokens() -> None:
    """T = 4, ids a b c d and the next token e: what each row reads and which target state it is compared with."""
    sample = make_sample(num_rows=4, prompt=0)
    batch, targets = training_batch([sample], [all_valid(sample)], make_parts(), NORM, STEPS)
    assert (batch.start, batch.num_rows) == (0, 3)
    assert torch.equal(batch.aux[0], sample.aux[:3])  # g_a, g_b, g_c; row 3 has no target distribution
    assert batch.positions.tolist() == [[0, 1, 2]]
    for k in range(STEPS):
        for row in range(3):
            if row + 1 + k < 4:
                assert batch.ids[0, row + 1 + k] == sample.input_ids[row + 1 + k]
                assert torch.equal(targets.final[0, row + k], sample.final[row + 1 + k])
    # step 0: rows 0, 1, 2 count; step 1: rows 0, 1; step 2: row 0
    assert targets.valid[0].tolist() == [True, True, True, False, False]


def test_the_loss_mask_is_that_of_the_predicted_token() -> None:
    sample = make_sample(num_rows=8, prompt=4)  # tokens 4 ... 8 are the answer
    full = VocabMap(torch.arange(VOCAB), VOCAB)
    # The state that predicts token 4 is state 3; row 2 (g_2, embedding of token 3) is compared with it.
    assert valid_states(sample, make_parts(), full, NORM).nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7]
    batch, targets = training_batch([sample], [all_valid(sample)], make_parts(), NORM, num_steps=1)
    rows = targets.valid[0].nonzero()[:, 0] + batch.start
    assert rows.tolist() == [2, 3, 4, 5, 6]


def test_a_state_counts_only_where_the_targets_choice_can_be_drafted() -> None:
    sample, parts, vocab = make_sample(num_rows=40, prompt=2), make_parts(), make_vocab()
    best = (sample.final @ parts.head.T).argmax(-1)
    expected = [c for c in range(1, 40) if sample.loss_mask[c + 1] and int(best[c]) in set(vocab.target_ids.tolist())]
    assert 0 < len(expected) < 38, "the sample must have both kinds"
    assert valid_states(sample, parts, vocab, NORM).nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("point", [NORM, CapturePoint("layers.7")])
def test_the_final_norm_is_applied_exactly_once(point: CapturePoint) -> None:
    sample, parts = make_sample(num_rows=6, prompt=1), make_parts()
    _, targets = training_batch([sample], [all_valid(sample)], parts, point, num_steps=1)
    normed = F.rms_norm(sample.final, (HIDDEN,), parts.final_norm, 1e-5)
    expected = sample.final if point == NORM else normed
    torch.testing.assert_close(targets.final[0], expected[1:6])


def dense_loss(drafter: Drafter, parts: TargetParts, vocab: VocabMap, samples: list[TrainingSample]) -> Tensor:
    """The loss by its definition: sample by sample, row by row, every key written out, no batch and no window."""
    sums, numbers = torch.zeros(STEPS), [0] * STEPS
    config, dim = drafter.config, drafter.config.head_dim
    group = config.num_heads // config.num_kv_heads
    for sample in samples:
        rows, valid = sample.num_rows, valid_states(sample, parts, vocab, NORM)
        hidden = drafter.fuse(sample.aux[None])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(STEPS):
            ids = F.pad(sample.input_ids, (0, STEPS))[1 + k : 1 + k + rows]
            x, residual = drafter.attention_input(parts.embedding[ids][None], hidden)
            cos_sin = drafter.rope(torch.arange(rows)[None] + k)
            q = rotate(drafter.midlayer.self_attn.q_proj(x).view(1, rows, -1, dim).transpose(1, 2), cos_sin)[0]
            key, value = drafter.key_value(x, cos_sin)
            keys.append(key[0])
            values.append(value[0])
            attended = torch.zeros(config.num_heads, rows, dim)
            for head in range(config.num_heads):
                for p in range(rows):
                    own = head // group
                    seen = torch.cat([keys[0][own, : p + 1], *[later[own, p : p + 1] for later in keys[1:]]])
                    read = torch.cat([values[0][own, : p + 1], *[later[own, p : p + 1] for later in values[1:]]])
                    weights = (seen @ q[head, p] / math.sqrt(dim)).softmax(0)
                    attended[head, p] = weights @ read
            hidden = drafter.finish(residual, attended[None])
            logits = drafter.logits(hidden)[0].log_softmax(-1)
            for p in range(rows):
                state = p + 1 + k
                if state < rows and valid[state]:
                    target = (parts.head[vocab.target_ids] @ sample.final[state]).softmax(-1)
                    sums[k] = sums[k] - (target * logits[p]).sum()
                    numbers[k] += 1
    return sum((DECAY**k * sums[k] / numbers[k] for k in range(STEPS)), torch.zeros(()))


def test_loss_and_gradients_equal_the_dense_definition() -> None:
    drafter, parts, vocab = make_drafter(), make_parts(), make_vocab()
    samples = [make_sample(9, prompt=3, seed=1), make_sample(14, prompt=7, seed=2), make_sample(6, prompt=1, seed=3)]
    valid = [valid_states(s, parts, vocab, NORM) for s in samples]
    batch, targets = training_batch(samples, valid, parts, NORM, STEPS)
    assert batch.start > 0, "there must be context rows"
    head = parts.head[vocab.target_ids]
    loss, metrics = unroll_loss(
        drafter, parts.embedding, head, batch, targets, num_steps=STEPS, decay=DECAY, with_metrics=True
    )
    expected = dense_loss(drafter, parts, vocab, samples)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, torch.tensor(sum(DECAY**k * m.loss for k, m in enumerate(metrics))))

    names, parameters = zip(*drafter.named_parameters(), strict=True)
    got = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(expected, parameters)
    for name, g, w in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_padding_and_batch_mates_change_nothing() -> None:
    drafter, parts, vocab = make_drafter(), make_parts(), make_vocab()
    short, long = make_sample(8, prompt=3, seed=1), make_sample(30, prompt=17, seed=2)
    head = parts.head[vocab.target_ids]

    def row_weighted(samples: list[TrainingSample]) -> list[float]:
        valid = [valid_states(s, parts, vocab, NORM) for s in samples]
        batch, targets = training_batch(samples, valid, parts, NORM, STEPS)
        _, metrics = unroll_loss(
            drafter, parts.embedding, head, batch, targets, num_steps=STEPS, decay=DECAY, with_metrics=True
        )
        return [m.loss * m.rows for m in metrics]

    together, alone = row_weighted([short, long]), [row_weighted([s]) for s in (short, long)]
    assert together == pytest.approx([a + b for a, b in zip(*alone, strict=True)], rel=1e-5)


def test_metrics_of_a_drafter_that_agrees_with_its_target() -> None:
    """Head and norm are the target's, and the hidden state is the target's own: then p and q are equal."""
    parts, vocab = make_parts(), make_vocab()
    head = parts.head[vocab.target_ids]
    drafter = make_drafter(target_vocab_size=VOCAB)
    sample = make_sample(10, prompt=2)
    with torch.no_grad():
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.midlayer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.fill_(1.0)
        drafter.lm_head.weight.copy_(head)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, :HIDDEN] = torch.eye(HIDDEN)
    ones = replace(parts, final_norm=torch.ones(HIDDEN))
    aux = torch.cat([sample.final.roll(-1, dims=0), torch.zeros(10, 2 * HIDDEN)], dim=-1)  # slot 0: the state to come
    sample = replace(sample, aux=aux)
    valid = [all_valid(sample)]
    batch, targets = training_batch([sample], valid, ones, CapturePoint("layers.7"), num_steps=1)
    _, (metrics,) = unroll_loss(
        drafter, parts.embedding, head, batch, targets, num_steps=1, decay=DECAY, with_metrics=True
    )
    assert metrics.top1 == 1.0
    assert metrics.acceptance == pytest.approx(1.0, abs=1e-5)
