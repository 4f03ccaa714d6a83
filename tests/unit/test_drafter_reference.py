"""The drafter against SGLang's llama_eagle3.py, written out by hand from the checkpoint's tensors.

Rotary positions are transformers' own. What the drafter shares with its own decoding (the order of embedding and
hidden state, residuals, where norms stand) only an independent computation can check.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3.contract import NormFlags
from eagle3.drafter.checkpoint import checkpoint_tensors
from eagle3.drafter.forms import engine_config
from eagle3.drafter.packing import Window, pack
from eagle3.drafter.unroll import unroll
from tests.drafters import ENGINE_IDS, HIDDEN, SLOTS, make_drafter, make_parts, make_sample, make_vocab

pytestmark = pytest.mark.unit


def sglang_forward(
    tensors: dict[str, Tensor], config: LlamaConfig, embeds: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """LlamaForCausalLMEagle3 on one prompt: embeds [T, H], states [T, K*H] -> logits [T, V_draft], handed-on state."""
    eps, heads, kv_heads, dim = 1e-5, config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    hidden = states
    if config.eagle_config["norm_before_fc"]:
        hidden = norm(hidden, "input_norm")
    if config.fc_norm:
        hidden = torch.cat([norm(c, f"fc_norm.{i}") for i, c in enumerate(hidden.chunk(SLOTS, dim=-1))], dim=-1)
    hidden = linear(hidden, "fc")

    residual = hidden
    normed = norm(hidden, "midlayer.hidden_norm")
    x = torch.cat([norm(embeds, "midlayer.input_layernorm"), normed], dim=-1)
    rows = len(x)
    q, k, v = (
        linear(x, f"midlayer.self_attn.{name}_proj").view(rows, n, dim).transpose(0, 1)[None]
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(rows)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    hidden = linear(attended[0].transpose(0, 1).reshape(rows, heads * dim), "midlayer.self_attn.o_proj")

    hidden = residual = hidden + residual
    hidden = norm(hidden, "midlayer.post_attention_layernorm")
    gate, up = linear(hidden, "midlayer.mlp.gate_proj"), linear(hidden, "midlayer.mlp.up_proj")
    residual = residual + linear(F.silu(gate) * up, "midlayer.mlp.down_proj")
    to_logits = norm(residual, "norm")
    return linear(to_logits, "lm_head"), to_logits if config.norm_output else residual


@pytest.mark.parametrize(
    "flags",
    [NormFlags(), NormFlags(norm_before_fc=True), NormFlags(fc_norm=True), NormFlags(norm_output=True)],
    ids=["default", "norm_before_fc", "fc_norm", "norm_output"],
)
def test_the_drafter_computes_what_sglang_computes(flags: NormFlags) -> None:
    drafter, parts, sample = make_drafter(norm=flags, rope_theta=500.0), make_parts(), make_sample(9, prompt=3)
    config = LlamaConfig.from_dict(engine_config(drafter.config, ENGINE_IDS, contract_sha256="f" * 64, dtype="float32"))
    tensors = checkpoint_tensors(drafter, make_vocab())
    embeds = parts.embedding[sample.input_ids]
    logits, handed_on = sglang_forward(tensors, config, embeds[1:], sample.aux)
    with torch.no_grad():
        batch = pack([Window(sample.input_ids, sample.aux, 0, 9)], 1)
        (hidden,) = unroll(drafter, parts.embedding, batch, 1)
        torch.testing.assert_close(drafter.logits(hidden)[0], logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drafter.next_hidden(hidden)[0], handed_on, atol=1e-4, rtol=1e-4)
    assert hidden.shape == (1, 9, HIDDEN)
