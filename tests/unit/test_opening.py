"""Drafters of somebody else's: public forms come in as they are meant, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.contract import NormFlags
from eagle3.drafter.checkpoint import checkpoint_tensors, save_checkpoint
from eagle3.drafter.config import DrafterConfigError
from eagle3.drafter.description import describe, diff
from eagle3.drafter.model import Drafter
from eagle3.drafter.opening import OpenedDrafter, Source, open_drafter
from eagle3.drafter.tensors import CheckpointError, CheckpointUnreadable
from eagle3.drafter.vocab import VocabMapError
from eagle3.target.config import TargetConfig, read_config
from tests.drafters import DRAFT_VOCAB, ENGINE_IDS, HIDDEN, VOCAB, make_contract, make_drafter, make_vocab
from tests.mla_drafters import YARN, make_mla_drafter

pytestmark = pytest.mark.unit

IDS = "eagle_aux_hidden_state_layer_ids"
# As SpecForge and the drafters of lmsys have it: no target_hidden_size, no norm flags.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "eagle_config": {IDS: [1, 3, 5], "use_aux_hidden_state": True},
}
# As lightseekorg's drafter of Kimi-K2.5 has it.
MLA: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "rope_scaling": {**{key: value for key, value in YARN.items() if key != "rope_type"}, "type": "yarn"},
}
# As the speculators of RedHatAI have it: the decoder layer apart, ids of vLLM's convention beside it.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
    "transformer_layer_config": {
        key: LLAMA[key]
        for key in LLAMA
        if key not in ("architectures", "draft_vocab_size", "eagle_config", "torch_dtype")
    },
    "draft_vocab_size": DRAFT_VOCAB,
    "norm_before_residual": True,
    "target_hidden_size": None,
    IDS: [2, 4, 6],
}
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def target(tmp_path: Path) -> TargetConfig:
    return target_of(tmp_path / "target")


def target_of(folder: Path, **config: Any) -> TargetConfig:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | config))
    return read_config(folder)


def public(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def deep(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    return checkpoint_tensors(drafter, make_vocab())


def sglang(target: TargetConfig, *, accept: bool = False) -> Source:
    return Source("sglang", "0.5.23", target, accept)


def test_a_drafter_of_specforges_form_comes_in(tmp_path: Path, target: TargetConfig) -> None:
    drafter = make_drafter().bfloat16()
    folder = public(tmp_path / "d", LLAMA, tensors_of(drafter))
    opened = open_drafter(folder, sglang(target))
    assert opened.points == ("layers.1", "layers.3", "layers.5")
    assert (opened.contract, opened.notes, opened.embedding) == (None, (), None)
    same_weights(opened, drafter)


def same_weights(opened: OpenedDrafter, drafter: Drafter) -> None:
    assert type(opened.drafter) is type(drafter)
    ours, theirs = checkpoint_tensors(opened.drafter, opened.vocab), tensors_of(drafter)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def test_a_latent_drafter_of_kimis_form_comes_in(tmp_path: Path) -> None:
    drafter, target = make_mla_drafter(), target_of(tmp_path / "t", architectures=["KimiK25ForConditionalGeneration"])
    ids = {"eagle_config": {IDS: [2, 4, 6], "use_aux_hidden_state": True}}
    opened = open_drafter(public(tmp_path / "d", MLA | ids, deep(tensors_of(drafter))), sglang(target))
    assert opened.points == ("layers.1", "layers.3", "layers.5"), "raw boundaries, from 0.5.13 on"
    assert opened.drafter.config == drafter.config
    same_weights(opened, drafter)


def test_a_speculator_comes_in_with_its_flags(tmp_path: Path, target: TargetConfig) -> None:
    drafter = make_drafter(norm=NormFlags(norm_before_residual=True))
    tensors = deep(tensors_of(drafter)) | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    opened = open_drafter(public(tmp_path / "d", SPECULATORS, tensors), Source("speculators", "0.9.0", target))
    assert opened.points == ("layers.1", "layers.3", "layers.5")
    assert opened.drafter.config.norm == NormFlags(norm_before_residual=True)
    assert opened.embedding is not None
    assert "embedding of its own" in opened.notes[0]
    same_weights(opened, drafter)


def test_older_names_mean_the_norms_of_today(tmp_path: Path, target: TargetConfig) -> None:
    drafter = make_drafter(norm=NormFlags(fc_norm=True))
    older = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    tensors = tensors_of(drafter)
    for new, old in older.items():
        tensors[f"{old}.weight"] = tensors.pop(f"{new}.weight")
    tensors["rotary_emb.inv_freq"] = torch.ones(8)
    opened = open_drafter(public(tmp_path / "d", LLAMA | {"use_aux_norm": True}, tensors), sglang(target))
    same_weights(opened, drafter)


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path, target: TargetConfig) -> None:
    drafter = make_drafter()
    tensors, folder = tensors_of(drafter), public(tmp_path / "d", LLAMA, {})
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name].contiguous() for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same_weights(open_drafter(folder, sglang(target)), drafter)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="does not name safetensors files of this folder"):
        open_drafter(folder, sglang(target))


@pytest.mark.parametrize("eagle", [{}, {IDS: []}, {"eagle_aux_hidden_state_layers": [1, 3, 5]}, {IDS: None}])
def test_ids_that_are_not_there_are_never_guessed(eagle: dict[str, Any], tmp_path: Path, target: TargetConfig) -> None:
    folder = public(tmp_path / "d", LLAMA | {"eagle_config": eagle}, tensors_of(make_drafter()))
    with pytest.raises(
        CheckpointError, match=r"SGLang 0\.5\.23 would capture its default list, layers\.1, layers\.3, "
    ):
        open_drafter(folder, sglang(target))
    opened = open_drafter(folder, sglang(target, accept=True))
    assert opened.points == ("layers.1", "layers.3", "layers.4")
    assert opened.notes[0].endswith("accepted")


def test_ids_where_the_engine_does_not_look_are_named(tmp_path: Path, target: TargetConfig) -> None:
    folder = public(tmp_path / "d", LLAMA | {"eagle_config": {}, IDS: [2, 4, 6]}, tensors_of(make_drafter()))
    with pytest.raises(CheckpointError, match=r"\[2, 4, 6\] stands where SGLang does not look"):
        open_drafter(folder, sglang(target))
    assert open_drafter(folder, Source("vllm", "0.33.0", target)).points == ("layers.1", "layers.3", "layers.5")


def damaged(change: Any, tmp_path: Path, target: TargetConfig, **config: Any) -> OpenedDrafter:
    tensors = tensors_of(make_drafter())
    change(tensors)
    return open_drafter(public(tmp_path / "d", LLAMA | config, tensors), sglang(target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing norm\.weight \[32\]"),
        (lambda t: t.update({"fusion.weight": t.pop("fc.weight")}), r"missing fc\.weight .*renamed\? fusion\.weight"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :HIDDEN]}),
            r"fc\.weight is \[32, 32\].* asks for \[32, 96",
        ),
        (lambda t: t.update({"fc.bias": torch.zeros(HIDDEN)}), r"unexpected fc\.bias \[32\]"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].bfloat16()}), "mixed types: BF16, F32"),
        (
            lambda t: t.update({"model.norm.weight": t["norm.weight"]}),
            r"is there twice, under two names of norm\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight"),
    ],
)
def test_tensors_that_are_not_as_they_must_be_are_named(
    change: Any, message: str, tmp_path: Path, target: TargetConfig
) -> None:
    with pytest.raises(CheckpointError, match=message):
        damaged(change, tmp_path, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"d2t": t["d2t"] + torch.arange(DRAFT_VOCAB)}), "ids instead of offsets"),
        (lambda t: t.update({"d2t": torch.arange(DRAFT_VOCAB)}), "maps draft id i to target id 2i"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "would take draft ids for target ids"),
        (lambda t: t.update({"t2d": torch.ones(VOCAB, dtype=torch.bool)}), "marks 64 tokens, d2t has 48"),
        (lambda t: (t.pop("t2d"), t.update({"d2t": -t["d2t"] - 1})), "strictly increasing|target ids reach from"),
        (lambda t: (t.pop("d2t"), t.update({"t2d": torch.arange(VOCAB) < 40})), "names 40 tokens, the head has 48"),
        (lambda t: t.update({"t2d": torch.arange(VOCAB)}), "t2d must be bool"),
    ],
)
def test_a_map_that_breaks_an_invariant_is_named(
    change: Any, message: str, tmp_path: Path, target: TargetConfig
) -> None:
    with pytest.raises(VocabMapError, match=message):
        damaged(change, tmp_path, target)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("t2d"),  # Model-Optimizer's files have none
        lambda t: t.pop("d2t"),
        lambda t: t.update({"t2d": t["t2d"].to(torch.uint8), "d2t": t["d2t"].int()}),
    ],
)
def test_a_map_that_says_enough_is_completed(change: Any, tmp_path: Path, target: TargetConfig) -> None:
    opened = damaged(change, tmp_path, target)
    assert torch.equal(opened.vocab.target_ids, make_vocab().target_ids)


def test_a_drafter_of_the_whole_vocabulary_needs_no_map(tmp_path: Path, target: TargetConfig) -> None:
    drafter = make_drafter(draft_vocab_size=VOCAB)
    folder = public(tmp_path / "d", LLAMA | {"draft_vocab_size": None}, dict(drafter.state_dict()))
    assert len(open_drafter(folder, sglang(target)).vocab) == VOCAB


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "computes something else with the same tensors"),
        ({"num_hidden_layers": 2}, "2 decoder layers"),
        ({"vocab_size": 72}, "vocabulary 72; the target .* has 64: another target's"),
        ({"norm_before_residual": True}, "which SGLang ignores"),
        ({"target_hidden_size": 64}, "both widths must be equal"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
    ],
)
def test_a_config_of_another_kind_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path, target: TargetConfig
) -> None:
    with pytest.raises((DrafterConfigError, ValueError), match=message):
        damaged(lambda _: None, tmp_path, target, **config)


def test_a_pickle_is_never_opened(tmp_path: Path, target: TargetConfig) -> None:
    folder = public(tmp_path / "d", LLAMA, {})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointUnreadable, match=r"pytorch_model\.bin .* a pickle can run any code"):
        open_drafter(folder, sglang(target))
    with pytest.raises(CheckpointUnreadable, match="there is no folder"):
        open_drafter(tmp_path / "nowhere", sglang(target))


def test_a_foreign_drafter_needs_a_source_to_be_used_and_none_to_be_looked_at(tmp_path: Path) -> None:
    folder = public(tmp_path / "d", LLAMA, tensors_of(make_drafter()))
    with pytest.raises(CheckpointError, match=r"has no contract\.json: a drafter of somebody else's"):
        open_drafter(folder)
    looked = open_drafter(folder, need_points=False)
    assert looked.points == ()
    assert describe(looked).num_slots == 3
    assert "name them" in looked.notes[0]


def test_a_start_must_read_the_dumps_points_of_the_dumps_target(tmp_path: Path, target: TargetConfig) -> None:
    opened = open_drafter(public(tmp_path / "d", LLAMA, tensors_of(make_drafter())), sglang(target))
    opened.check_start(opened.points, target)
    with pytest.raises(CheckpointError, match=r"reads layers\.1, layers\.3, layers\.5, the dump holds layers\.2, "):
        opened.check_start(("layers.2", "layers.3", "layers.5"), target)
    with pytest.raises(CheckpointError, match=r"for a target of vocabulary 64; .* has 80"):
        opened.check_start(opened.points, target_of(tmp_path / "other", vocab_size=80))


def ours(folder: Path, drafter: Drafter) -> Path:
    save_checkpoint(folder, drafter, make_vocab(), make_contract(drafter, make_vocab()), ENGINE_IDS, coverage=0.5)
    return folder


def test_ours_opens_with_its_contract(tmp_path: Path) -> None:
    opened = open_drafter(ours(tmp_path / "d", make_drafter()))
    assert opened.contract is not None
    told = describe(opened)
    assert (told.target, told.points, told.coverage) == ("made-up", ("layers.1", "layers.3", "layers.5"), 0.5)
    assert told.contract_sha256 == opened.contract.digest()
    assert told.weights_sha256 == opened.contract.weights_sha256
    assert told.parameters == sum(p.numel() for p in opened.drafter.parameters())


def test_a_diff_names_what_sets_two_apart(tmp_path: Path, target: TargetConfig) -> None:
    first = open_drafter(ours(tmp_path / "a", make_drafter()))
    assert diff(first, open_drafter(tmp_path / "a")).same
    other = make_drafter()
    with torch.no_grad():
        other.fc.weight[0, 0] += 1.0
    config = LLAMA | {"rope_theta": 500.0, "eagle_config": {IDS: [2, 4, 6]}}
    second = open_drafter(public(tmp_path / "b", config, tensors_of(other)), sglang(target))
    found = diff(first, second)
    assert not found.same
    assert {(d.subject, d.name) for d in found.differences} == {
        *(("shape", "rope_theta"), ("points", "capture points"), ("tensor", "fc.weight"), ("contract", "contract")),
    }
    (weight,) = (d for d in found.differences if d.subject == "tensor")
    assert weight.relative == pytest.approx(1 / float(first.drafter.fc.weight.detach().norm()), rel=1e-4)
    assert found.equal_tensors == len(tensors_of(other)) - 1


def test_a_diff_of_two_builds_names_the_tensors_of_each(tmp_path: Path, target: TargetConfig) -> None:
    first = open_drafter(ours(tmp_path / "a", make_drafter()))
    second = open_drafter(public(tmp_path / "b", MLA, deep(tensors_of(make_mla_drafter(seed=1)))), sglang(target))
    told = {d.name: d.sentence for d in diff(first, second).differences}
    assert told["architecture"] == "LlamaForCausalLMEagle3 against Eagle3DeepseekV2ForCausalLM"
    assert told["midlayer.self_attn.q_proj.weight"] == "only in the first"
    assert told["midlayer.self_attn.q_a_proj.weight"] == "only in the second"
    assert load_file(tmp_path / "b" / "model.safetensors"), "still there"
