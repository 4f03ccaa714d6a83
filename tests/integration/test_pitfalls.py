"""The whole catalogue on every target and in both dtypes: the tiny ones, and SmolLM2.

`tools/pitfall_matrix.py` does the same and writes the table into docs/evidence.md.
"""

from pathlib import Path

import pytest
import torch

from eagle3.dump.reader import DumpReader
from eagle3.evidence.validate import validate_dump
from tests.pitfalls import MISTAKES, miss
from tests.stages import STAGES, make_stage

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STAGES)
def test_every_mistake_is_found_and_the_right_dump_passes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stage = make_stage(name, dtype, tmp_path)
    clean = stage.scene(tmp_path / "clean")
    clean.write()
    report = validate_dump(DumpReader.open(clean.folder), clean.captured.parts, reference=stage.reference)
    assert [(c.name, c.sentence) for c in report.failed()] == []
    missed = {m.name: miss(m, stage.scene(tmp_path / str(n)), stage.reference) for n, m in enumerate(MISTAKES)}
    assert {name: why for name, why in missed.items() if why} == {}
