"""A tiny target and a drafter that fits it without training, so that speculative decoding accepts some of its drafts.

The target mostly answers each token with that token's successor (a fixed permutation), because its head holds the
embedding of every token in its successor's row. Its layers are random and strong enough to change many answers: what it
says depends on the whole text, so a wrong cache shows. The drafter knows the permutation only.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.targets import CONTEXT, HIDDEN, VOCAB, make_tokenizer

HEADS = 4
DRAFT_VOCAB = 384


def make_successor_target(folder: Path, *, layer_scale: float = 0.1, seed: int = 0) -> Path:
    """A Llama of 4 layers; `layer_scale` says how much the layers add to the embedding (0: only successors)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[_successors()] = model.model.embed_tokens.weight
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.normal_(std=layer_scale)
            layer.mlp.down_proj.weight.normal_(std=layer_scale)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_successor_drafter(folder: Path, target: LlamaForCausalLM, ids: tuple[int, ...] = (0, 1, 2)) -> Path:
    """An EAGLE-3 drafter in SGLang's form that drafts the successor of its input token, or has it as second choice.

    Its attention looks at the own position alone (query = key = the token's embedding) and takes the embedding, minus
    the state handed over from the step before: the new state is the embedding of the new token.
    """
    eye, zero = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB].sort().values
    head = target.lm_head.weight.detach()[kept]
    # Every third token is drafted in the place of its neighbour, which comes second: a tree finds it, a chain does not.
    head[::3] += 1.1 * head[1::3]
    in_draft = torch.zeros(VOCAB, dtype=torch.bool)
    in_draft[kept] = True
    weights = {
        "fc.weight": torch.zeros(HIDDEN, len(ids) * HIDDEN),
        "midlayer.self_attn.q_proj.weight": torch.cat([8 * eye, zero], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([eye, zero], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, -eye], 1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(128, HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(128, HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 128),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 0.12 * head,  # so weak that the others get a share of the probability
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": in_draft,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _successors() -> torch.Tensor:
    """successor[x] for every token: one cycle through the whole vocabulary in a random order."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return successor
