"""First weights: random, or warm from the target, which saves most of a short training."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from eagle3.digests import sha256_bytes, sha256_json
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.training.samples import TargetParts, TrainingError

# drafter parameter <- parameter of the target's last layer, Llama's or DeepSeek's. Where the drafter's reads
# [embedding, hidden]: into the half that reads the hidden state.
_FROM_LAST_LAYER = {
    "midlayer.hidden_norm.weight": "input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight": "self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight": "self_attn.v_proj.weight",
    "midlayer.self_attn.q_a_proj.weight": "self_attn.q_a_proj.weight",
    "midlayer.self_attn.q_a_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "midlayer.self_attn.q_b_proj.weight": "self_attn.q_b_proj.weight",
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "midlayer.self_attn.kv_a_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "midlayer.self_attn.kv_b_proj.weight": "self_attn.kv_b_proj.weight",
    "midlayer.self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight": "mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight": "mlp.down_proj.weight",
}
_READS_BOTH = tuple(
    f"midlayer.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
)


@torch.no_grad()
def initialise(
    drafter: Drafter, vocab: VocabMap, parts: TargetParts, *, warm_start: bool, generator: torch.Generator
) -> tuple[str, ...]:
    """Set every weight; returns the names of those taken from the target.

    Head and final norm always come from the target. `warm_start` makes fc pass its last slot through (the deepest, if
    they are in order) with a little of everything, and copies the target's last layer where names and shapes fit; a
    part of another kind (a Llama drafter of an MLA target, experts) stays random. Raises TrainingError where nothing
    of it fits.
    """
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            # Smaller into the residual stream, so that the first states stay near what fc passes through.
            gain = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]), generator=generator)
        else:
            nn.init.ones_(parameter)
    drafter.lm_head.weight.copy_(parts.head[vocab.target_ids.to(parts.head.device)])
    drafter.norm.weight.copy_(parts.final_norm)
    taken = ["lm_head.weight", "norm.weight"]
    if not warm_start:
        return tuple(taken)

    hidden = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
    copied = _copy_last_layer(drafter, parts)
    if parts.last_layer is not None and not copied:
        raise TrainingError(
            "warm start: no tensor of the target's last layer fits the drafter (it has "
            f"{', '.join(sorted(parts.last_layer))}); switch warm_start off, or pass no layer"
        )
    return (*taken, *copied)


def _copy_last_layer(drafter: Drafter, parts: TargetParts) -> list[str]:
    copied, hidden = [], drafter.config.hidden_size
    parameters = dict(drafter.named_parameters())
    for name, source_name in _FROM_LAST_LAYER.items():
        source = (parts.last_layer or {}).get(source_name)
        destination = parameters.get(name)
        if destination is None:
            continue
        if name in _READS_BOTH:
            destination = destination[:, hidden:]  # the half after the embedding's
        if source is not None and source.shape == destination.shape:
            destination.copy_(source)
            copied.append(name)
    return copied


@torch.no_grad()
def take_weights(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """Start from another drafter's weights, by the checkpoint's names. TrainingError unless all fit."""
    parameters = dict(drafter.named_parameters())
    for name, parameter in parameters.items():
        found = weights.get(name)
        if found is None or found.shape != parameter.shape:
            raise TrainingError(
                f"the parent drafter's {name} is {'missing' if found is None else list(found.shape)}, expected "
                f"{list(parameter.shape)}: start from a drafter of the same shape and vocabulary, or from none"
            )
        parameter.copy_(found)


def sha256_weights(drafter: Drafter) -> str:
    """Digest of all parameters, as they lie in memory on the CPU."""
    parts = [
        [name, sha256_bytes(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())]
        for name, p in drafter.named_parameters()
    ]
    return sha256_json(parts)
