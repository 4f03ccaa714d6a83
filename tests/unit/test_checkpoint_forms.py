"""One drafter in the form of each engine: bit-equal tensors, one digest, ids in that engine's convention.

What the engines' own loaders say of these files is checked by `tools/check_engine_forms.py`; the facts that it found
stand here, so that a change of a form is noticed without them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle3.capture import CaptureSpec
from eagle3.contract import DrafterContract, NormFlags
from eagle3.conventions import EngineIds, convention, ids_of
from eagle3.drafter.checkpoint import (
    CheckpointError,
    checkpoint_tensors,
    load_checkpoint,
    save_checkpoint,
    weights_digest,
)
from eagle3.drafter.config import DrafterConfigError
from eagle3.drafter.model import Drafter
from eagle3.drafter.served import read_served
from eagle3.drafter.vocab import VocabMap
from tests.drafters import CAPTURE, DRAFT_VOCAB, HIDDEN, VOCAB, make_contract, make_drafter, make_vocab
from tests.mla_drafters import make_mla_drafter

pytestmark = pytest.mark.unit

VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0", "speculators": "0.9.0"}
FORMS = [("llama", engine) for engine in VERSIONS] + [("mla", "sglang"), ("mla", "vllm")]


def make(kind: str, **norm: bool) -> Drafter:
    flags = NormFlags(**norm)
    return make_mla_drafter(norm=flags) if kind == "mla" else make_drafter(norm=flags)


def contract_of(drafter: Drafter, kind: str, vocab: VocabMap | None = None) -> DrafterContract:
    contract = make_contract(drafter, vocab or make_vocab())
    model_class = "DeepseekV3ForCausalLM" if kind == "mla" else "LlamaForCausalLM"
    return contract.model_copy(
        update={"target": contract.target.model_copy(update={"model_class": model_class})},
    )


def engine_ids(engine: str, kind: str, version: str | None = None) -> EngineIds:
    model_class = "DeepseekV3ForCausalLM" if kind == "mla" else "LlamaForCausalLM"
    return ids_of(
        CAPTURE.aux, engine=engine, version=version or VERSIONS[engine], model_class=model_class, num_layers=8
    )


def save(folder: Path, kind: str, engine: str, drafter: Drafter | None = None, **options: Any) -> Path:
    drafter = drafter or make(kind)
    save_checkpoint(folder, drafter, make_vocab(), contract_of(drafter, kind), engine_ids(engine, kind), **options)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "engine"), FORMS)
def test_a_round_trip_through_a_form_is_bit_equal(kind: str, engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    drafter = make(kind, fc_norm=True, norm_output=True).to(dtype)
    loaded = load_checkpoint(save(tmp_path / engine, kind, engine, drafter))
    before, after = checkpoint_tensors(drafter, make_vocab()), checkpoint_tensors(loaded.drafter, loaded.vocab)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    assert loaded.drafter.config == drafter.config
    assert loaded.engine_ids == engine_ids(engine, kind)
    assert loaded.contract == contract_of(drafter, kind)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_through_every_form_and_back_the_files_are_the_same_bytes(kind: str, tmp_path: Path) -> None:
    first = folder = save(tmp_path / "first", kind, "sglang")
    for number, engine in enumerate([*[form for named, form in FORMS if named == kind][1:], "sglang"]):
        found, folder = load_checkpoint(folder), tmp_path / str(number)
        save_checkpoint(folder, found.drafter, found.vocab, found.contract, engine_ids(engine, kind))
    for name in ("model.safetensors", "config.json", "contract.json"):
        assert (folder / name).read_bytes() == (first / name).read_bytes(), name


@pytest.mark.parametrize(("kind", "engine"), FORMS)
def test_a_drafter_has_one_digest_in_every_form(kind: str, engine: str, tmp_path: Path) -> None:
    drafter = make(kind)
    folder = save(tmp_path / engine, kind, engine, drafter)
    digest = weights_digest(checkpoint_tensors(drafter, make_vocab()))
    assert weights_digest(load_file(folder / "model.safetensors")) == digest
    assert read_served(folder).weights_sha256() == digest


@pytest.mark.parametrize(
    ("kind", "engine", "version", "ids"),
    [
        ("llama", "sglang", "0.5.23", [1, 3, 5]),
        ("mla", "sglang", "0.5.12", [1, 3, 5]),
        ("mla", "sglang", "0.5.23", [1, 3, 5]),
        ("llama", "vllm", "0.33.0", [2, 4, 6]),
        ("mla", "vllm", "0.33.0", [2, 4, 6]),
        ("llama", "speculators", "0.9.0", [2, 4, 6]),
        ("llama", "speculators", "0.4.0", [1, 3, 5]),
    ],
)
def test_ids_stand_where_the_engine_looks_in_its_own_convention(
    kind: str, engine: str, version: str, ids: list[int], tmp_path: Path
) -> None:
    drafter = make(kind)
    named = engine_ids(engine, kind, version)
    save_checkpoint(tmp_path / "d", drafter, make_vocab(), contract_of(drafter, kind), named)
    config, key = config_of(tmp_path / "d"), "eagle_aux_hidden_state_layer_ids"
    if engine == "sglang":
        assert config["eagle_config"][key] == ids
        assert key not in config, "SGLang ignores the key of the top level, vLLM would take it first"
    else:
        assert config[key] == ids
        assert key not in config.get("eagle_config", {})


def test_a_deepseek_target_changes_the_ids_with_sglangs_version(tmp_path: Path) -> None:
    """The move from 0.5.12 to 0.5.13: the same points, other integers, the same weights."""
    drafter, found = make("mla"), {}
    contract = contract_of(drafter, "mla")
    spec = CaptureSpec(aux=("layers.2", "layers.4", "layers.6"))
    contract = contract.model_copy(update={"capture": spec})
    for version in ("0.5.12", "0.5.13"):
        ids = ids_of(spec.aux, engine="sglang", version=version, model_class="DeepseekV3ForCausalLM", num_layers=8)
        save_checkpoint(tmp_path / version, drafter, make_vocab(), contract, ids)
        found[version] = config_of(tmp_path / version)["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert found == {"0.5.12": [2, 4, 6], "0.5.13": [3, 5, 7]}
    weights = [(tmp_path / version / "model.safetensors").read_bytes() for version in found]
    assert weights[0] == weights[1]


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_names_are_those_of_the_published_files_of_each_form(tmp_path: Path) -> None:
    llama = names_in(save(tmp_path / "a", "llama", "sglang"))
    assert llama == {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
        *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    assert names_in(save(tmp_path / "b", "llama", "vllm")) == llama
    deep = {name.replace("midlayer.", "layers.0.") for name in llama}
    assert names_in(save(tmp_path / "c", "llama", "speculators")) == deep
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert names_in(save(tmp_path / "d", "mla", "sglang")) == {n for n in deep if "self_attn" not in n} | {
        f"layers.0.self_attn.{name}.weight" for name in attention
    }


def test_the_eagle_3_1_flags_stand_where_each_engine_reads_them(tmp_path: Path) -> None:
    for engine in VERSIONS:
        folder = save(tmp_path / engine, "llama", engine, make("llama", fc_norm=True, norm_output=True))
        config = config_of(folder)
        assert (config["fc_norm"], config["norm_output"]) == (True, True), engine
        assert "fc_norm.2.weight" in names_in(folder), engine
        folder = save(tmp_path / f"{engine}-fc", "llama", engine, make("llama", norm_before_fc=True))
        config = config_of(folder)
        assert (config if engine == "speculators" else config["eagle_config"])["norm_before_fc"] is True, engine


def test_norm_before_residual_goes_only_to_engines_that_have_it(tmp_path: Path) -> None:
    drafter = make("llama", norm_before_residual=True)
    for engine in ("vllm", "speculators"):
        folder = save(tmp_path / engine, "llama", engine, drafter)
        assert config_of(folder)["norm_before_residual"] is True
        assert load_checkpoint(folder).drafter.config.norm.norm_before_residual
    with pytest.raises(DrafterConfigError, match="norm_before_residual: SGLang's drafters"):
        save(tmp_path / "sglang", "llama", "sglang", drafter)
    assert not (tmp_path / "sglang").exists()


def test_what_speculators_cannot_run_is_refused(tmp_path: Path) -> None:
    drafter = make("mla")
    ids = EngineIds(engine="speculators", version="0.9.0", model_class="DeepseekV3ForCausalLM", ids=(2, 4, 6))
    with pytest.raises(DrafterConfigError, match="speculators has no drafter with latent attention"):
        save_checkpoint(tmp_path / "d", drafter, make_vocab(), contract_of(drafter, "mla"), ids)
    both = make("llama", norm_before_fc=True, fc_norm=True)
    with pytest.raises(DrafterConfigError, match="takes one of them"):
        save(tmp_path / "d", "llama", "speculators", both)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_without_a_form_is_named(tmp_path: Path) -> None:
    drafter = make("llama")
    model_class, newest = "LlamaForCausalLM", convention("tensorrt_llm").newest
    ids = ids_of(CAPTURE.aux, engine="tensorrt_llm", version=newest, model_class=model_class, num_layers=8)
    with pytest.raises(DrafterConfigError, match="no checkpoint form for TensorRT-LLM: known are sglang, vllm, specul"):
        save_checkpoint(tmp_path / "d", drafter, make_vocab(), contract_of(drafter, "llama"), ids)


@pytest.mark.parametrize(
    ("kind", "engine"), [("llama", "sglang"), ("llama", "vllm"), ("mla", "sglang"), ("mla", "vllm")]
)
def test_transformers_reads_what_the_engine_takes_from_it(kind: str, engine: str, tmp_path: Path) -> None:
    """SGLang's and vLLM's model classes get the config that transformers makes of the file."""
    folder = save(tmp_path / "d", kind, engine)
    parsed, shape = AutoConfig.from_pretrained(folder), make(kind).config
    assert parsed.rope_parameters["rope_theta"] == shape.rope_theta
    assert (parsed.vocab_size, parsed.draft_vocab_size, parsed.num_hidden_layers) == (VOCAB, DRAFT_VOCAB, 1)
    assert (parsed.hidden_size, parsed.target_hidden_size, parsed.rms_norm_eps) == (HIDDEN, HIDDEN, 1e-5)
    assert parsed.tie_word_embeddings is False
    if kind == "mla":
        assert (parsed.q_lora_rank, parsed.kv_lora_rank, parsed.v_head_dim) == (12, 10, 6)
        assert parsed.rope_parameters["rope_type"] == "yarn"
        assert parsed.rope_parameters["mscale_all_dim"] == 1.0
        assert getattr(parsed, "rope_interleave", True), "positions turn interleaved pairs"
    else:
        assert parsed.rope_parameters["rope_type"] == "default"
        assert parsed.head_dim == 16
    if engine == "vllm":
        assert parsed.num_aux_hidden_states == 3
        assert parsed.model_type != "deepseek_v3", "vLLM 0.33.0 takes that for a multi-token-prediction head"


def test_vllm_reads_speculators_layer_as_its_own_config(tmp_path: Path) -> None:
    """vLLM 0.33.0 (configs/speculators/algos.py) takes transformer_layer_config and puts these keys on top of it."""
    config = config_of(save(tmp_path / "d", "llama", "speculators"))
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert layer["num_aux_hidden_states"] == 3, "vLLM counts fc's slots by it, or takes 3"
    for key in ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output"):
        assert key in config, f"vLLM's default for {key} need not be ours"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "made-up",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.parametrize(("engine", "has_map"), [("sglang", True), ("vllm", False), ("speculators", False)])
def test_a_map_of_the_whole_vocabulary_is_left_out_where_the_engine_has_no_place_for_it(
    engine: str, has_map: bool, tmp_path: Path
) -> None:
    drafter, vocab = make_drafter(draft_vocab_size=VOCAB), VocabMap.whole(VOCAB)
    contract = contract_of(drafter, "llama", vocab)
    save_checkpoint(tmp_path / "d", drafter, vocab, contract, engine_ids(engine, "llama"))
    assert ("d2t" in names_in(tmp_path / "d")) == has_map
    loaded = load_checkpoint(tmp_path / "d")
    assert torch.equal(loaded.vocab.target_ids, vocab.target_ids)
    assert loaded.contract.weights_sha256 == weights_digest(checkpoint_tensors(drafter, vocab))


def test_the_embedding_is_saved_only_where_it_is_asked_for(tmp_path: Path) -> None:
    drafter, embedding = make("llama"), torch.randn(VOCAB, HIDDEN)
    assert load_checkpoint(save(tmp_path / "a", "llama", "sglang", drafter)).embedding is None
    folder = save(tmp_path / "b", "llama", "sglang", drafter, embedding=embedding)
    loaded = load_checkpoint(folder)
    assert loaded.embedding is not None
    assert torch.equal(loaded.embedding, embedding)
    assert loaded.contract.digest() == load_checkpoint(tmp_path / "a").contract.digest(), "it is the target's"
    with pytest.raises(CheckpointError, match=r"an embedding of \[3, 32\], the drafter's target has \[64, 32\]"):
        save(tmp_path / "c", "llama", "sglang", drafter, embedding=embedding[:3])


def test_coverage_is_kept_and_reported(tmp_path: Path) -> None:
    assert load_checkpoint(save(tmp_path / "a", "llama", "vllm", coverage=0.875)).coverage == 0.875
    assert load_checkpoint(save(tmp_path / "b", "llama", "vllm")).coverage is None


def edit_config(folder: Path, key: str, value: object) -> None:
    config = config_of(folder)
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("engine", "key", "value", "message"),
    [
        ("sglang", "tie_word_embeddings", True, "tie_word_embeddings is True, an export of this drafter has False"),
        ("sglang", "attention_bias", True, "attention_bias"),
        ("sglang", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, "another drafter than was exported"),
        ("sglang", "rope_theta", 5e5, "another drafter than was exported"),
        ("vllm", "rms_norm_eps", 1e-6, "another drafter than was exported"),
        ("vllm", "eagle_aux_hidden_state_layer_ids", [1, 3, 5], r"vLLM would capture \[1, 3, 5\]"),
        ("vllm", "num_aux_hidden_states", 4, "num_aux_hidden_states is 4"),
        ("vllm", "eagle_aux_hidden_state_layer_ids", None, "vLLM would fall back to its default layers"),
        ("speculators", "speculators_model_type", "peagle", "expected eagle3"),
        ("speculators", "embed_requires_grad", True, "embed_requires_grad"),
        ("sglang", "eagle3_vocab_coverage", 1.5, "expected a share"),
    ],
)
def test_a_flag_that_somebody_edited_is_found(
    engine: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "d", "llama", engine)
    edit_config(folder, key, value)
    with pytest.raises(DrafterConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_a_damaged_file_of_any_form_is_named_and_nothing_is_lost(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "d", kind, "vllm")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    layer = next(name for name in tensors if name.endswith("o_proj.weight")).split("self_attn")[0]
    tensors[f"{layer}mlp.gate.weight"] = tensors.pop(f"{layer}mlp.gate_proj.weight")
    tensors["norm.weight"] = torch.ones(HIDDEN + 1)
    del tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    told = str(caught.value)
    assert f"missing {layer}mlp.gate_proj.weight [48, 32] (renamed? {layer}mlp.gate.weight has its shape)" in told
    assert "norm.weight is [33], config.json asks for [32]" in told
    assert "missing t2d [64]" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_map_of_another_size_than_the_head_is_not_written(tmp_path: Path) -> None:
    drafter = make("llama")
    vocab = VocabMap(torch.arange(40), VOCAB)
    contract = contract_of(drafter, "llama", vocab)
    with pytest.raises(CheckpointError, match="a vocabulary map of 40 of 64 tokens for a drafter of 48 of 64"):
        save_checkpoint(tmp_path / "d", drafter, vocab, contract, engine_ids("sglang", "llama"))
    assert list(tmp_path.iterdir()) == []
