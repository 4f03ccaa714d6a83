"""The drafter with latent attention against transformers' own DeepSeek attention, and what its config may say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3.contract import NormFlags
from eagle3.drafter.config import DrafterConfig, DrafterConfigError, MlaDrafterConfig
from eagle3.drafter.mla import MlaDrafter, build_drafter
from eagle3.drafter.packing import Window, pack
from eagle3.drafter.rope import RopeError, RopeScaling
from eagle3.drafter.tensors import checkpoint_tensors
from eagle3.drafter.unroll import DraftCache, decode_step, unroll
from eagle3.target.config import TargetConfig, read_config
from eagle3.training.initialise import initialise
from eagle3.training.samples import TargetParts, TrainingSample
from tests.drafters import HIDDEN, SLOTS, make_config, make_drafter, make_parts, make_sample, make_vocab
from tests.mla_drafters import YARN, make_mla_config, make_mla_drafter
from tests.targets import deepseek_config

pytestmark = pytest.mark.unit

ROWS = 9


def transformers_forward(
    tensors: dict[str, Tensor], config: MlaDrafterConfig, embeds: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Eagle3DeepseekV2ForCausalLM on one prompt, its attention computed by transformers' DeepseekV3Attention.

    embeds [T, H], states [T, K*H] -> logits [T, V_draft], handed-on state [T, H].
    """
    theirs = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=YARN | {"rope_theta": config.rope_theta} if config.rope_scaling else None,
        attn_implementation="eager",
    )
    if config.rope_scaling is None:
        theirs.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
    attention = DeepseekV3Attention(theirs, layer_idx=0)
    attention.q_a_proj = torch.nn.Linear(2 * HIDDEN, config.q_lora_rank, bias=False)
    attention.kv_a_proj_with_mqa = torch.nn.Linear(
        2 * HIDDEN, config.kv_lora_rank + config.qk_rope_head_dim, bias=False
    )
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = config.rms_norm_eps
    prefix = "midlayer.self_attn."
    attention.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    if config.norm.fc_norm:
        states = torch.cat([norm(c, f"fc_norm.{i}") for i, c in enumerate(states.chunk(SLOTS, dim=-1))], dim=-1)
    hidden = linear(states, "fc")
    normed = norm(hidden, "midlayer.hidden_norm")
    x = torch.cat([norm(embeds, "midlayer.input_layernorm"), normed], dim=-1)
    rows = len(x)
    positions = DeepseekV3RotaryEmbedding(theirs)(x, torch.arange(rows)[None])
    mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    attended, _ = attention(x[None], position_embeddings=positions, attention_mask=mask)
    hidden = (normed if config.norm.norm_before_residual else hidden) + attended[0]
    mlp = norm(hidden, "midlayer.post_attention_layernorm")
    gate, up = linear(mlp, "midlayer.mlp.gate_proj"), linear(mlp, "midlayer.mlp.up_proj")
    hidden = hidden + linear(F.silu(gate) * up, "midlayer.mlp.down_proj")
    to_logits = norm(hidden, "norm")
    return linear(to_logits, "lm_head"), to_logits if config.norm.norm_output else hidden


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (NormFlags(), {}),
        (NormFlags(fc_norm=True, norm_output=True), {}),
        (NormFlags(norm_before_residual=True), {"rope_scaling": None}),
    ],
    ids=["yarn", "eagle-3.1", "plain-rope"],
)
def test_the_latent_drafter_computes_what_transformers_attention_computes(
    flags: NormFlags, shape: dict[str, Any]
) -> None:
    drafter, parts, sample = make_mla_drafter(norm=flags, **shape), make_parts(), make_sample(ROWS, prompt=3)
    embeds = parts.embedding[sample.input_ids]
    with torch.no_grad():
        logits, handed_on = transformers_forward(
            checkpoint_tensors(drafter, make_vocab()), drafter.config, embeds[1:], sample.aux
        )
        hidden = unroll_once(drafter, parts.embedding, sample)
        torch.testing.assert_close(drafter.logits(hidden)[0], logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drafter.next_hidden(hidden)[0], handed_on, atol=1e-4, rtol=1e-4)


def test_the_scale_of_yarn_is_in_the_scores() -> None:
    """Left out, the drafter would still run: its attention would only be flatter than the served one."""
    scaling = RopeScaling.of({"rope_scaling": YARN}, where="")
    assert scaling is not None
    assert scaling.softmax_scale() == pytest.approx((0.1 * torch.log(torch.tensor(8.0)).item() + 1) ** 2)
    drafter, plain = make_mla_drafter(), make_mla_drafter()
    object.__setattr__(plain.config, "rope_scaling", scaling.model_copy(update={"mscale_all_dim": None}))
    embeds, hidden = torch.randn(1, 4, HIDDEN), torch.randn(1, 4, HIDDEN)
    x, _ = drafter.attention_input(drafter.embedding_side(embeds).step(0, 4), hidden)
    cos_sin = drafter.rope(torch.arange(4)[None])
    with torch.no_grad():
        torch.testing.assert_close(drafter.query(x, cos_sin), plain.query(x, cos_sin) * scaling.softmax_scale())


def test_one_token_at_a_time_is_the_unroll() -> None:
    drafter, parts, sample = make_mla_drafter(), make_parts(), make_sample(ROWS, prompt=3)
    embeds, cache = parts.embedding[sample.input_ids], DraftCache()
    with torch.no_grad():
        whole = unroll_once(drafter, parts.embedding, sample)
        fused = drafter.fuse(sample.aux[None])
        rows = [
            decode_step(drafter, cache, embeds[None, row + 1 : row + 2], fused[:, row : row + 1], row)
            for row in range(ROWS)
        ]
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_every_parameter_learns() -> None:
    drafter, parts, sample = make_mla_drafter(norm=NormFlags(fc_norm=True)), make_parts(), make_sample(ROWS, prompt=3)
    hidden = unroll_once(drafter, parts.embedding, sample)
    drafter.logits(hidden).logsumexp(-1).sum().backward()
    still = [name for name, p in drafter.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert still == []


def test_a_warm_start_takes_the_targets_latent_attention(tmp_path: Path) -> None:
    drafter = make_mla_drafter()
    part = drafter.midlayer.self_attn
    layer = {
        "input_layernorm.weight": torch.rand(HIDDEN),
        "self_attn.q_a_proj.weight": torch.randn(part.q_a_proj.weight.shape[0], HIDDEN),
        "self_attn.kv_b_proj.weight": torch.randn(part.kv_b_proj.weight.shape),
        "self_attn.q_b_proj.weight": torch.randn(3, 3),  # of another shape: stays as it was drawn
    }
    parts = TargetParts(**{**vars(make_parts()), "last_layer": layer})
    taken = initialise(drafter, make_vocab(), parts, warm_start=True, generator=torch.Generator().manual_seed(0))
    assert set(taken) == {
        *("lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"),
        *(f"midlayer.self_attn.{name}.weight" for name in ("q_a_proj", "kv_b_proj")),
    }
    assert torch.equal(part.q_a_proj.weight[:, HIDDEN:], layer["self_attn.q_a_proj.weight"])


def test_the_class_follows_from_the_config() -> None:
    assert type(build_drafter(make_mla_config())) is MlaDrafter
    assert type(build_drafter(make_config())) is type(make_drafter())


def test_a_latent_drafter_takes_the_targets_geometry_and_rotary_scaling(tmp_path: Path) -> None:
    target = target_of(
        tmp_path, deepseek_config(rope_theta=5e4).to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    )
    config = MlaDrafterConfig.like_target(target, num_slots=3, draft_vocab_size=256)
    assert (config.q_lora_rank, config.kv_lora_rank, config.num_heads) == (32, 32, 4)
    assert (config.head_dim, config.num_kv_heads, config.v_head_dim, config.rotary_dim) == (32, 4, 16, 16)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.rope_type, config.rope_scaling.factor) == ("yarn", 2.0)


def test_a_target_without_latent_attention_is_refused(tmp_path: Path) -> None:
    target = target_of(tmp_path, deepseek_config().to_dict() | {"architectures": ["X"], "q_lora_rank": None})
    with pytest.raises(DrafterConfigError, match=r"has no q_lora_rank: .* Train a Llama drafter"):
        MlaDrafterConfig.like_target(target, num_slots=3, draft_vocab_size=256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 5, "head_dim": 13}, "is odd"),
        ({"num_kv_heads": 2}, "written out it has 4"),
        ({"v_head_dim": 40}, "must not be wider"),
        ({"norm": NormFlags(norm_before_fc=True)}, "no engine's Eagle3DeepseekV2ForCausalLM"),
    ],
)
def test_an_impossible_latent_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_mla_config(**change)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "new": 1}, "new"),
        ({"rope_type": "yarn", "factor": 2.0, "apply_yarn_scaling": False}, "scale of the attention off"),
        ("yarn", "must be an object"),
    ],
)
def test_a_rotary_scaling_that_is_not_known_is_refused(scaling: object, message: str) -> None:
    with pytest.raises(RopeError, match=f"config.json: rope_scaling.*{message}"):
        RopeScaling.of({"rope_scaling": scaling}, where="config.json")


def test_llama_3s_scaling_turns_a_llama_drafter_as_transformers_does() -> None:
    """Public drafters of Llama 3.1 carry it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    drafter = build_drafter(DrafterConfig.model_validate(make_config().model_dump() | {"rope_scaling": scaling}))
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=scaling | {"rope_theta": 1e4}
    )
    positions = torch.arange(40)[None]
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1, 40, 64), positions)
    ours = drafter.rope(positions)
    torch.testing.assert_close(ours[0][:, 0], cos, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1][:, 0], sin, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(cos, build_drafter(make_config()).rope(positions)[0][:, 0])


def unroll_once(drafter: MlaDrafter, embedding: Tensor, sample: TrainingSample) -> Tensor:
    (hidden,) = unroll(drafter, embedding, pack([Window(sample.input_ids, sample.aux, 0, ROWS)], 1), 1)
    return hidden


def target_of(folder: Path, config: dict[str, Any]) -> TargetConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)
