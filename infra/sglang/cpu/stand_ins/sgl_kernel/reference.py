"""The same attention, request by request in float32: for MLA, sliding windows, capped logits and mixed dtypes."""

import torch


def decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    output: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    logit_cap: float,
    sliding_window: int,
) -> None:
    for index, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - sliding_window) if sliding_window > 0 else 0
        slots = req_to_token[request, first:length].long()
        output[index] = attend(query[index : index + 1], k_cache[slots], v_cache[slots], scale, logit_cap, None)[0]


def extend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    scale: float,
    logit_cap: float,
    sliding_window: int,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    mask_start = 0
    for request, total, new, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    ):
        if new == 0:
            continue
        prefix = total - new
        mask = None
        if is_causal:
            query, key = torch.arange(prefix, total)[:, None], torch.arange(total)[None]
            mask = key <= query
            if sliding_window > 0:
                mask = mask & (key > query - sliding_window)
            if tree_mask is not None:
                mask[:, prefix:] = tree_mask.reshape(-1)[mask_start : mask_start + new * new].view(new, new)
                mask_start += new * new
        slots = req_to_token[request, :total].long()
        keys, values = k_buffer[slots], v_buffer[slots]
        if keys.shape[-1] != q.shape[-1]:
            keys, values = _expanded(q, k, v, o, start, new, prefix)
        o[start : start + new] = attend(q[start : start + new], keys, values, scale, logit_cap, mask).to(o.dtype)


def _expanded(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, o: torch.Tensor, start: int, new: int, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA's prefill: the cache holds latents, the expanded keys and values of the new tokens are passed along.

    Those of a cached prefix are not, which is why the launch switches the radix cache and chunked prefill off for MLA.
    """
    if prefix or k is None or v is None:
        raise ValueError(
            "MLA prefill over a cached prefix is not covered by the CPU stand-in for sgl_kernel: start the server with "
            "--disable-radix-cache --chunked-prefill-size -1"
        )
    return k[start : start + new].view(new, -1, q.shape[-1]), v[start : start + new].view(new, -1, o.shape[-1])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, logit_cap: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """q [N, heads, D], k [L, kv_heads, D], v [L, kv_heads, Dv], mask [N, L] -> [N, heads, Dv], in float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * scale  # [heads, N, L]
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)
