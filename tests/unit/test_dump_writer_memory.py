"""A dump of any size passes through a process of one size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.writer import CapturedSample, DumpWriter

pytestmark = pytest.mark.unit

WRITE = """
import resource, sys
from pathlib import Path
import torch
from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.writer import CapturedSample, DumpWriter

folder, num_samples, shard_mib = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))
stored = []
def take(path, shard):
    stored.append(path.stat().st_size)
    path.unlink()
writer = DumpWriter(folder, spec, hidden_size=1024, shard_bytes=shard_mib * 2**20, on_shard=take)
torch.randn(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for n in range(num_samples):
    rows = torch.randn(256, 4 * 1024).bfloat16()
    states = dict(zip(spec.points, rows.split(1024, dim=1), strict=True))
    ids = torch.randint(0, 500, (256,))
    writer.add(CapturedSample(str(n), ids, 1, 200, 57, "length", states))
writer.finish()
print(sum(stored) // 2**20, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_shard_for_a_dump_ten_times_as_large(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), "500", "32"], check=True, capture_output=True, text=True
    )
    written, grown = map(int, done.stdout.split())
    assert written >= 960
    assert grown <= 96  # MiB: a shard of 32, samples on their way, what torch loads late


def test_a_staged_file_does_not_stay_mapped_while_its_shard_is_packed(tmp_path: Path) -> None:
    """All of it would: a shard in memory, and the rows of the tap beside it once more."""
    spec = CaptureSpec(aux=(CapturePoint("layers.1"),))
    staged = tmp_path / "staged.safetensors"
    save_file({"aux": torch.ones(64, 1024), "final": torch.ones(64, 1024), "ids": torch.arange(64)}, staged)
    writer = DumpWriter(tmp_path / "dump", spec, hidden_size=1024)
    with safe_open(staged, framework="pt") as file:
        states = dict(zip(spec.points, (file.get_tensor("aux"), file.get_tensor("final")), strict=True))
        sample = CapturedSample("a", file.get_tensor("ids"), 1, 60, 5, "length", states)
    assert str(staged) in Path("/proc/self/maps").read_text()
    writer.add(sample)
    del states, sample
    assert str(staged) not in Path("/proc/self/maps").read_text()
