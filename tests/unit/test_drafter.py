"""The drafter: unroll against step-by-step decoding, attention against its definition, documents, alignment."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.attention import causal_document_mask, dense_unroll_attention, unroll_attention
from eagle3.drafter.model import Drafter
from eagle3.drafter.unroll import DraftCache, decode_step, unroll
from tests.drafters import VOCAB, make_drafter, make_parts, make_sample

pytestmark = pytest.mark.unit

STEPS = 3
NORMS = [
    NormFlags(),
    NormFlags(norm_before_residual=True),
    NormFlags(norm_before_fc=True),
    NormFlags(fc_norm=True),
    NormFlags(norm_output=True),
]


def unroll_one(drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, start: int = 0) -> Tensor:
    """One unpadded document -> hidden states [STEPS, R, H]."""
    rows = len(aux)
    ids = F.pad(ids, (0, rows + STEPS - len(ids)))
    document, positions = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)[None]
    embeds = F.embedding(ids[None], embedding)
    return torch.cat(list(unroll(drafter, embeds, aux[None], document, positions, start=start, num_steps=STEPS)))


@pytest.mark.parametrize("norm", NORMS, ids=lambda n: ",".join(k for k, v in n.model_dump().items() if v) or "default")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_unroll_equals_decoding_step_by_step_with_a_cache(norm: NormFlags, kv_heads: int) -> None:
    drafter, embedding = make_drafter(norm=norm, num_kv_heads=kv_heads), make_parts().embedding
    sample = make_sample(num_rows=11, prompt=4)
    embeds = F.embedding(sample.input_ids, embedding)[None]
    with torch.no_grad():
        unrolled = unroll_one(drafter, embedding, sample.input_ids, sample.aux)
        fused = drafter.fuse(sample.aux[None])
        cache = DraftCache()
        for p in range(sample.num_rows):
            hidden = decode_step(drafter, cache, embeds[:, p + 1 : p + 2], fused[:, p : p + 1], p)
            torch.testing.assert_close(unrolled[0, p], hidden[0, 0], atol=1e-5, rtol=1e-5)
            branch = cache.copy()
            for k in range(1, STEPS):
                if p + 1 + k > sample.num_rows:  # no token left to read
                    break
                state = drafter.next_hidden(hidden)
                hidden = decode_step(drafter, branch, embeds[:, p + 1 + k : p + 2 + k], state, p + k)
                torch.testing.assert_close(unrolled[k, p], hidden[0, 0], atol=1e-5, rtol=1e-5)


def test_rows_before_the_start_are_context_and_change_nothing_else() -> None:
    drafter, embedding, sample = make_drafter(), make_parts().embedding, make_sample(num_rows=12, prompt=5)
    with torch.no_grad():
        everything = unroll_one(drafter, embedding, sample.input_ids, sample.aux)
        answer = unroll_one(drafter, embedding, sample.input_ids, sample.aux, start=5)
    torch.testing.assert_close(answer, everything[:, 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_later", [0, 1, 2])
def test_the_merged_attention_and_its_gradients_equal_the_dense_definition(num_later: int) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, columns, start, dim = 2, 6, 2, 13, 4, 8
    rows = columns - start

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    q, k0, v0 = (
        random(batch, heads, rows, dim),
        random(batch, kv_heads, columns, dim),
        random(batch, kv_heads, columns, dim),
    )
    later_k = [random(batch, kv_heads, rows, dim) for _ in range(num_later)]
    later_v = [random(batch, kv_heads, rows, dim) for _ in range(num_later)]
    document = torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1], [0] * 13])
    mask = causal_document_mask(document, start)

    merged = unroll_attention(q, k0, v0, later_k, later_v, mask)
    dense = dense_unroll_attention(q, k0, v0, later_k, later_v, mask)
    torch.testing.assert_close(merged, dense, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(merged)
    inputs = [q, k0, v0, *later_k, *later_v]
    got = torch.autograd.grad((merged * weight).sum(), inputs)
    expected = torch.autograd.grad((dense * weight).sum(), inputs)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)


def test_the_mask_lets_a_row_see_earlier_rows_of_its_own_document_only() -> None:
    document = torch.tensor([[-1, 0, 0, 1, 1]])
    expected = [
        [1, 0, 0, 0, 0],  # padding sees padding: no softmax over nothing
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert causal_document_mask(document, 0)[0, 0].int().tolist() == expected
    assert causal_document_mask(document, 3)[0, 0].int().tolist() == expected[3:]


def test_packed_documents_do_not_see_each_other() -> None:
    drafter, embedding = make_drafter(), make_parts().embedding
    one, two = make_sample(num_rows=7, prompt=2, seed=1), make_sample(num_rows=9, prompt=2, seed=2)
    aux_one, aux_two = one.aux.clone().requires_grad_(), two.aux.clone().requires_grad_()
    ids = torch.cat([one.input_ids[:-1], two.input_ids, torch.zeros(STEPS - 1, dtype=torch.int64)])
    document = torch.tensor([[0] * 7 + [1] * 9])
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    packed = unroll(
        drafter,
        F.embedding(ids[None], embedding),
        torch.cat([aux_one, aux_two])[None],
        document,
        positions,
        start=0,
        num_steps=STEPS,
    )
    steps = torch.cat(list(packed))  # [STEPS, 16, H]
    alone = unroll_one(drafter, embedding, two.input_ids, two.aux)
    for k in range(STEPS):  # rows whose tokens all lie inside the document
        torch.testing.assert_close(steps[k, 7 : 16 - k], alone[k, : 9 - k], atol=1e-5, rtol=1e-5)
    into_one, into_two = torch.autograd.grad(steps[:, 7:].square().sum(), (aux_one, aux_two), retain_graph=True)
    assert into_one.abs().max() == 0
    assert into_two.abs().max() > 0


def test_a_row_reads_the_next_token_and_never_the_one_that_it_predicts() -> None:
    """T = 4: row 0 reads (g_a, emb b), row 1 (g_b, emb c), row 2 (g_c, emb d); step 1 is one further."""
    drafter, sample = make_drafter(), make_sample(num_rows=4, prompt=1)
    ids = torch.arange(1, 6)  # a b c d e, all different
    embedding = make_parts().embedding.requires_grad_()
    aux = sample.aux.clone().requires_grad_()
    steps = unroll_one(drafter, embedding, ids, aux)
    for k in range(STEPS):
        for p in range(4 - k):
            into_embedding, into_aux = torch.autograd.grad(
                steps[k, p].square().sum(), (embedding, aux), retain_graph=True
            )
            read = [token for token in range(VOCAB) if into_embedding[token].abs().max() > 0]
            assert read == list(range(2, p + 3 + k)), "tokens 1 ... p+1+k, by their ids"
            states = [row for row in range(4) if into_aux[row].abs().max() > 0]
            assert states == list(range(p + 1)), "target states 0 ... p, at every step"


def test_positions_turn_with_the_row_and_the_step() -> None:
    drafter, embedding, sample = make_drafter(), make_parts().embedding, make_sample(num_rows=6, prompt=2)
    with torch.no_grad():
        embeds = F.embedding(F.pad(sample.input_ids, (0, STEPS)), embedding)[None]
        document = torch.zeros(1, 6, dtype=torch.int64)
        outputs = [
            torch.cat(list(unroll(drafter, embeds, sample.aux[None], document, positions, start=0, num_steps=STEPS)))
            for positions in (torch.arange(6)[None], torch.arange(6)[None] + 100, torch.arange(6)[None] * 2)
        ]
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)  # rotary positions are relative
    assert (outputs[0] - outputs[2]).abs().max() > 1e-2


def test_fc_is_applied_once_and_the_layer_keeps_the_stream_before_the_norm() -> None:
    drafter, embedding, sample = make_drafter(), make_parts().embedding, make_sample(num_rows=5, prompt=2)
    with torch.no_grad():
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.midlayer.mlp.down_proj.weight.zero_()
        steps = unroll_one(drafter, embedding, sample.input_ids, sample.aux)
        fused = drafter.fuse(sample.aux[None])[0]
    for step in steps:  # nothing is added to the residual: every step hands on what fc made
        torch.testing.assert_close(step, fused)
    for earlier, later in pairwise(steps):
        assert torch.equal(earlier, later)
