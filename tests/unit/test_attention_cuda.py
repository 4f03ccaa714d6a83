"""The path to the CUDA kernels, on meta tensors: that it calls them as they want to be called. It runs on no GPU."""

import pytest
import torch

from eagle3.drafter.attention import Document
from eagle3.drafter.attention_kernels import _cuda_backward, _cuda_forward, _Packed

pytestmark = pytest.mark.unit

DOCUMENTS = [Document(3, 4), Document(0, 2), Document(5, 1)]


@pytest.mark.parametrize("documents", [DOCUMENTS, [Document(0, 4), Document(0, 3)]], ids=["context", "none"])
def test_the_kernels_take_what_they_are_given(documents: list[Document]) -> None:
    rows, context = sum(d.rows for d in documents), sum(d.context for d in documents)

    def random(length: int, heads: int) -> torch.Tensor:
        return torch.empty(length, heads, 64, dtype=torch.bfloat16, device="meta")

    q, k, v, ck, cv = random(rows, 8), *[random(rows, 2)] * 2, *[random(context, 2)] * 2
    out, total = _cuda_forward(q, k, v, ck, cv, documents)
    assert (out.shape, total.shape, total.dtype) == (q.shape, (rows, 8), torch.float32)
    gradients = _cuda_backward(out, q, k, v, ck, cv, out, total, documents)
    assert [g.shape for g in gradients] == [t.shape for t in (q, k, v, ck, cv)]


def test_context_and_rows_are_laid_side_by_side_and_parted_again() -> None:
    packed = _Packed(DOCUMENTS, torch.device("cpu"))
    assert (packed.rows.tolist(), packed.keys.tolist()) == ([0, 4, 6, 7], [0, 7, 9, 15])
    assert (packed.max_rows, packed.max_keys) == (4, 7)
    context, own = torch.arange(8)[:, None], 100 + torch.arange(7)[:, None]
    joined = packed.join(context, own)
    assert joined[:, 0].tolist() == [0, 1, 2, 100, 101, 102, 103, 104, 105, 3, 4, 5, 6, 7, 106]
    parts = packed.part(joined, context)
    assert torch.equal(parts[0], context)
    assert torch.equal(parts[1], own)
