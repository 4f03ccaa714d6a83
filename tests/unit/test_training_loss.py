"""Targets and loss: the alignment of training.md, the masks, the final norm, and equality with a plain dense loss."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.capture import CapturePoint
from eagle3.drafter.attention import Document
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.training import cross_entropy
from eagle3.training.loss import rows_per_step, training_batch, unroll_loss, valid_states
from eagle3.training.samples import NORM, TargetParts, TrainingSample
from tests.drafters import DRAFT_VOCAB, HIDDEN, VOCAB, make_drafter, make_parts, make_sample, make_vocab

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
    assert batch.documents == (Document(context=0, rows=3),)
    assert torch.equal(batch.aux, sample.aux[:3])  # g_a, g_b, g_c; row 3 has no target distribution
    assert batch.positions.tolist() == [0, 1, 2]
    for k in range(STEPS):
        for row in range(3 - k):
            assert batch.ids[row + k] == sample.input_ids[row + 1 + k]
            assert torch.equal(targets.final[row + k], sample.final[row + 1 + k])
    assert targets.places.tolist() == [0, 1, 2]
    # step 0: rows 0, 1, 2 count; step 1: rows 0, 1; step 2: row 0
    assert rows_per_step(targets, STEPS) == [3, 2, 1]


def test_the_loss_mask_is_that_of_the_predicted_token() -> None:
    sample = make_sample(num_rows=8, prompt=4)  # tokens 4 ... 8 are the answer
    full = VocabMap(torch.arange(VOCAB), VOCAB)
    # The state that predicts token 4 is state 3; row 2 (g_2, embedding of token 3) is compared with it.
    assert valid_states(sample, make_parts(), full, NORM).nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7]
    batch, targets = training_batch([sample], [all_valid(sample)], make_parts(), NORM, num_steps=1)
    assert (targets.places + batch.documents[0].context).tolist() == [2, 3, 4, 5, 6]


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
    torch.testing.assert_close(targets.final, expected[1:6])


def dense_loss(
    drafter: Drafter, parts: TargetParts, vocab: VocabMap, samples: list[TrainingSample], masks: list[Tensor],
    num_steps: int,
) -> Tensor:  # fmt: skip
    """The loss by its definition, from the checkpoint's names, in float64: samples padded to one length, every key of
    every step with a dense mask [T, steps * T], [rows, vocabulary] for all. Shares no line with the drafter."""
    weights = {name: p.double() for name, p in drafter.named_parameters()}
    config, size, length = drafter.config, len(samples), max(s.num_rows for s in samples)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / config.rope_theta ** (torch.arange(0, dim, 2) / dim).double()
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def split(x: Tensor, number: int) -> Tensor:
        return x.view(size, length, number, dim).transpose(1, 2).repeat_interleave(heads // number, dim=1)

    def padded(tensors: list[Tensor], extra: int = 0) -> Tensor:
        return torch.stack([F.pad(t, (*(0, 0) * (t.dim() - 1), 0, length + extra - len(t))) for t in tensors])

    ids, final = padded([s.input_ids for s in samples], num_steps + 1), padded([s.final.double() for s in samples])
    valid = padded([m.int() for m in masks]).bool()
    hidden = padded([s.aux.double() for s in samples]) @ weights["fc.weight"].T
    p = (final @ parts.head[vocab.target_ids].double().T).softmax(-1)
    causal, diagonal = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    keys, values, loss = [], [], torch.zeros((), dtype=torch.float64)
    for k in range(num_steps):
        embeds, at = parts.embedding[ids[:, 1 + k : 1 + k + length]].double(), torch.arange(length) + float(k)
        x = torch.cat([norm(embeds, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")], dim=-1)
        q, key, value = (x @ weights[f"midlayer.self_attn.{n}_proj.weight"].T for n in "qkv")
        keys.append(turn(split(key, kv_heads), at))
        values.append(split(value, kv_heads))
        scores = turn(split(q, heads), at) @ torch.cat(keys, dim=2).mT / math.sqrt(dim)
        visible = torch.cat([causal, *[diagonal] * k], dim=1)
        attended = scores.masked_fill(~visible, -math.inf).softmax(-1) @ torch.cat(values, dim=2)
        hidden = hidden + attended.transpose(1, 2).flatten(2) @ weights["midlayer.self_attn.o_proj.weight"].T
        y = norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (y @ weights[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ weights["midlayer.mlp.down_proj.weight"].T
        logits = (norm(hidden, "norm") @ weights["lm_head.weight"].T).log_softmax(-1)
        rows = length - 1 - k  # row r is compared with the state r + 1 + k
        losses = -(p[:, 1 + k :] * logits[:, :rows]).sum(-1)[valid[:, 1 + k :]]
        loss = loss + DECAY**k * losses.sum() / max(1, len(losses))
    return loss


def gaps(sample: TrainingSample) -> Tensor:
    """A conversation: answers with questions between them."""
    return all_valid(sample) & (torch.arange(sample.num_rows) % 7 != 3)


LENGTHS = {"equal, all": [12] * 4, "unequal": [9, 14, 2, 6, 6, 23], "one": [17]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_loss_and_gradients_equal_the_dense_definition(lengths: list[int], num_steps: int, kv_heads: int) -> None:
    """Relative to the float64 reference on the same samples, padded: 1e-5 for the loss and for every gradient."""
    drafter, parts, vocab = make_drafter(num_kv_heads=kv_heads), make_parts(), make_vocab()
    equal = len(set(lengths)) == 1
    samples = [make_sample(n, prompt=1 if equal else max(1, n // 2), seed=i) for i, n in enumerate(lengths)]
    valid = [all_valid(s) if equal else gaps(s) for s in samples]
    batch, targets = training_batch(samples, valid, parts, NORM, num_steps)
    assert equal or batch.context_aux.shape[0] > 0, "there must be context rows"
    head = parts.head[vocab.target_ids]
    loss, metrics = unroll_loss(
        drafter, parts.embedding, head, batch, targets, num_steps=num_steps, decay=DECAY, with_metrics=True
    )
    expected = dense_loss(drafter, parts, vocab, samples, valid, num_steps)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(sum(DECAY**k * m.loss for k, m in enumerate(metrics)), rel=1e-5)

    names, parameters = zip(*drafter.named_parameters(), strict=True)
    got, wanted = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for name, g, w in zip(names, got, wanted, strict=True):
        assert (g.double() - w.double()).norm() <= 1e-5 * w.double().norm(), name


def test_no_tensor_of_the_loss_is_as_large_as_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """And chunks of any size give the same loss and gradients."""
    drafter, parts, vocab = make_drafter(intermediate_size=40), make_parts(), make_vocab()
    samples = [make_sample(n, prompt=3, seed=n) for n in (40, 61, 52)]
    valid = [gaps(s) for s in samples]
    batch, targets = training_batch(samples, valid, parts, NORM, STEPS)
    head = parts.head[vocab.target_ids]
    results = []
    for chunk in (1 << 19, 16 * DRAFT_VOCAB):
        monkeypatch.setattr(cross_entropy, "_CHUNK_VALUES", chunk)
        largest = LargestWith(DRAFT_VOCAB)
        with largest:
            loss, _ = unroll_loss(
                drafter, parts.embedding, head, batch, targets, num_steps=STEPS, decay=DECAY, with_metrics=True
            )
            results.append([loss, *torch.autograd.grad(loss, list(drafter.parameters()))])
    assert largest.rows == HIDDEN, "chunks of 16 rows; the head itself, turned over, has H"
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


class LargestWith(TorchDispatchMode):
    """The most rows of a tensor [rows, columns] that any operator makes."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (self.columns,):
            self.rows = max(self.rows, result.numel() // self.columns)
        return result


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
