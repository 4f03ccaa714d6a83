"""The stand-ins that let SGLang run on a CPU: each against plain torch, or against a hand-made example."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from infra.sglang.cpu import plugin
from infra.sglang.launch import STAND_INS

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, D = 4, 2, 8
SCALE = D**-0.5


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    sys.path.insert(0, str(STAND_INS))
    yield importlib.import_module("sgl_kernel")
    sys.path.remove(str(STAND_INS))
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


@dataclass
class Cache:
    """A pool in which the tokens of each request lie scattered."""

    keys: torch.Tensor
    values: torch.Tensor
    req_to_token: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor

    def of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.req_to_token[self.requests[request], : self.lengths[request]].long()
        return self.keys[slots], self.values[slots]


def make_cache(lengths: list[int], kv_heads: int = KV_HEADS) -> Cache:
    generator = torch.Generator().manual_seed(0)
    pool = 1 + sum(lengths)
    slots = 1 + torch.randperm(sum(lengths), generator=generator)
    req_to_token = torch.zeros(len(lengths) + 2, 64, dtype=torch.int32)
    requests = torch.arange(len(lengths)).flip(0) + 1  # not in the order of the pool's rows
    for request, part in zip(requests, slots.split(lengths), strict=True):
        req_to_token[request, : len(part)] = part.to(torch.int32)
    return Cache(
        torch.randn(pool, kv_heads, D, generator=generator),
        torch.randn(pool, kv_heads, D, generator=generator),
        req_to_token,
        requests,
        torch.tensor(lengths),
    )


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, cap: float = 0.0
) -> torch.Tensor:
    """[n, heads, D] over [L, kv_heads, D], written out head by head."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[-1])
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, shared].T * SCALE
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out[:, head] = scores.softmax(-1) @ v[:, shared]
    return out


def decode(kernel: ModuleType, cache: Cache, q: torch.Tensor, cap: float = 0.0, window: int = 0) -> torch.Tensor:
    out = torch.empty_like(q)
    kernel.decode_attention_cpu(
        q, cache.keys, cache.values, 1.0, 1.0, out, None, None, torch.empty(0, dtype=torch.long), torch.empty(0),
        cache.req_to_token, cache.requests, cache.lengths, SCALE, cap, False, window,
    )  # fmt: skip
    return out


def extend(
    kernel: ModuleType,
    cache: Cache,
    q: torch.Tensor,
    new: list[int],
    tree_mask: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    starts = torch.tensor([0, *new[:-1]]).cumsum(0)
    kernel.extend_attention_cpu(
        q, None, None, out, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, cache.requests, cache.lengths,
        torch.tensor(new), starts, max(new), SCALE, 0.0, False, window, None, None, tree_mask, True,
    )  # fmt: skip
    return out


def causal(new: int, total: int, window: int = 0) -> torch.Tensor:
    query, key = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
    return (key <= query) & (key > query - (window or total))


def expected_extend(cache: Cache, q: torch.Tensor, new: list[int], window: int = 0) -> torch.Tensor:
    parts = q.split(new)
    return torch.cat(
        [
            plain_attention(part, *cache.of(i), causal(len(part), int(cache.lengths[i]), window))
            for i, part in enumerate(parts)
        ]
    )


def test_decoding_requests_of_unlike_lengths_equals_plain_attention(kernel: ModuleType) -> None:
    cache = make_cache([7, 1, 30])
    q = torch.randn(3, HEADS, D)
    expected = torch.cat([plain_attention(q[i : i + 1], *cache.of(i)) for i in range(3)])
    torch.testing.assert_close(decode(kernel, cache, q), expected)


def test_decoding_stores_the_new_key_and_value_first(kernel: ModuleType) -> None:
    cache = make_cache([5])
    key, value, q = torch.randn(1, KV_HEADS * D), torch.randn(1, KV_HEADS * D), torch.randn(1, HEADS, D)
    slot = cache.req_to_token[cache.requests, 4].long()
    out = torch.empty_like(q)
    kernel.decode_attention_cpu(
        q, cache.keys, cache.values, 1.0, 1.0, out, key, value, slot, torch.empty(0), cache.req_to_token,
        cache.requests, cache.lengths, SCALE, 0.0,
    )  # fmt: skip
    torch.testing.assert_close(cache.keys[slot].view(1, -1), key)
    torch.testing.assert_close(out, plain_attention(q, *cache.of(0)))


@pytest.mark.parametrize("new", [[7, 3, 12], [7, 3, 30]], ids=["padded batch", "one by one"])
def test_extending_with_and_without_a_cached_prefix_equals_plain_attention(kernel: ModuleType, new: list[int]) -> None:
    cache = make_cache([7, 10, 30])
    q = torch.randn(sum(new), HEADS, D)
    torch.testing.assert_close(extend(kernel, cache, q, new), expected_extend(cache, q, new))


def test_a_draft_tree_sees_its_prefix_and_its_ancestors_only(kernel: ModuleType) -> None:
    cache = make_cache([9, 5])
    n = 3
    trees = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]], dtype=torch.bool)
    q = torch.randn(2 * n, HEADS, D)
    masks = [
        torch.cat([torch.ones(n, int(length) - n).bool(), tree], 1)
        for length, tree in zip(cache.lengths, trees, strict=True)
    ]
    expected = torch.cat([plain_attention(q[i * n : (i + 1) * n], *cache.of(i), masks[i]) for i in range(2)])
    torch.testing.assert_close(extend(kernel, cache, q, [n, n], trees.flatten()), expected)


def test_the_usual_attention_never_takes_the_loop(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the slow loop was taken")

    monkeypatch.setattr(kernel.attention.reference, "decode", refuse)
    monkeypatch.setattr(kernel.attention.reference, "extend", refuse)
    cache = make_cache([7, 30])
    decode(kernel, cache, torch.randn(2, HEADS, D))
    extend(kernel, cache, torch.randn(8, HEADS, D), [4, 4])
    extend(kernel, cache, torch.randn(37, HEADS, D), [7, 30])


def test_a_sliding_window_and_a_logit_cap_are_kept(kernel: ModuleType) -> None:
    cache = make_cache([7, 30])
    q = torch.randn(2, HEADS, D)
    windowed = [plain_attention(q[i : i + 1], *(x[-4:] for x in cache.of(i))) for i in range(2)]
    torch.testing.assert_close(decode(kernel, cache, q, window=4), torch.cat(windowed))
    capped = [plain_attention(q[i : i + 1], *cache.of(i), cap=0.5) for i in range(2)]
    torch.testing.assert_close(decode(kernel, cache, q, cap=0.5), torch.cat(capped))
    q = torch.randn(37, HEADS, D)
    torch.testing.assert_close(extend(kernel, cache, q, [7, 30], window=4), expected_extend(cache, q, [7, 30], 4))


def latent_prefill(kernel: ModuleType, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA: the cache holds one latent of another width a token; keys and values of the new tokens are passed along."""
    cache = make_cache([6], kv_heads=1)
    cache.keys, cache.values = torch.randn(7, 1, 3 * D), torch.randn(7, 1, 2 * D)
    new = 6 - prefix
    q, k, v = torch.randn(new, HEADS, D), torch.randn(new, HEADS, D), torch.randn(new, HEADS, D)
    out = torch.zeros_like(q)
    kernel.extend_attention_cpu(
        q, k, v, out, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, cache.requests, cache.lengths,
        torch.tensor([new]), torch.tensor([0]), new, SCALE, 0.0,
    )  # fmt: skip
    return out, plain_attention(q, k, v, causal(new, new))


def test_latent_attention_prefills_without_a_prefix_and_refuses_one(kernel: ModuleType) -> None:
    torch.testing.assert_close(*latent_prefill(kernel, prefix=0))
    with pytest.raises(ValueError, match="--disable-radix-cache --chunked-prefill-size -1"):
        latent_prefill(kernel, prefix=2)


@dataclass
class Tree:
    links: torch.Tensor  # [3, D]: index, first child, next sibling
    mask: torch.Tensor
    positions: torch.Tensor


def build(kernel: ModuleType, parents: list[int], selected: list[int], prefix: int = 10) -> Tree:
    n = len(selected) + 1
    links = torch.full((3, 1, n), -1)
    mask, positions = torch.ones(n * n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
    kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([parents]), torch.tensor([selected]), torch.tensor([prefix]), mask, positions, *links, 2, 2, n, 1
    )
    return Tree(links[:, 0], mask.view(n, n), positions)


def test_a_tree_links_children_and_siblings_and_masks_ancestors(kernel: ModuleType) -> None:
    # Candidates 0 and 1 hang on the root, 2 and 3 (row 1) on candidate 0, 4 and 5 (row 2) on candidate 1.
    tree = build(kernel, parents=[-1, 0, 1], selected=[0, 1, 2, 4])
    assert tree.links[1].tolist() == [1, 3, 4, -1, -1]
    assert tree.links[2].tolist() == [-1, 2, -1, -1, -1]
    assert tree.positions.tolist() == [10, 11, 11, 12, 12]
    assert tree.mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_a_candidate_whose_parent_was_not_selected_is_left_out(kernel: ModuleType) -> None:
    tree = build(kernel, parents=[-1, 0, 1], selected=[0, 4])
    assert tree.links[1].tolist() == [1, -1, -1]
    assert tree.links[2].tolist() == [-1, -1, -1]


def test_verification_follows_the_target_through_a_second_child_and_adds_the_bonus_token(kernel: ModuleType) -> None:
    tree = build(kernel, parents=[-1, 0, 1], selected=[0, 1, 2, 4])
    drafted = torch.tensor([[100, 101, 102, 103, 104]])
    greedy = torch.tensor([[102, 7, 104, 7, 55]])  # root -> node 2 -> node 4 -> bonus 55
    predicts, accepted, count = torch.zeros(5).long(), torch.full((1, 4), -1), torch.zeros(1).long()
    kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=drafted,
        retrive_index=tree.links[0:1],
        retrive_next_token=tree.links[1:2],
        retrive_next_sibling=tree.links[2:3],
        target_predict=greedy,
    )
    assert accepted.tolist() == [[0, 2, 4, -1]]
    assert count.tolist() == [2]
    assert predicts[[0, 2, 4]].tolist() == [102, 104, 55]


def test_cache_rows_move_as_if_all_were_read_before_any_is_written(kernel: ModuleType) -> None:
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(18.0).view(6, 3)]
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        buffer[[1, 2]] = buffer[[2, 4]]
    kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        torch.tensor([1, 2]),
        torch.tensor([2, 4]),
    )
    for buffer, wanted in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, wanted)


def test_slots_are_assigned_and_read_back(kernel: ModuleType) -> None:
    table, start, end = torch.zeros(3, 8, dtype=torch.int32), torch.tensor([2, 0]), torch.tensor([4, 3])
    requests, slots = torch.tensor([2, 0]), torch.tensor([11, 12, 21, 22, 23])
    kernel.assign_req_to_token_pool_cpu(requests, table, start, end, slots, 8)
    assert table.tolist() == [[21, 22, 23, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 11, 12, 0, 0, 0, 0]]
    packed = torch.zeros(5, dtype=torch.long)
    kernel.assign_extend_cache_locs_cpu(requests, table, start, end, packed, 8)
    assert packed.tolist() == slots.tolist()


def test_every_draft_branch_sees_the_prefix_and_its_own_tokens(kernel: ModuleType) -> None:
    table = torch.arange(8, dtype=torch.int32)[None] + 30
    draft = torch.zeros(4, dtype=torch.long)
    kernel.assign_draft_cache_locs_contiguous_cpu(torch.tensor([0]), table, torch.tensor([3]), draft, 8, 2, 2)
    assert draft.tolist() == [33, 34, 35, 36]
    branches = kernel.build_draft_decode_metadata_cpu(table, torch.tensor([0]), torch.tensor([3]), 2, 2, 8)
    assert branches[:, :5].tolist() == [[30, 31, 32, 33, 34], [30, 31, 32, 35, 36]]


def test_accepted_tokens_are_packed_and_the_bonus_token_found(kernel: ModuleType) -> None:
    packed = torch.zeros(3, dtype=torch.long)
    kernel.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([5, 6, 7, 8]), packed)
    assert packed.tolist() == [5, 7, 8]
    bonus = torch.zeros(2, dtype=torch.long)
    kernel.fill_bonus_tokens_cpu(torch.tensor([1, 2, 0, 4, 0, 0]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [2, 4]


IMPORTS = """
import triton, triton.language as tl
from torchvision.transforms import InterpolationMode
@triton.jit
def kernel(x, N: tl.constexpr): return x
@triton.jit(do_not_specialize=["n"])
def other(n: tl.dtype | None): return n
print(kernel(3, 1), other(4), InterpolationMode.BICUBIC)
"""


def run_python(code: str, *path: Path) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_absent_packages_import_and_their_kernels_can_be_defined() -> None:
    assert run_python(IMPORTS, STAND_INS) == "3 4 InterpolationMode.BICUBIC"


def test_a_package_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("REAL = 1\n")
    assert run_python("import triton; print(triton.REAL)", STAND_INS, tmp_path) == "1"


def test_without_our_launch_the_plugin_leaves_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("the CPU path was switched on")

    monkeypatch.setattr(plugin, "_route_torch_native", refuse)
    monkeypatch.delenv(plugin.CPU_VARIABLE, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.CPU_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # this machine has no GPU to ask
    plugin.register()
