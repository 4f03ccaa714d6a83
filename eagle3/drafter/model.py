"""The EAGLE-3 Llama drafter: fc, one decoder layer over [embedding, hidden], norm, head over the draft vocabulary.

Parameters carry the names of the checkpoint (`fc.weight`, `midlayer.self_attn.q_proj.weight`, ...), and the arithmetic
follows SGLang 0.5.23's llama_eagle3.py. The token embedding is the target's and frozen: callers pass embeddings in.

Shapes: B batch, T rows, H hidden, K captured slots, Hq and Hkv heads, D head_dim, V_draft draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.functions import rms_norm, rotate, swiglu
from eagle3.drafter.layer_input import EmbeddingSide, LayerInput, wide
from eagle3.drafter.rope import rotary_angles


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # In float32 at least: the residual stream stays float32 under bf16 autocast.
        return rms_norm(wide(x), wide(self.weight), self.eps)


class Attention(nn.Module):
    """Projections of the decoder layer; q, k and v read [embedding, hidden], twice the hidden size."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: DrafterConfig, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Drafter(nn.Module):
    attention: type[nn.Module] = Attention  # what reads [embedding, hidden]; `eagle3/drafter/mla.py` has another

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        fc_width = config.num_slots * config.target_hidden_size
        if config.norm.norm_before_fc:
            self.input_norm = RMSNorm(fc_width, config.rms_norm_eps)  # one norm over all slots
        if config.norm.fc_norm:  # one norm per slot
            norms = [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(config.num_slots)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(fc_width, config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config, self.attention(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, aux: Tensor) -> Tensor:
        """Join the captured slots, once, before the first step: [B, T, K*H] -> float32 [B, T, H]."""
        if self.config.norm.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.norm.fc_norm:
            chunks = aux.chunk(self.config.num_slots, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return wide(self.fc(aux.to(self.fc.weight.dtype)))

    def embedding_side(self, embeds: Tensor) -> EmbeddingSide:
        """The embeddings' half of the layer's input, for every step that reads these columns: embeds [1, C, H]."""
        return EmbeddingSide(embeds, self.midlayer.input_layernorm.weight, self.config.rms_norm_eps)

    def attention_input(self, embeds: Callable[[Tensor], LayerInput], hidden: Tensor) -> tuple[LayerInput, Tensor]:
        """The layer's input and its residual [1, T, H], of `embedding_side(...).step(...)` and hidden [1, T, H]."""
        normed = self.midlayer.hidden_norm(hidden)
        return embeds(normed), normed if self.config.norm.norm_before_residual else hidden

    def query(self, x: LayerInput, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """-> [1, Hq, T, D], turned to its position."""
        return rotate(self._heads(x.through(self.midlayer.self_attn.q_proj)), cos_sin)

    def key_value(self, x: LayerInput, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """-> two of [1, Hkv, T, D]; the keys are turned to their position."""
        k = self._heads(x.through(self.midlayer.self_attn.k_proj))
        return rotate(k, cos_sin), self._heads(x.through(self.midlayer.self_attn.v_proj))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer -> the hidden state **before** `norm`, [B, T, H].

        residual [B, T, H]; attended [B, Hq, T, D].
        """
        merged = attended.transpose(1, 2).flatten(2)  # [B, T, Hq*D]
        hidden = residual + wide(self.midlayer.self_attn.o_proj(merged))
        return hidden + wide(self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden)))

    def next_hidden(self, hidden: Tensor) -> Tensor:
        """What the next step takes as its hidden state: the state before `norm`, after it where `norm_output`."""
        return self.norm(hidden) if self.config.norm.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary: [B, T, H] -> float32 [B, T, V_draft]."""
        return wide(self.lm_head(self.norm(hidden)))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [B, T] -> two of [B, 1, T, D] (neox style: the two halves share the angles)."""
        config = self.config
        angles, factor = rotary_angles(
            positions, config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_positions
        )  # [B, T, D/2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [B, 1, T, D]
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # [B, T, h*D] -> [B, h, T, D]
