"""Numbers, tensors and states of targets: flat and nested configs, one file and many, tied heads."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.capture import all_points
from eagle3.target import Target, TargetError
from tests import targets

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tiny_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_kimi(tmp_path_factory.mktemp("targets") / "tiny-kimi")


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: object) -> Path:
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in remove} | changes
    file.write_text(json.dumps(config))
    return folder


def test_a_flat_config_is_read(tiny_llama: Path) -> None:
    target = Target.open(str(tiny_llama))
    assert (target.model_class, target.model_type) == ("LlamaForCausalLM", "llama")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 64, 512)
    assert (target.num_attention_heads, target.num_key_value_heads, target.head_dim) == (4, 4, 16)
    assert (target.intermediate_size, target.context_length) == (128, 2048)
    assert (target.rms_norm_eps, target.rope_theta, target.dtype) == (1e-5, 10000.0, "float32")
    assert target.text_config is target.config


def test_a_nested_config_gives_the_decoders_numbers_and_the_outer_class(tiny_kimi: Path) -> None:
    target = Target.open(tiny_kimi)
    assert target.model_class == "KimiK25ForConditionalGeneration"
    assert target.model_type == "kimi_k25"
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 64, 512)
    assert (target.rope_theta, target.dtype, target.head_dim) == (50000.0, "bfloat16", 16)
    assert target.text_config["model_type"] == "kimi_k2"


@pytest.mark.parametrize(
    ("remove", "changes", "theta"),
    [
        (("rope_parameters",), {"rope_theta": 500000.0}, 500000.0),
        ((), {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ((), {"rope_parameters": {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 1}}}, 1e5),
        (("rope_parameters",), {}, 10000.0),
    ],
)
def test_rope_theta_is_found_wherever_it_stands(
    tmp_path: Path, tiny_llama: Path, remove: tuple[str, ...], changes: dict[str, object], theta: float
) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    edit_config(tmp_path, remove, **changes)
    assert Target.open(tmp_path, config_only=True).rope_theta == theta


def test_a_dry_run_needs_config_json_alone(tmp_path: Path, tiny_kimi: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_kimi / "config.json").read_text())
    target = Target.open(tmp_path, config_only=True)
    assert target.num_layers == 8
    with pytest.raises(TargetError, match="has no weights"):
        target.embedding()
    with pytest.raises(TargetError, match="has no weights"):
        Target.open(tmp_path)


def test_tensors_of_one_file_are_the_stored_ones(tiny_llama: Path) -> None:
    stored, target = load_file(tiny_llama / "model.safetensors"), Target.open(tiny_llama)
    assert target.embedding().equal(stored["model.embed_tokens.weight"])
    assert target.final_norm().equal(stored["model.norm.weight"])
    assert target.head().equal(stored["lm_head.weight"])
    last = target.last_layer()
    assert len(last) == 9
    assert last["self_attn.q_proj.weight"].equal(stored["model.layers.7.self_attn.q_proj.weight"])
    assert target.layer_tensor(2, "mlp.up_proj.weight").equal(stored["model.layers.2.mlp.up_proj.weight"])
    assert target.layer_tensor(2, "no.such.weight") is None
    with pytest.raises(TargetError, match=r"layers 0 \.\.\. 7"):
        target.layer_tensor(8, "mlp.up_proj.weight")


def test_tensors_of_a_nested_checkpoint_are_found_under_its_prefix(tiny_kimi: Path, tmp_path: Path) -> None:
    plain = load_file(targets.make_deepseek(tmp_path, moe=True, dtype=torch.bfloat16) / "model.safetensors")
    target = Target.open(tiny_kimi)
    assert target.embedding().equal(plain["model.embed_tokens.weight"])
    assert target.final_norm().equal(plain["model.norm.weight"])
    assert target.head().equal(plain["lm_head.weight"])
    assert target.embedding().dtype == torch.bfloat16
    assert target.layer_tensor(7, "input_layernorm.weight").equal(plain["model.layers.7.input_layernorm.weight"])
    assert target.last_layer() == {}, "latent attention and experts are no start for a Llama layer"


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model."])
def test_every_known_prefix_is_found(tmp_path: Path, tiny_llama: Path, prefix: str) -> None:
    stored = load_file(tiny_llama / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): t for name, t in stored.items() if name.startswith("model.")}
    save_file(renamed | {"lm_head.weight": stored["lm_head.weight"]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    target = Target.open(tmp_path)
    assert target.embedding().equal(stored["model.embed_tokens.weight"])
    assert target.final_norm().equal(stored["model.norm.weight"])
    assert len(target.last_layer()) == 9


def test_only_the_file_that_holds_a_tensor_is_opened(tmp_path: Path) -> None:
    target = Target.open(targets.make_kimi(tmp_path / "kimi"))
    expected = target.embedding().clone()
    other = tmp_path / "kimi" / "model-00002-of-00002.safetensors"

    other.write_bytes(b"not safetensors at all")
    assert Target.open(tmp_path / "kimi").embedding().equal(expected)
    with pytest.raises(TargetError, match="is not a safetensors file"):
        Target.open(tmp_path / "kimi").head()

    other.unlink()
    assert Target.open(tmp_path / "kimi").embedding().equal(expected)
    with pytest.raises(TargetError, match=r"model-00002-of-00002\.safetensors is missing"):
        Target.open(tmp_path / "kimi").head()


def test_a_tensor_is_read_without_its_neighbours_in_the_file(tmp_path: Path, tiny_llama: Path) -> None:
    """A file of 4 GiB (sparse, it takes no disk): the embedding costs the memory of the embedding."""
    embedding = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    small, large = embedding.numel() * 4, 4 * 2**30
    header = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [512, 64], "data_offsets": [0, small]},
        "model.layers.0.mlp.experts.weight": {"dtype": "U8", "shape": [large], "data_offsets": [small, small + large]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + embedding.numpy().tobytes())
        file.truncate(8 + len(text) + small + large)
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Target.open(tmp_path).embedding().equal(embedding)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def retied(folder: Path, source: Path, tied: bool | None, head: torch.Tensor | None) -> Target:
    folder.mkdir()
    weights = load_file(source / "model.safetensors")
    del weights["lm_head.weight"]
    if head is not None:
        weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    change = {} if tied is None else {"tie_word_embeddings": tied}
    return Target.open(edit_config(folder, ("tie_word_embeddings",), **change))


def test_a_tied_head_is_the_embedding(tmp_path: Path, tiny_llama: Path) -> None:
    embedding, head = Target.open(tiny_llama).embedding(), Target.open(tiny_llama).head()
    assert retied(tmp_path / "tied", tiny_llama, True, None).head().equal(embedding)
    assert retied(tmp_path / "stored-twice", tiny_llama, True, embedding.clone()).head().equal(embedding)
    assert retied(tmp_path / "silent", tiny_llama, None, None).head().equal(embedding)
    assert retied(tmp_path / "silent-but-stored", tiny_llama, None, head).head().equal(head)


def test_a_head_that_contradicts_the_config_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    head = Target.open(tiny_llama).head()
    with pytest.raises(TargetError, match=r"stored lm_head\.weight differs"):
        retied(tmp_path / "both", tiny_llama, True, head).head()
    with pytest.raises(TargetError, match=r"no output head: expected a tensor named lm_head\.weight"):
        retied(tmp_path / "none", tiny_llama, False, None).head()


@pytest.mark.parametrize("kind", ["llama", "deepseek", "kimi", "gemma3"])
def test_states_are_transformers_own_and_the_last_layer_is_not_normed(tmp_path: Path, kind: str) -> None:
    folder = getattr(targets, f"make_{kind}")(tmp_path / kind, dtype=torch.float32)
    target = Target.open(folder)
    model, ids = target.load_model(torch.float32), [5, 17, 300, 8, 8]
    states = target.hidden_states(model, ids)

    assert tuple(states) == all_points(8)
    assert all(state.shape == (5, 64) and not state.requires_grad for state in states.values())
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        for boundary in range(8):
            torch.testing.assert_close(states[all_points(8)[boundary]], theirs.hidden_states[boundary][0])
        # Their [N] is overwritten with the normed state: it is our `norm`, and `layers.7` is what goes into the norm.
        torch.testing.assert_close(states["norm"], theirs.hidden_states[8][0])
        assert not torch.allclose(states["layers.7"], theirs.hidden_states[8][0], atol=0.1)
    torch.testing.assert_close(states["embed"], target.embedding()[ids])
    scale = torch.rsqrt(states["layers.7"].pow(2).mean(-1, keepdim=True) + target.rms_norm_eps)
    torch.testing.assert_close(states["layers.7"] * scale * target.final_norm(), states["norm"])
    torch.testing.assert_close(states["norm"] @ target.head().T, theirs.logits[0])


def test_a_gemma_is_read_with_its_own_factors(tmp_path: Path) -> None:
    target = Target.open(targets.make_gemma3(tmp_path, dtype=torch.bfloat16))
    stored = load_file(tmp_path / "model.safetensors")
    table, norm = stored["model.embed_tokens.weight"], stored["model.norm.weight"]
    assert target.final_norm().equal(1 + norm.float())
    assert target.embedding().equal(table * 8)  # sqrt(64)
    assert target.embedding_table().equal(table)
    assert target.head().equal(table), "the tied head is not scaled"
    assert target.last_layer() == {}, "norms around 0 are no start for norms around 1"
    edit_config(tmp_path, model_type="gemma9")
    with pytest.raises(TargetError, match="how a gemma9 scales its embedding"):
        Target.open(tmp_path).final_norm()


def test_states_leave_no_hook_behind(tiny_llama: Path) -> None:
    target = Target.open(tiny_llama)
    model = target.load_model()
    target.hidden_states(model, torch.tensor([1, 2]))
    with pytest.raises(TargetError, match="no token ids"):
        target.hidden_states(model, [])
    with pytest.raises(IndexError):
        target.hidden_states(model, [100_000])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.layers)
    assert not model.model.norm._forward_hooks
    assert not model.model.norm._forward_pre_hooks


def test_states_of_another_model_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = Target.open(tiny_llama).load_model()
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    other = Target.open(edit_config(tmp_path, num_hidden_layers=9), config_only=True)
    with pytest.raises(TargetError, match=r"expected a decoder with 9 `layers`.*8 layers"):
        other.hidden_states(model, [1])


def test_the_model_is_loaded_in_the_asked_dtype(tiny_kimi: Path) -> None:
    target = Target.open(tiny_kimi)
    assert next(target.load_model().parameters()).dtype == torch.bfloat16
    model = target.load_model("float32")
    assert next(model.parameters()).dtype == torch.float32
    assert not model.training
