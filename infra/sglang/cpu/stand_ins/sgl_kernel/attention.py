"""Attention over the paged key/value cache, in plain PyTorch.

Two ways to the same result: a batched one for what a Llama needs (equal key and value widths, no window, no cap),
and `reference`, a loop over requests, for everything else.

Shapes: query [tokens, heads, D], k_cache [slots, kv_heads, D], v_cache [slots, kv_heads, Dv]; `req_to_token`
[requests, pool_len] names the slots of a request's tokens; `seq_lens` [B] counts the tokens that a request's last query
may see.
"""

# ruff: noqa: ARG001 (SGLang passes every argument of the compiled op)

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import reference

# Up to this many new tokens a request (verification, drafting) one padded batch is faster than a loop over requests.
MAX_PADDED_QUERIES = 16


def decode_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window: int = 0,
    encoder_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """One new token a request: store its key and value at `loc`, attend, write `output` [B, heads, Dv]."""
    _refuse(is_cross_attn, encoder_lens, sinks)
    if key is not None:
        k_cache[loc] = key.view(loc.numel(), *k_cache.shape[1:]).to(k_cache.dtype)
        if value is not None and v_cache.data_ptr() != k_cache.data_ptr():  # MLA: the value is a view of the key
            v_cache[loc] = value.view(loc.numel(), *v_cache.shape[1:]).to(v_cache.dtype)
    if not _is_plain(query, k_cache, v_cache, sliding_window, logit_cap):
        reference.decode(
            query,
            k_cache,
            v_cache,
            output,
            req_to_token,
            req_pool_indices,
            seq_lens,
            sm_scale,
            logit_cap,
            sliding_window,
        )
        return
    B, heads, D = query.shape
    kv_heads = k_cache.shape[1]
    slots, seen = _slots(req_to_token, req_pool_indices, seq_lens)
    # The query heads that share a key head stand in the place of query positions: no copy of keys for each of them.
    attended = F.scaled_dot_product_attention(
        query.view(B, kv_heads, heads // kv_heads, D),
        _gather(k_cache, slots),
        _gather(v_cache, slots),
        attn_mask=seen[:, None, None],
        scale=sm_scale,
    )
    output.copy_(attended.reshape(output.shape))


def extend_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window: int = 0,
    encoder_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Several new tokens a request (prefill, verification); their keys and values are in the cache already.

    `extend_seq_lens` [B] new tokens of each request, packed in q and o from `extend_start_loc`; `tree_mask` is flat,
    [B, n, n] with equal n: which of the new tokens sees which.
    """
    _refuse(is_cross_attn, encoder_lens, sinks)
    lengths = extend_seq_lens.tolist()
    padded = max(lengths) <= MAX_PADDED_QUERIES and (tree_mask is None or len(set(lengths)) == 1)
    if (
        not is_causal
        or not _is_plain(q, k_buffer, v_buffer, sliding_window, logit_cap)
        or not (padded or tree_mask is None)
    ):
        reference.extend(
            q,
            k,
            v,
            o,
            k_buffer,
            v_buffer,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_seq_lens,
            extend_start_loc,
            sm_scale,
            logit_cap,
            sliding_window,
            tree_mask,
            is_causal,
        )
    elif padded:
        _extend_padded(
            q,
            o,
            k_buffer,
            v_buffer,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_seq_lens,
            extend_start_loc,
            sm_scale,
            tree_mask,
        )
    else:
        _extend_each(
            q,
            o,
            k_buffer,
            v_buffer,
            req_to_token,
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            lengths,
            extend_start_loc.tolist(),
            sm_scale,
        )


def _extend_each(
    q: torch.Tensor,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: Sequence[int],
    seq_lens: Sequence[int],
    new_lens: Sequence[int],
    starts: Sequence[int],
    scale: float,
) -> None:
    """Long extensions: one fused causal attention for each request."""
    for request, total, new, start in zip(requests, seq_lens, new_lens, starts, strict=True):
        if new == 0:
            continue
        slots = req_to_token[request : request + 1, :total].long()
        mask = None if new == total else torch.ones(new, total, dtype=torch.bool).tril(total - new)
        attended = F.scaled_dot_product_attention(
            q[start : start + new].transpose(0, 1)[None],  # [1, heads, new, D]
            _gather(k_buffer, slots),
            _gather(v_buffer, slots),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        o[start : start + new] = attended[0].transpose(0, 1)


def _extend_padded(
    q: torch.Tensor,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
) -> None:
    """Short extensions: all requests in one attention, padded to the longest."""
    heads, D = q.shape[1:]
    kv_heads = k_buffer.shape[1]
    B, group = len(seq_lens), heads // kv_heads
    slots, seen = _slots(req_to_token, req_pool_indices, seq_lens)
    new = extend_seq_lens.long()[:, None]  # [B, 1]
    prefix = seq_lens.long()[:, None] - new  # [B, 1]
    N, L = int(new.max()), slots.shape[1]
    query = torch.arange(N)[None]  # [1, N]
    is_query = query < new  # [B, N]
    # A padded query repeats a row of its own request; an absent request's points anywhere, its result is dropped.
    rows = (extend_start_loc.long()[:, None] + torch.minimum(query, (new - 1).clamp_min(0))).clamp_max(q.shape[0] - 1)
    position = torch.arange(L)[None]  # [1, L]
    if tree_mask is None:
        mask = position[:, None] <= (prefix + query)[:, :, None]  # [B, N, L]
    else:
        among_new = position - prefix  # [B, L]
        within = (among_new >= 0) & (among_new < N)
        column = among_new.clamp(0, N - 1)[:, None].expand(B, N, L)
        tree = tree_mask.reshape(-1)[: B * N * N].view(B, N, N).bool().gather(2, column)
        mask = torch.where(within[:, None], tree, (position < prefix)[:, None])
    mask = mask & seen[:, None]
    # Heads of one group share keys: they go where the queries are, [B, kv_heads, N * group, D].
    grouped = q[rows].view(B, N, kv_heads, group, D).permute(0, 2, 1, 3, 4).reshape(B, kv_heads, N * group, D)
    attended = F.scaled_dot_product_attention(
        grouped,
        _gather(k_buffer, slots),
        _gather(v_buffer, slots),
        attn_mask=mask.repeat_interleave(group, 1)[:, None],
        scale=scale,
    )
    attended = attended.view(B, kv_heads, N, group, D).permute(0, 2, 1, 3, 4).reshape(B, N, heads, D)
    o[rows[is_query]] = attended[is_query].to(o.dtype)


def _slots(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [B, longest] of each request's tokens, and which of them exist (the others point at slot 0)."""
    longest = int(seq_lens.max())
    exists = torch.arange(longest)[None] < seq_lens[:, None]
    slots = req_to_token[req_pool_indices.long(), :longest].long().masked_fill(~exists, 0)
    return slots, exists


def _gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, D] -> [B, kv_heads, L, D]."""
    B, L = slots.shape
    rows = buffer.flatten(1).index_select(0, slots.reshape(-1))  # two dimensions: index_select's fast path
    return rows.view(B, L, *buffer.shape[1:]).transpose(1, 2)


def _is_plain(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sliding_window: int, logit_cap: float
) -> bool:
    same_width = q.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1]
    same_dtype = q.dtype == k_cache.dtype == v_cache.dtype
    return same_width and same_dtype and sliding_window <= 0 and not logit_cap > 0


def _refuse(is_cross_attn: bool, encoder_lens: Any, sinks: Any) -> None:
    if is_cross_attn or encoder_lens is not None or sinks is not None:
        raise ValueError("cross attention and attention sinks are not covered by the CPU stand-in for sgl_kernel")
