"""What a benchmark compares a running server's states with."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eagle3.target import Target
from tasks.deployed import reference_here

pytestmark = pytest.mark.unit


def test_a_target_that_fits_is_its_own_reference(tiny_llama: Path) -> None:
    reference = reference_here(Target.open(tiny_llama))
    assert reference is not None
    assert (reference.name, reference.num_layers) == ("target", 8)


def test_a_target_larger_than_half_of_the_free_memory_is_not_loaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in tiny_llama.glob("*.safetensors"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * size - 2))
    assert reference_here(Target.open(tiny_llama)) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * size))
    assert reference_here(Target.open(tiny_llama)) is not None
