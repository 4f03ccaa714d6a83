"""Every mistake of the catalogue, planted in a real dump, is found by the right check with its cause named.

Two targets here; all of them, and SmolLM2, in `tests/integration/test_pitfalls.py` (slow).
"""

from pathlib import Path

import pytest
import torch

from eagle3.dump.reader import DumpReader
from eagle3.evidence.validate import validate_dump
from tests.pitfalls import MISTAKES, Mistake, miss
from tests.stages import Stage, make_stage

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage("llama", torch.float32, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage("deepseek-moe", torch.bfloat16, tmp_path_factory.mktemp("experts"))


def test_the_catalogue_names_every_mistake_once() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def test_the_right_dump_passes(llama: Stage, experts: Stage, tmp_path: Path) -> None:
    for stage in (llama, experts):
        scene = stage.scene(tmp_path / stage.name)
        scene.write()
        report = validate_dump(DumpReader.open(scene.folder), scene.captured.parts, reference=stage.reference)
        assert [(c.name, c.sentence) for c in report.checks if c.verdict != "pass"] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_float32_llama_dump_is_found(mistake: Mistake, llama: Stage, tmp_path: Path) -> None:
    assert miss(mistake, llama.scene(tmp_path), llama.reference) == ""


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.check == "attribution"], ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_bfloat16_dump_of_experts_is_found(mistake: Mistake, experts: Stage, tmp_path: Path) -> None:
    assert miss(mistake, experts.scene(tmp_path), experts.reference) == ""
