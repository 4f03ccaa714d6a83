"""The drafter with DeepSeek's latent attention (MLA), and which class a config stands for.

The arithmetic follows SGLang 0.5.23's kimi_k25_eagle3.py with deepseek_v2.py's attention. Queries and keys are products
of two narrow matrices with a norm between them; of each head only the last qk_rope_head_dim values turn with the
position, in interleaved pairs, and that part of the key is shared by all heads. Serving keeps the narrow state
(absorbed form); training writes every head out, which gives the same numbers, and hands the unroll plain heads: queries
and keys of width D = qk_nope_head_dim + qk_rope_head_dim, and values widened to D with zeros, which the fused kernels
want; `finish` cuts them again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.drafter.config import DrafterConfig, MlaDrafterConfig
from eagle3.drafter.layer_input import LayerInput
from eagle3.drafter.model import Drafter, RMSNorm


class MlaAttention(nn.Module):
    """Projections of DeepSeek's attention; both narrow ones read [embedding, hidden], twice the hidden size."""

    def __init__(self, config: MlaDrafterConfig) -> None:
        super().__init__()
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_a_proj = nn.Linear(2 * config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * config.hidden_size, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)


class MlaDrafter(Drafter):
    attention = MlaAttention
    config: MlaDrafterConfig

    def query(self, x: LayerInput, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """-> [1, Hq, T, D]: the turned part last, and YaRN's share of the softmax scale in it."""
        part = self.midlayer.self_attn
        q = self._heads(part.q_b_proj(part.q_a_layernorm(x.through(part.q_a_proj))))
        nope, rope = q.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        q = torch.cat([nope, rotate_pairs(rope, cos_sin)], dim=-1)
        scaling = self.config.rope_scaling
        return q * scaling.softmax_scale() if scaling else q

    def key_value(self, x: LayerInput, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """-> two of [1, Hq, T, D]; of a value the first v_head_dim entries count, the rest are zeros."""
        config, part = self.config, self.midlayer.self_attn
        narrow = x.through(part.kv_a_proj_with_mqa)
        latent, shared = narrow.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        both = part.kv_b_proj(part.kv_a_layernorm(latent)).unflatten(-1, (config.num_heads, -1))
        nope, v = both.transpose(1, 2).split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        turned = rotate_pairs(shared[:, None], cos_sin)  # [1, 1, T, rope]
        k = torch.cat([nope, turned.expand(-1, config.num_heads, -1, -1)], dim=-1)
        return k, F.pad(v, (0, config.head_dim - config.v_head_dim))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """As the Llama drafter; attended [1, Hq, T, D] of which the values' own width goes on."""
        return super().finish(residual, attended[..., : self.config.v_head_dim])


def build_drafter(config: DrafterConfig) -> Drafter:
    """The drafter that a config describes, with torch's first weights (none under `torch.device("meta")`)."""
    return MlaDrafter(config) if isinstance(config, MlaDrafterConfig) else Drafter(config)


def rotate_pairs(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on interleaved pairs, in float32: x [B, h, T, R] with cos, sin [B, 1, T, R] -> like x."""
    cos, sin = (half.chunk(2, dim=-1)[0] for half in cos_sin)  # `rope` gives both halves the same angles
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [B, h, T, R/2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
