"""A dump of any size passes through a process of one size."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.slow]

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


def test_memory_is_that_of_a_shard_for_a_dump_ten_times_as_large(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), "500", "32"], check=True, capture_output=True, text=True
    )
    written, grown = map(int, done.stdout.split())
    assert written >= 960
    assert grown <= 96  # MiB: a shard of 32, samples on their way, what torch loads late
