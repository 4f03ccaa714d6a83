"""The drafter's shape and the config.json that SGLang loads."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from eagle3.contract import NormFlags
from eagle3.conventions import EngineIds
from eagle3.drafter.config import DrafterConfig, DrafterConfigError
from eagle3.drafter.forms import Exported, engine_config, read_exported
from eagle3.target.config import TargetConfig, read_config
from tests.drafters import ENGINE_IDS, make_config

pytestmark = pytest.mark.unit

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_hidden_layers": 61,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
    },
}


def export(config: DrafterConfig) -> dict[str, Any]:
    return engine_config(config, ENGINE_IDS, contract_sha256="f" * 64, dtype="float32")


def target_of(folder: Path, **config: Any) -> TargetConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def test_a_drafter_takes_the_targets_geometry(tmp_path: Path) -> None:
    config = DrafterConfig.like_target(target_of(tmp_path, **SMOLLM2), num_slots=3, draft_vocab_size=4096)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.rope_theta, config.target_vocab_size, config.max_positions) == (100000.0, 49152, 8192)


def test_overrides_serve_targets_of_another_build(tmp_path: Path) -> None:
    target = target_of(tmp_path, **KIMI)
    config = DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=32000, num_kv_heads=8, head_dim=128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (64, 8, 128)


def test_a_drafter_of_a_target_with_latent_attention_does_not_take_its_rotary_width_for_a_head(tmp_path: Path) -> None:
    """transformers writes DeepSeek's qk_rope_head_dim as `head_dim`."""
    config = DrafterConfig.like_target(target_of(tmp_path, **KIMI), num_slots=3, draft_vocab_size=32000)
    assert (KIMI["text_config"]["head_dim"], config.head_dim) == (64, 112)


def test_a_drafter_turns_its_positions_like_the_target_whose_layer_types_differ(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    target = target_of(tmp_path, **SMOLLM2 | {"rope_parameters": rope})
    assert DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=4096).rope_theta == 1e6


def test_a_target_of_an_impossible_shape_is_refused(tmp_path: Path) -> None:
    target = target_of(tmp_path, **SMOLLM2 | {"head_dim": 63})
    with pytest.raises(DrafterConfigError, match="a drafter like the target: head_dim 63 is odd"):
        DrafterConfig.like_target(target, num_slots=3, draft_vocab_size=4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 1}, "skip fc silently"),
        ({"target_hidden_size": 64}, "both widths must be equal"),
        ({"num_kv_heads": 3}, "evenly"),
        ({"head_dim": 15}, "odd"),
        ({"draft_vocab_size": 65}, "larger than the target's 64"),
        ({"hidden_size": 10**9}, "less than or equal to 65536"),
    ],
)
def test_an_impossible_shape_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(**change)


def test_the_config_leads_back_to_the_shape() -> None:
    config = make_config(norm=NormFlags(norm_before_fc=True, fc_norm=True, norm_output=True), rope_theta=5e5)
    assert read_exported(export(config), where="config.json") == Exported(config, ENGINE_IDS, "f" * 64, None)


def test_transformers_reads_the_config_as_sglang_does() -> None:
    """SGLang's model takes a transformers LlamaConfig; llama_eagle3.py and llama.py read these attributes."""
    parsed = LlamaConfig.from_dict(export(make_config(rope_theta=5e5)))
    assert parsed.rope_parameters["rope_theta"] == 5e5
    assert (parsed.num_attention_heads, parsed.num_key_value_heads, parsed.head_dim) == (4, 2, 16)
    assert (parsed.hidden_size, parsed.target_hidden_size, parsed.intermediate_size) == (32, 32, 48)
    assert (parsed.vocab_size, parsed.draft_vocab_size, parsed.num_hidden_layers) == (64, 48, 1)
    assert parsed.tie_word_embeddings is False
    assert parsed.hidden_act == "silu"
    assert parsed.model_type == "llama"
    assert parsed.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert parsed.eagle_config["use_aux_hidden_state"] is True
    assert not hasattr(parsed, "eagle_aux_hidden_state_layer_ids"), "vLLM's key speaks another convention"


def test_ids_of_another_number_than_slots_are_refused() -> None:
    ids = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(1, 3))
    with pytest.raises(DrafterConfigError, match=r"2 layer ids .* 3 slots"):
        engine_config(make_config(), ids, contract_sha256="f" * 64, dtype="float32")


def test_a_norm_flag_that_sglang_does_not_know_is_not_exported() -> None:
    with pytest.raises(DrafterConfigError, match="norm_before_residual"):
        export(make_config(norm=NormFlags(norm_before_residual=True)))


def test_ids_that_were_edited_by_hand_are_found() -> None:
    config = export(make_config())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [-1, 1, 3]
    with pytest.raises(DrafterConfigError, match=r"would capture \[-1, 1, 3\].*\[1, 3, 5\]"):
        read_exported(config, where="config.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], "expected one of LlamaForCausalLMEagle3"),
        ("eagle_config", None, "fall back to its default layers"),
        ("eagle_config", {"use_aux_hidden_state": True}, "fall back to its default layers"),
        ("eagle3_engine_ids", [1, 3, 5], "eagle3_engine_ids"),
        ("hidden_size", "wide", "hidden_size"),
        ("head_dim", 0, "head_dim"),
    ],
)
def test_a_damaged_config_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(DrafterConfigError, match=f"config.json.*{message}"):
        read_exported({**export(make_config()), key: value}, where="config.json")


@pytest.mark.parametrize("key", ["head_dim", "vocab_size", "rms_norm_eps", "target_hidden_size", "eagle3_engine_ids"])
def test_a_config_without_a_key_is_named(key: str) -> None:
    config = export(make_config())
    del config[key]
    with pytest.raises(DrafterConfigError, match=f"'{key}' is missing"):
        read_exported(config, where="config.json")
