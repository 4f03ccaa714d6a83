"""Stand-in, in plain PyTorch, for the CPU build of SGLang's compiled `sgl_kernel`.

It holds what SGLang 0.5.23 imports from it where `is_cpu()` is true and the processor has no AMX; the meaning of each
function follows its call site (`sglang/kernels/ops/*`, `srt/layers/attention/intel_amx_backend.py`). It is only found
where this folder is on PYTHONPATH: in a server process that was launched for the CPU.

Nothing is registered as a real torch op, so SGLang still sees a processor without AMX and keeps to its native layers.
"""

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0+eagle3.cpu"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

# The attention backend looks its two functions up here.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
