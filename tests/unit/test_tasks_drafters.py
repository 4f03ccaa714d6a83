"""The drafter that a training starts from: opened by its contract or by what the parameters say, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.capture import CapturePoint
from eagle3.drafter.checkpoint import checkpoint_tensors, save_checkpoint
from eagle3.drafter.tensors import CheckpointError, CheckpointUnreadable
from eagle3.refs import DumpRef
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.loop import train
from infra.settings import Settings
from tasks.drafters import drafter_at, open_parent
from tasks.params import ParamsError, ParentParams, PipelineParams
from tests.drafters import ENGINE_IDS, make_contract, make_drafter, make_learnable_dump, make_vocab
from tests.unit.test_opening import LLAMA, TARGET, public, tensors_of

pytestmark = pytest.mark.unit

POINTS = tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return Target.open(folder, config_only=True)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


def test_ours_is_opened_by_its_contract(target: Target, settings: Settings, tmp_path: Path) -> None:
    drafter = make_drafter()
    save_checkpoint(tmp_path / "d", drafter, make_vocab(), make_contract(drafter, make_vocab()), ENGINE_IDS)
    for named in (str(tmp_path / "d"), (tmp_path / "d").as_uri()):
        opened = open_parent(ParentParams(drafter=named), POINTS, target, settings)
        assert opened.contract is not None
        assert torch.equal(opened.drafter.fc.weight, drafter.fc.weight)
    with pytest.raises(CheckpointError, match="the parent drafter reads layers"):
        open_parent(ParentParams(drafter=str(tmp_path / "d")), POINTS[:2], target, settings)


def test_a_public_one_needs_its_engine_and_version(target: Target, settings: Settings, tmp_path: Path) -> None:
    folder = public(tmp_path / "d", LLAMA, tensors_of(make_drafter()))
    with pytest.raises(ParamsError, match=r"has no contract\.json: name the engine and the version"):
        open_parent(ParentParams(drafter=str(folder)), POINTS, target, settings)
    named = ParentParams(drafter=str(folder), engine="sglang", engine_version="0.5.23")
    assert open_parent(named, POINTS, target, settings).points == POINTS


def test_a_parent_that_is_not_there_is_named(target: Target, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="there is no folder"):
        open_parent(ParentParams(drafter=str(tmp_path / "nowhere")), POINTS, target, settings)
    assert drafter_at("~/drafter", settings).is_absolute()


def test_the_pipeline_hands_its_parent_to_the_training() -> None:
    parent = ParentParams(drafter="s3://eagle3/drafters/x/1")
    params = PipelineParams(parent=parent)
    assert params.train(dump=_dump()).parent == parent
    assert PipelineParams().train(dump=_dump()).parent is None


def test_a_public_drafter_is_a_start_that_keeps_what_it_can(target: Target, settings: Settings, tmp_path: Path) -> None:
    """Fine-tuning begins at the parent's own acceptance, with its shape and its draft vocabulary."""
    dump = make_learnable_dump()
    recipe = TrainingConfig(budget=60, budget_unit="steps", batch_size=8, learning_rate=1e-2, bf16=False)
    first = train(dump.train, dump.heldout, dump.parts, make_drafter().config, dump.vocab, recipe)
    tensors = checkpoint_tensors(first.drafter, dump.vocab)
    folder = public(tmp_path / "d", LLAMA, {name: tensors[name] for name in tensors if name != "t2d"})
    named = ParentParams(drafter=str(folder), engine="sglang", engine_version="0.5.23")
    parent = open_parent(named, POINTS, target, settings)

    gentle = recipe.model_copy(update={"budget": 1.0, "learning_rate": 1e-5})
    second = train(
        dump.train,
        dump.heldout,
        dump.parts,
        parent.drafter.config,
        parent.vocab,
        gentle,
        parent=checkpoint_tensors(parent.drafter, parent.vocab),
    )
    assert first.acceptance is not None
    assert first.acceptance.length > first.metrics["heldout_acceptance_length_before"] + 0.3
    assert second.metrics["heldout_acceptance_length_before"] == first.acceptance.length
    assert load_file(folder / "model.safetensors").keys() == tensors.keys() - {"t2d"}, "the parent stays as it was"


def _dump() -> DumpRef:
    return DumpRef(uri="s3://eagle3/dumps/x", sha256="a" * 64)
