"""The drafter: unroll against step-by-step decoding, attention against its definition, documents, alignment."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.attention import Document, dense_unroll_attention, unroll_attention
from eagle3.drafter.model import Drafter
from eagle3.drafter.packing import Window, pack
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
    """One document -> hidden states [STEPS, R, H]."""
    ids = F.pad(ids, (0, STEPS))
    batch = pack([Window(ids, aux, start, len(aux))], STEPS)
    batch.ids[batch.num_rows :] = ids[len(aux) + 1 : len(aux) + 1 + STEPS]
    return torch.cat(list(unroll(drafter, embedding, batch, STEPS)))


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


DOCUMENTS = {
    "one": [Document(0, 9)],
    "equal": [Document(0, 5)] * 3,
    "unequal": [Document(0, 4), Document(0, 1), Document(0, 7), Document(0, 7)],
    "with context": [Document(3, 4), Document(0, 2), Document(5, 1), Document(2, 6), Document(2, 6)],
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("num_later", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_merged_attention_and_its_gradients_equal_the_dense_definition(
    documents: list[Document], kv_heads: int, num_later: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, context, dim = sum(d.rows for d in documents), sum(d.context for d in documents), 8

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(1, length, heads, dim, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()

    shapes = [(6, rows), *[(kv_heads, rows)] * 2, *[(kv_heads, context)] * 2, *[(kv_heads, rows)] * 2 * num_later]
    inputs = [random(*shape) for shape in shapes]
    weight = torch.randn(1, 6, rows, dim, dtype=torch.float64)

    def results(attention: object, exact: bool) -> list[Tensor]:
        q, k0, v0, ck, cv, *later = [x.double() for x in inputs] if exact else inputs
        out = attention(q, k0, v0, ck, cv, later[:num_later], later[num_later:], documents)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out, inputs, weight.to(out.dtype))]

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for got, wanted in zip(results(unroll_attention, False), results(dense_unroll_attention, True), strict=True):
        assert got.dtype == dtype
        difference = (got.double() - wanted.double()).norm()
        assert difference <= tolerance * wanted.double().norm()


def test_packed_documents_do_not_see_each_other() -> None:
    drafter, embedding = make_drafter(), make_parts().embedding
    one, two = make_sample(num_rows=7, prompt=2, seed=1), make_sample(num_rows=9, prompt=2, seed=2)
    aux_one, aux_two = one.aux.clone().requires_grad_(), two.aux.clone().requires_grad_()
    for start in (0, 3):
        batch = pack([Window(one.input_ids, aux_one, 2, 7), Window(two.input_ids, aux_two, start, 9)], STEPS)
        steps = torch.cat(list(unroll(drafter, embedding, batch, STEPS)))  # [STEPS, N, H]
        alone = unroll_one(drafter, embedding, two.input_ids, two.aux, start=start)
        for k in range(STEPS):  # rows whose tokens all lie inside the document
            torch.testing.assert_close(steps[k, 5 : 14 - k - start], alone[k, : 9 - k - start], atol=1e-5, rtol=1e-5)
        into_one, into_two = torch.autograd.grad(steps[:, 5:].square().sum(), (aux_one, aux_two))
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
    batch = pack([Window(sample.input_ids, sample.aux, 0, 6)], STEPS)
    with torch.no_grad():
        outputs = [
            torch.cat(list(unroll(drafter, embedding, replace(batch, positions=positions), STEPS)))
            for positions in (torch.arange(6), torch.arange(6) + 100, torch.arange(6) * 2)
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
