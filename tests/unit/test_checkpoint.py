"""The drafter on disk: what is saved comes back bit by bit, and whatever is wrong with it is named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.capture import CaptureSpec
from eagle3.contract import ContractError, NormFlags
from eagle3.conventions import EngineIds
from eagle3.drafter.checkpoint import (
    CheckpointError,
    checkpoint_tensors,
    load_checkpoint,
    save_checkpoint,
    weights_digest,
)
from eagle3.drafter.config import DrafterConfigError
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMapError
from tests.drafters import ENGINE_IDS, HIDDEN, SLOTS, make_contract, make_drafter, make_vocab

pytestmark = pytest.mark.unit


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "drafter", make_drafter())


def save(folder: Path, drafter: Drafter) -> Path:
    vocab = make_vocab()
    save_checkpoint(folder, drafter, vocab, make_contract(drafter, vocab), ENGINE_IDS)
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm", [NormFlags(), NormFlags(norm_before_fc=True), NormFlags(fc_norm=True, norm_output=True)]
)
def test_a_reloaded_drafter_gives_bit_equal_logits(tmp_path: Path, norm: NormFlags, dtype: torch.dtype) -> None:
    drafter = make_drafter(norm=norm).to(dtype)
    loaded = load_checkpoint(save(tmp_path / "drafter", drafter))
    assert loaded.drafter.config == drafter.config
    assert loaded.engine_ids == ENGINE_IDS
    assert torch.equal(loaded.vocab.target_ids, make_vocab().target_ids)
    assert loaded.contract == make_contract(drafter, make_vocab())
    aux = torch.randn(2, 5, SLOTS * HIDDEN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert torch.equal(loaded.drafter.logits(loaded.drafter.fuse(aux)), drafter.logits(drafter.fuse(aux)))
    for (name, before), (again, after) in zip(
        drafter.state_dict().items(), loaded.drafter.state_dict().items(), strict=True
    ):
        assert name == again
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_the_folder_holds_three_files_and_the_contracts_digest(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "contract.json", "model.safetensors"]
    assert [p.name for p in saved.parent.iterdir()] == ["drafter"], "nothing partial is left"
    config = json.loads((saved / "config.json").read_text())
    assert config["eagle3_contract_sha256"] == make_contract(make_drafter(), make_vocab()).digest()
    assert config["dtype"] == "float32"


def test_the_digest_depends_on_names_types_shapes_and_values_only(saved: Path) -> None:
    tensors = checkpoint_tensors(make_drafter(), make_vocab())
    digest = weights_digest(tensors)
    assert weights_digest(dict(reversed(tensors.items()))) == digest
    assert weights_digest(load_file(saved / "model.safetensors")) == digest
    fc = tensors["fc.weight"]
    changed = fc.clone()
    changed[3, 7] += 1e-7 * changed[3, 7].abs().clamp_min(1)
    for other in (changed, fc.reshape(-1, HIDDEN), fc.bfloat16(), fc.T.contiguous().T.reshape(-1)):
        assert weights_digest({**tensors, "fc.weight": other}) != digest
    renamed = {("fc2.weight" if name == "fc.weight" else name): t for name, t in tensors.items()}
    assert weights_digest(renamed) != digest


def test_a_missing_tensor_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.pop("midlayer.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing midlayer\.mlp\.up_proj\.weight \[48, 32\]"):
        load_checkpoint(saved)


def test_a_renamed_tensor_is_named_with_its_new_name(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"fc_proj.weight": t.pop("fc.weight")}))
    with pytest.raises(
        CheckpointError, match=r"missing fc\.weight \[32, 96\] \(renamed\? fc_proj\.weight has its shape"
    ):
        load_checkpoint(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"fc.weight": t["fc.weight"][:, :HIDDEN].contiguous()}))
    with pytest.raises(CheckpointError, match=r"fc\.weight is \[32, 32\], config\.json asks for \[32, 96\]"):
        load_checkpoint(saved)


def test_an_unexpected_tensor_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"unexpected midlayer\.self_attn\.q_proj\.bias"):
        load_checkpoint(saved)


def test_weights_of_another_or_of_mixed_type_are_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"norm.weight": t["norm.weight"].bfloat16()}))
    with pytest.raises(CheckpointError, match="mixed types: BF16, F32"):
        load_checkpoint(saved)
    edit_tensors(saved, lambda t: t.update({"norm.weight": t["norm.weight"].double()}))
    with pytest.raises(CheckpointError, match=r"norm\.weight is of type F64"):
        load_checkpoint(saved)


def test_all_problems_are_named_at_once(saved: Path) -> None:
    edit_tensors(saved, lambda t: (t.pop("d2t"), t.update({"norm.weight": torch.ones(HIDDEN + 1)})))
    with pytest.raises(CheckpointError, match=r"missing d2t \[48\]; norm\.weight is \[33\]"):
        load_checkpoint(saved)


def test_a_vocabulary_map_of_ids_instead_of_offsets_is_refused(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"d2t": t["d2t"] + torch.arange(len(t["d2t"]))}))
    with pytest.raises(VocabMapError, match="instead of offsets"):
        load_checkpoint(saved)


def test_one_changed_weight_breaks_the_contract(saved: Path) -> None:
    edit_tensors(saved, lambda t: t["fc.weight"].view(-1)[5].add_(1.0))
    with pytest.raises(ContractError, match="weights digest"):
        load_checkpoint(saved)


def test_weights_of_another_drafter_under_this_contract_are_refused(saved: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", make_drafter(seed=1))
    (other / "model.safetensors").replace(saved / "model.safetensors")
    with pytest.raises(ContractError, match="weights digest"):
        load_checkpoint(saved)


def test_an_edited_contract_is_refused(saved: Path) -> None:
    path = saved / "contract.json"
    path.write_bytes(path.read_bytes().replace(b"made-up", b"another"))
    with pytest.raises(ContractError, match=r"config\.json was exported with"):
        load_checkpoint(saved)


def test_ids_that_capture_something_else_than_the_contract_says_are_refused(tmp_path: Path) -> None:
    drafter, vocab = make_drafter(), make_vocab()
    shifted = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(2, 4, 6))
    with pytest.raises(ContractError, match=r"layers\.1.*layers\.2.*that is what sglang 0\.5\.23"):
        save_checkpoint(tmp_path / "drafter", drafter, vocab, make_contract(drafter, vocab), shifted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capture": CaptureSpec(aux=("layers.3", "layers.1", "layers.5"))}, "captured points"),
        ({"norm": NormFlags(norm_output=True)}, "norm flags"),
        ({"draft_vocab_size": 47}, "draft vocabulary"),
        ({"vocab_map_sha256": "0" * 64}, "draft vocabulary's digest"),
        ({"weights_sha256": "0" * 64}, "weights digest"),
    ],
)
def test_a_contract_that_describes_another_drafter_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    drafter, vocab = make_drafter(), make_vocab()
    contract = make_contract(drafter, vocab).model_copy(update=change)
    with pytest.raises(ContractError, match=message):
        save_checkpoint(tmp_path / "drafter", drafter, vocab, contract, ENGINE_IDS)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_never_overwritten(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        save(saved, make_drafter(seed=1))
    assert (saved / "model.safetensors").read_bytes() == before


def test_a_save_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)  # contract.json, the last of the three files
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "drafter", make_drafter())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "contract.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load_checkpoint(saved)


@pytest.mark.parametrize("keep", [4, 300, 9000])
def test_a_truncated_weights_file_is_refused(saved: Path, keep: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(saved)


def test_a_header_of_absurd_size_is_refused_before_it_is_read(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(CheckpointError, match="1099511627776 bytes is refused"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    "header", [b"[1, 2]", b'{"fc.weight": 3}', b'{"fc.weight": {"dtype": "F32"}}', b"[" * 5000, b"\xff\xfe"]
)
def test_a_header_that_is_none_is_refused(saved: Path, header: bytes) -> None:
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="header"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["config.json", "contract.json"])
def test_an_oversized_json_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(CheckpointError, match="refused"):
        load_checkpoint(saved)


def test_a_config_that_asks_for_absurd_tensors_is_refused_before_any_is_made(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["intermediate_size"] = 10**12
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterConfigError, match="intermediate_size"):
        load_checkpoint(saved)
