"""A file written piece by piece is a safetensors file like any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.digests import sha256_file
from eagle3.dump.shard_file import write_tensors

pytestmark = pytest.mark.unit


def test_parts_are_joined_along_their_first_dimension_in_every_type(tmp_path: Path) -> None:
    wide = torch.randn(7, 5)
    tensors = {
        "norm": [wide[:3].bfloat16(), wide[3:4].bfloat16(), wide[4:].bfloat16()],
        "layers.1": [wide[:, 1:4], wide[:2, 1:4]],  # views that are not contiguous
        "half": [wide.half()],
        "mask": [torch.tensor([True, False]), torch.tensor([True])],
        "ids": [torch.tensor([1, 2**40]), torch.tensor([-3])],
    }
    path = tmp_path / "shard.safetensors"
    assert write_tensors(path, tensors) == sha256_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, parts in tensors.items():
        assert found[name].dtype == parts[0].dtype
        assert torch.equal(found[name], torch.cat(parts))


def test_the_same_tensors_give_the_same_bytes_whatever_the_parts_and_the_order(tmp_path: Path) -> None:
    rows = torch.arange(24.0).reshape(6, 4)
    one = write_tensors(tmp_path / "one", {"b": [rows], "a": [rows[:, 0].to(torch.int64)]})
    other = write_tensors(tmp_path / "other", {"a": [rows[:, 0].to(torch.int64)], "b": [rows[:1], rows[1:]]})
    assert one == other


def test_every_tensor_lies_aligned_to_its_type(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write_tensors(
        path, {"mask": [torch.ones(3, dtype=torch.bool)], "half": [torch.ones(5).half()], "x": [torch.ones(1)]}
    )
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    assert (8 + size) % 8 == 0
    assert torch.equal(load_file(path)["half"], torch.ones(5).half())
