"""Bookkeeping of the key/value cache: which slot of the pool holds which token of which request.

`req_to_token` [num_requests, pool_len] maps (request, position) to a slot of the pool.
"""

# ruff: noqa: ARG001 (SGLang passes every argument of the compiled op)

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots: `req_to_token[r, start:end] = ` the next piece of `out_cache_loc`."""
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = max(0, end - start)
        req_to_token[request, start : start + count] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse of `assign_req_to_token_pool_cpu`: pack each request's slots start..end into `out_cache_loc`."""
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = max(0, end - start)
        out_cache_loc[taken : taken + count] = req_to_token[request, start : start + count].to(out_cache_loc.dtype)
        taken += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Copy each request's `topk * num_steps` slots that follow its committed tokens."""
    count = topk * num_steps
    rows = out_cache_loc.view(-1, count)
    for row, request, length in zip(rows, req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        row.copy_(req_to_token[request, length : length + count])


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A table [batch * topk, pool_len]: every branch sees the committed prefix and then its own drafted tokens."""
    table = torch.zeros((req_pool_indices.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for index, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        drafted = req_to_token[request, length : length + topk * num_steps].view(topk, num_steps)
        branches = table[index * topk : (index + 1) * topk]
        branches[:, :length] = req_to_token[request, :length]
        branches[:, length : length + num_steps] = drafted
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request; `accept_lens` counts it."""
    rows = accept_tokens.reshape(-1, accept_stride)
    last = accept_lens.long().unsqueeze(1) - 1
    bonus_tokens.copy_(rows.gather(1, last).squeeze(1))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted tokens (`accept_index` >= 0) to the front."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """row[tgt] = row[src] in every buffer, all reads before the writes.

    SGLang hands over raw addresses of the buffers (`data_ptrs`) and the bytes of a row (`strides`).
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * row_bytes, row_bytes) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * row_bytes, row, row_bytes)
