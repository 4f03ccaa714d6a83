"""Tiny targets for the tests: real Hugging Face folders with random weights, a tokenizer and a chat template.

They are small enough for a server in seconds, and their norms and layers differ enough that every boundary of the
residual stream is told from its neighbours.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
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
TEMPLATE = (
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
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_llama(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Path:
    """A tiny Llama: layer ids follow SGLang's generic rule. `overrides` go into its configuration."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(llama_config(**overrides)), folder, dtype)


def make_idle(folder: Path, layer: int, work: float, *, seed: int = 0) -> Path:
    """A Llama one of whose layers adds only the share `work` of what it would."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config())
    idle = model.model.layers[layer]
    for part in (idle.self_attn.o_proj, idle.mlp.down_proj):
        part.weight.data *= work
    return _save(model, folder, torch.float32)


def llama_config(**overrides: Any) -> LlamaConfig:
    return LlamaConfig(**_SHARED | overrides, head_dim=16, rms_norm_eps=1e-5)


def make_qwen3(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny Qwen3: norms on query and key, fewer key/value heads than heads; ids follow SGLang's generic rule."""
    torch.manual_seed(seed)
    config = Qwen3Config(**_SHARED | {"num_key_value_heads": 2}, head_dim=16, rms_norm_eps=1e-6)
    return _save(Qwen3ForCausalLM(config), folder, dtype)


def make_gemma3(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny Gemma 3: norms multiply by 1 + weight, the embedding is scaled and is the head too."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(**_SHARED | {"tie_word_embeddings": True}, head_dim=16, rms_norm_eps=1e-6)
    return _save(Gemma3ForCausalLM(config), folder, dtype)


def make_deepseek(folder: Path, *, moe: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny DeepSeek-V3 (MLA): layer ids follow SGLang's DeepSeek rule."""
    torch.manual_seed(seed)
    return _save(DeepseekV3ForCausalLM(deepseek_config(moe=moe)), folder, dtype)


def deepseek_config(*, moe: bool = False, **overrides: Any) -> DeepseekV3Config:
    return DeepseekV3Config(
        **_SHARED | overrides,
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
        # Three fields of the published config.json that SGLang reads and transformers does not.
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
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


def _save(model: torch.nn.Module, folder: Path, dtype: torch.dtype) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # a norm of ones would hide a norm applied twice
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


_KIMI_TOKENIZER = '''"""A tokenizer with code of its own, as Kimi-K2.5 ships one."""

from transformers import PreTrainedTokenizerFast


class TikTokenTokenizer(PreTrainedTokenizerFast):
    says = "the code in the folder ran"
'''


def make_kimi(folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """A tiny checkpoint in Kimi-K2.5's form: its decoder is the one of `make_deepseek(moe=True)`.

    Nested text_config, weights named `language_model.model.*` in two files with an index (the second begins with the
    upper half of the layers), a vision tower that nobody reads, a tokenizer with code of its own.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plain = make_deepseek(Path(scratch) / "plain", moe=True, dtype=dtype, seed=seed)
        text_config = json.loads((plain / "config.json").read_text())
        weights = {f"language_model.{name}": t for name, t in load_file(plain / "model.safetensors").items()}
    weights["vision_tower.patch_embed.proj.weight"] = torch.zeros(8, 3, 2, 2, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _save_sharded(weights, folder)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        # transformers writes `rope_parameters` and the rotary width as head_dim; Kimi's own file has `rope_theta`.
        "text_config": {k: v for k, v in text_config.items() if k not in ("rope_parameters", "head_dim", "dtype")}
        | {
            "model_type": "kimi_k2",
            "rope_theta": 50000.0,
            "rope_scaling": text_config["rope_parameters"] | {"rope_theta": 50000.0},
        },
        "vision_config": {"vt_hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    make_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "TikTokenTokenizer"
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "tokenization_kimi.py").write_text(_KIMI_TOKENIZER)
    return folder


def _save_sharded(weights: dict[str, torch.Tensor], folder: Path) -> None:
    def shard(name: str) -> int:
        layer = re.search(r"layers\.(\d+)\.", name)
        return int(int(layer[1]) >= LAYERS // 2) if layer else int("embed_tokens" not in name)

    index = {}
    for number in (0, 1):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        part = {name: tensor.contiguous() for name, tensor in weights.items() if shard(name) == number}
        save_file(part, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in weights.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=2))
