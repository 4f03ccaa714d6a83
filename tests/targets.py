"""Tiny targets for the tests: real Hugging Face folders with random weights, a tokenizer and a chat template.

They are small enough for a server in seconds, and their norms and layers differ enough that every boundary of the
residual stream is told from its neighbours.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB = 512
HIDDEN = 64
LAYERS = 8
CONTEXT = 2048

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.15,
}
_TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world! Tom has 3 apples and buys 4 more.",
    "def main(): print('hello') return 0 for i in range(10): x += i the and of to in is that",
]
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of at most 512 tokens, with a chat template."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def make_llama(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny Llama: layer ids follow SGLang's generic rule."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_SHARED, head_dim=16, rms_norm_eps=1e-5))
    return _save(model, folder, dtype)


def make_deepseek(folder: Path, *, moe: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny DeepSeek-V3 (MLA): layer ids follow SGLang's DeepSeek rule."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        **_SHARED,
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1 if moe else LAYERS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    return _save(DeepseekV3ForCausalLM(config), folder, dtype)


def _save(model: torch.nn.Module, folder: Path, dtype: torch.dtype) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # a norm of ones would hide a norm applied twice
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer(folder)
    return folder
