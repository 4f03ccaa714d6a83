"""The mistakes of the story, made on purpose: each copy of the drafter differs from it in one thing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.drafter.checkpoint import Checkpoint, contract_for, load_checkpoint, save_checkpoint
from eagle3.dump.manifest import TokenizerIdentity
from eagle3.refs import DumpRef
from eagle3.target import Target
from tasks.story import FIX, OLD, RIGHT, SWAPPED, UP, Variant, story
from tests.drafters import HIDDEN, SLOTS, make_drafter, make_vocab
from tests.drafters import make_contract as contract_of

pytestmark = pytest.mark.unit

VERSION = "0.5.23"


def saved(target: Target, points: tuple[str, ...], folder: Path) -> Checkpoint:
    drafter, vocab = make_drafter(), make_vocab()
    aux = tuple(CapturePoint(point) for point in points)
    identity = contract_of(drafter, vocab).target.model_copy(update={"model_class": target.model_class})
    contract = contract_for(
        drafter,
        vocab,
        capture=CaptureSpec(aux=aux),
        target=identity,
        tokenizer=TokenizerIdentity(sha256="c" * 64),
        dump=DumpRef(uri="s3://eagle3/dumps/made-up", sha256="d" * 64),
        report_sha256="e" * 64,
    )
    ids = ids_of(aux, engine="sglang", version=VERSION, model_class=target.model_class, num_layers=target.num_layers)
    save_checkpoint(folder, drafter, vocab, contract, ids)
    return load_checkpoint(folder)


def ids_in(variant: Variant) -> list[int]:
    config = json.loads((variant.folder / "config.json").read_text())
    ids: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return ids


def variants(target_folder: Path, points: tuple[str, ...], work: Path) -> dict[str, Variant]:
    target = Target.open(target_folder)
    checkpoint = saved(target, points, work / "drafter")
    made = story(work / "drafter", checkpoint, target, work / "variants", VERSION)
    return {variant.name: variant for variant in made}


def test_on_a_llama_the_lists_are_the_outputs_of_layers(tiny_llama: Path, tmp_path: Path) -> None:
    made = variants(tiny_llama, ("layers.1", "layers.3", "layers.5"), tmp_path)
    assert {name: ids_in(variant) for name, variant in made.items()} == {
        RIGHT: [1, 3, 5],
        FIX: [-1, 1, 3],
        UP: [2, 4, 6],
        SWAPPED: [1, 3, 5],
    }


def test_on_a_deepseek_they_are_boundaries_and_the_old_list_is_one_more(tiny_deepseek: Path, tmp_path: Path) -> None:
    made = variants(tiny_deepseek, ("layers.2", "layers.4", "layers.5"), tmp_path)
    assert {name: ids_in(variant) for name, variant in made.items()} == {
        RIGHT: [3, 5, 6],
        FIX: [0, 3, 5],
        UP: [4, 6, 7],
        SWAPPED: [3, 5, 6],
        OLD: [2, 4, 5],
    }


def test_only_what_was_changed_differs(tiny_llama: Path, tmp_path: Path) -> None:
    made = variants(tiny_llama, ("layers.1", "layers.3", "layers.5"), tmp_path)
    original = load_file(made[RIGHT].folder / "model.safetensors")
    for name in (FIX, UP):
        tensors = load_file(made[name].folder / "model.safetensors")
        assert all(torch.equal(tensors[tensor], value) for tensor, value in original.items())
    swapped = load_file(made[SWAPPED].folder / "model.safetensors")
    assert {name for name, value in original.items() if not torch.equal(swapped[name], value)} == {"fc.weight"}
    # fc reads x as W x: with blocks and slots exchanged alike nothing would change, with the blocks alone it does.
    slots = torch.randn(5, SLOTS, HIDDEN)
    both = slots[:, [0, 2, 1]].flatten(1) @ swapped["fc.weight"].T
    torch.testing.assert_close(both, slots.flatten(1) @ original["fc.weight"].T)
    assert not torch.allclose(slots.flatten(1) @ swapped["fc.weight"].T, both)
