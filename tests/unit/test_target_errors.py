"""Targets that cannot be used: each is refused with a sentence that says what to do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.errors import Eagle3Error
from eagle3.target import Target, TargetError
from tests import targets

pytestmark = pytest.mark.unit

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
}


def opened(folder: Path, config: object) -> Target:
    (folder / "config.json").write_text(json.dumps(config))
    return Target.open(folder, config_only=True)


def test_an_unknown_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"there is no folder .*missing.*Download the model first"):
        Target.open(tmp_path / "missing")


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(TargetError, match=r"has no config\.json.*It holds: notes\.txt"):
        Target.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"architectures": ["Llama', r"not valid JSON: .* at line 1, column"),
        (b"[1, 2]", "must hold a JSON object; it holds a list"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b" " * (5 * 2**20), "larger than"),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(TargetError, match=message):
        Target.open(tmp_path)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [7]])
def test_a_config_without_a_model_class_is_refused(tmp_path: Path, architectures: object) -> None:
    with pytest.raises(TargetError, match=r"names no model class.*\[\"LlamaForCausalLM\"\]"):
        opened(tmp_path, CONFIG | {"architectures": architectures})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive whole number; it is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number; it is 0"),
        ({"num_hidden_layers": True}, "it is True"),
        ({"vocab_size": "512"}, "vocab_size must be a positive whole number; it is '512'"),
        ({"vocab_size": 10**12}, "vocab_size must be"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number; it is missing"),
        ({"rope_theta": -1}, "rope_theta must be a positive number; it is -1"),
        ({"model_type": None}, "model_type must be a name; it is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"dtype": 16}, "dtype must be a name such as bfloat16"),
        ({"text_config": 3}, "text_config must be an object"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    opened(tmp_path, CONFIG)
    with pytest.raises(TargetError, match=message):
        opened(tmp_path, CONFIG | change)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    opened(tmp_path, CONFIG)
    with pytest.raises(TargetError, match=r"has no weights: expected model\.safetensors, or .*index\.json"):
        Target.open(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match=r"but no model\.safetensors\.index\.json"):
        Target.open(tmp_path)


def test_pickles_are_refused_and_never_opened(tmp_path: Path) -> None:
    opened(tmp_path, CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(TargetError, match=r"only as pickles \(pytorch_model\.bin\).*save_pretrained"):
        Target.open(tmp_path)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "model.bin", 7]
)
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, file: object) -> None:
    opened(tmp_path, CONFIG)
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"expected the name of a \.safetensors file in the same folder"):
        Target.open(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(TargetError, match="has no weight_map"):
        Target.open(tmp_path)


def test_an_index_beside_another_single_file_is_ambiguous(tmp_path: Path, tiny_llama: Path) -> None:
    folder = targets.make_kimi(tmp_path / "kimi")
    shutil.copy(tiny_llama / "model.safetensors", folder)
    with pytest.raises(TargetError, match="holds both"):
        Target.open(folder)


def test_missing_tensors_are_listed_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in weights.items() if n not in ("model.norm.weight", "model.embed_tokens.weight")}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(TargetError, match=r"no final norm: expected .* model\.norm\.weight or .*begin with lm_head"):
        Target.open(folder).final_norm()
    with pytest.raises(TargetError, match=r"no token embedding: expected .* model\.embed_tokens\.weight"):
        Target.open(folder).embedding()
    with pytest.raises(TargetError, match=r"lacks 2 weights of LlamaForCausalLM: model\.embed_tokens\.weight"):
        Target.open(folder).load_model()


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(32)
    weights["model.embed_tokens.weight"] = torch.ones(512, 64, dtype=torch.int8)
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(128, 64, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")
    target = Target.open(folder)
    with pytest.raises(TargetError, match=r"shape \[64\] according to config\.json; it is float32 \[32\]"):
        target.final_norm()
    with pytest.raises(TargetError, match=r"it is int8 \[512, 64\]"):
        target.embedding()
    assert target.last_layer() == {}, "a quantised layer is no warm start"


def test_two_candidates_for_one_tensor_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"language_model.model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(TargetError, match="which tensor is the final norm"):
        Target.open(folder).final_norm()


def test_an_index_that_lies_about_a_file_is_found(tmp_path: Path) -> None:
    folder = targets.make_kimi(tmp_path / "kimi")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["language_model.model.norm.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"has no tensor language_model\.model\.norm\.weight, although"):
        Target.open(folder).final_norm()


def test_a_model_that_transformers_does_not_know_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "noveltron", "architectures": ["Nov"]}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration_nov.Nov"}}))
    with pytest.raises(TargetError, match=r"cannot load Nov \(model_type noveltron\).*trust_remote_code"):
        Target.open(folder).load_model()
