"""Small drafters with latent attention, beside those of `tests.drafters`."""

import torch

from eagle3.contract import NormFlags
from eagle3.drafter.config import MlaDrafterConfig
from eagle3.drafter.mla import MlaDrafter
from tests.drafters import draw_weights, make_config

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LATENT = {
    "num_kv_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "rope_scaling": YARN,
}


def make_mla_config(**overrides: object) -> MlaDrafterConfig:
    return MlaDrafterConfig.model_validate(make_config().model_dump() | _LATENT | overrides)


def make_mla_drafter(seed: int = 0, norm: NormFlags | None = None, **overrides: object) -> MlaDrafter:
    torch.manual_seed(seed)
    drafter = MlaDrafter(make_mla_config(norm=norm or NormFlags(), **overrides))
    draw_weights(drafter)
    return drafter
