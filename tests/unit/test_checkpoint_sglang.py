"""Does SGLang take every tensor of a checkpoint? Its own `load_weights` runs here, on parameters of its own names.

Importing SGLang's model needs a GPU or stand-ins, so the method is taken out of the installed source file and run on a
stand-in model, which declares the parameters that llama_eagle3.py and llama.py declare. That the real server
drafts with what was saved is tested in tests/integration/test_server_drafter.py.
"""

import ast
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.checkpoint import checkpoint_tensors
from eagle3.drafter.config import DrafterConfig, MlaDrafterConfig
from eagle3.drafter.tensors import disk_names
from tests.drafters import make_drafter, make_vocab
from tests.mla_drafters import make_mla_drafter

pytestmark = pytest.mark.unit

LoadWeights = Callable[[Any, Iterable[tuple[str, Tensor]]], None]


class SGLangModel:
    """Parameters of LlamaForCausalLMEagle3 (0.5.23), and what was loaded into each part of them."""

    def __init__(self, config: DrafterConfig) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        q, kv, ffn = config.num_heads * dim, config.num_kv_heads * dim, config.intermediate_size
        width = config.num_slots * config.target_hidden_size
        # Shape of every parameter, or of each shard of a stacked one. embed_tokens is left out: the target's is shared.
        self.shapes: dict[str, dict[Any, tuple[int, ...]]] = {
            "model.fc.weight": {None: (hidden, width)},
            "model.layers.0.self_attn.qkv_proj.weight": {
                "q": (q, 2 * hidden),
                "k": (kv, 2 * hidden),
                "v": (kv, 2 * hidden),
            },
            "model.layers.0.self_attn.o_proj.weight": {None: (hidden, q)},
            "model.layers.0.mlp.gate_up_proj.weight": {0: (ffn, hidden), 1: (ffn, hidden)},
            "model.layers.0.mlp.down_proj.weight": {None: (hidden, ffn)},
            "model.layers.0.input_layernorm.weight": {None: (hidden,)},
            "model.layers.0.post_attention_layernorm.weight": {None: (hidden,)},
            "model.layers.0.hidden_norm.weight": {None: (hidden,)},
            "model.norm.weight": {None: (hidden,)},
            "lm_head.weight": {None: (config.draft_vocab_size, hidden)},
        }
        if config.norm.norm_before_fc:
            self.shapes["model.input_norm.weight"] = {None: (width,)}
        if config.norm.fc_norm:
            for slot in range(config.num_slots):
                self.shapes[f"model.fc_norm.{slot}.weight"] = {None: (config.target_hidden_size,)}
        self.loaded: dict[tuple[str, Any], Tensor] = {}
        self.hot_token_id: Tensor | None = None

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name in self.shapes:
            yield name, _Parameter(self, name)

    def unset(self) -> list[tuple[str, Any]]:
        wanted = [(name, shard) for name, shards in self.shapes.items() for shard in shards]
        return [part for part in wanted if part not in self.loaded]


class _Parameter:
    def __init__(self, model: SGLangModel, name: str) -> None:
        self.model, self.name = model, name

    def weight_loader(self, param: Any, weight: Tensor, shard: Any = None) -> None:
        assert tuple(weight.shape) == self.model.shapes[self.name][shard], (self.name, shard)
        assert (self.name, shard) not in self.model.loaded, "loaded twice"
        self.model.loaded[self.name, shard] = weight


@pytest.fixture(scope="module")
def load_weights() -> LoadWeights:
    return method_of("llama_eagle3.py", "LlamaForCausalLMEagle3")


def method_of(file: str, name: str) -> LoadWeights:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "SGLang is not installed: run `make install`"
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt/models" / file).read_text()
    model = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    method = next(node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "load_weights")
    scope: dict[str, Any] = {"torch": torch, "re": re, "Iterable": Iterable, "Tuple": tuple}
    scope |= {"default_weight_loader": None, "logger": logging.getLogger(__name__)}
    exec(compile(ast.Module([method], []), file, "exec"), scope)
    return scope["load_weights"]


@pytest.mark.parametrize(
    "norm", [NormFlags(), NormFlags(norm_before_fc=True, norm_output=True), NormFlags(fc_norm=True)]
)
def test_sglang_takes_every_tensor_and_no_parameter_stays_unset(load_weights: LoadWeights, norm: NormFlags) -> None:
    drafter, vocab = make_drafter(norm=norm), make_vocab()
    tensors = checkpoint_tensors(drafter, vocab)
    model = SGLangModel(drafter.config)
    load_weights(model, tensors.items())
    assert model.unset() == []
    assert len(model.loaded) == len(tensors) - 2, "all but d2t and t2d"
    assert model.hot_token_id is not None
    assert torch.equal(model.hot_token_id, vocab.target_ids)


def test_sglang_drops_a_renamed_tensor_without_a_word(load_weights: LoadWeights) -> None:
    """Why tensors.py checks names itself."""
    drafter = make_drafter()
    tensors = checkpoint_tensors(drafter, make_vocab())
    tensors["fc_proj.weight"] = tensors.pop("fc.weight")
    model = SGLangModel(drafter.config)
    load_weights(model, tensors.items())
    assert model.unset() == [("model.fc.weight", None)]


class SGLangLatentModel:
    """Parameters of Eagle3DeepseekV2ForCausalLM (0.5.23), which loads whole tensors but for gate and up."""

    def __init__(self, config: MlaDrafterConfig) -> None:
        hidden, heads, ffn = config.hidden_size, config.num_heads, config.intermediate_size
        attention = "model.midlayer.self_attn"
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        narrow = config.q_lora_rank + config.kv_lora_rank + rope
        self.shapes: dict[str, dict[Any, tuple[int, ...]]] = {
            "model.fc.weight": {None: (hidden, config.num_slots * config.target_hidden_size)},
            f"{attention}.fused_qkv_a_proj_with_mqa.weight": {None: (narrow, 2 * hidden)},
            f"{attention}.q_a_layernorm.weight": {None: (config.q_lora_rank,)},
            f"{attention}.q_b_proj.weight": {None: (heads * (nope + rope), config.q_lora_rank)},
            f"{attention}.kv_a_layernorm.weight": {None: (config.kv_lora_rank,)},
            f"{attention}.kv_b_proj.weight": {None: (heads * (nope + config.v_head_dim), config.kv_lora_rank)},
            f"{attention}.o_proj.weight": {None: (hidden, heads * config.v_head_dim)},
            "model.midlayer.mlp.gate_up_proj.weight": {0: (ffn, hidden), 1: (ffn, hidden)},
            "model.midlayer.mlp.down_proj.weight": {None: (hidden, ffn)},
            **{
                f"model.midlayer.{name}.weight": {None: (hidden,)}
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            },
            **{f"model.fc_norm.{slot}.weight": {None: (hidden,)} for slot in range(config.num_slots)},
            "model.norm.weight": {None: (hidden,)},
            "lm_head.weight": {None: (config.draft_vocab_size, hidden)},
        }
        self.loaded: dict[tuple[str, Any], Tensor] = {}
        self.hot_token_id: Tensor | None = None

    named_parameters = SGLangModel.named_parameters
    unset = SGLangModel.unset

    def post_load_weights(self) -> None:
        """Splits kv_b_proj for the absorbed form: nothing more is loaded."""


def test_sglang_takes_every_tensor_of_a_latent_drafter() -> None:
    load_weights = method_of("kimi_k25_eagle3.py", "Eagle3DeepseekV2ForCausalLM")
    drafter, vocab = make_mla_drafter(norm=NormFlags(fc_norm=True, norm_output=True)), make_vocab()
    tensors, names = checkpoint_tensors(drafter, vocab), disk_names(drafter.config, "sglang")
    model = SGLangLatentModel(drafter.config)
    load_weights(model, [(names[key], tensor) for key, tensor in tensors.items()])
    assert model.unset() == []
    fused = model.loaded["model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight", None]
    parts = [tensors[f"midlayer.self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(fused, torch.cat(parts))
    assert model.hot_token_id is not None
    assert torch.equal(model.hot_token_id, vocab.target_ids)
