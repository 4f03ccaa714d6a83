"""What `eagle3 dump verify` costs: its CPU time over that of `sha256sum` (and of openssl's) on the same files.

    python benchmarks/verify.py [--gib 2] [--repeats 3] [--json]

Two dumps are written to a temporary folder (a quarter of the size, and the size), and the commands run in turns on
each. CPU time is user + system of the process and its children, so that a busy machine changes little; medians. The
slope between the two dumps is the price of a byte; what is left is the price of starting Python. coreutils' sha256sum
uses the processor's SHA instructions only where it is built with OpenSSL: openssl's own is the harder comparison.

Exit code 1 where verify costs more than 1.5 times sha256sum on the larger dump.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from eagle3.dump.writer import CapturedSample
from eagle3.evidence.alignment import FinalStateParts
from tests import targets
from tests.dumps import SPEC, Capture, identity_of, write_dump

GIB = 2**30
SHARD_BYTES = GIB // 2
ROWS = 8192
"""Rows of a sample."""
ROW_BYTES = 4 * targets.HIDDEN * 4 + 9
"""Four states in float32, an id, a place in the mask."""
BOUND = 1.5
SPARE_BYTES = 2 * GIB
VERIFY, COREUTILS, OPENSSL = "eagle3 dump verify", "sha256sum", "openssl sha256"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the larger dump")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [int(options.gib * GIB / 4), int(options.gib * GIB)]
    with tempfile.TemporaryDirectory() as scratch:
        free = shutil.disk_usage(scratch).free
        if free < sum(sizes) + SPARE_BYTES:
            print(f"{scratch} has {free / GIB:.1f} GiB free: {sum(sizes) / GIB:.1f} are needed, and 2 to spare")
            return 1
        target = targets.make_llama(Path(scratch) / "target")
        dumps = [make(target, Path(scratch) / f"dump-{size}", size) for size in sizes]
        seconds = [measure(folder, options.repeats) for folder in dumps]
        figures = summary(seconds, [sum(file.stat().st_size for file in folder.iterdir()) for folder in dumps])
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<44}{value}" for name, value in figures.items()))
    return 0 if figures[f"ratio to {COREUTILS}"] <= BOUND else 1


def make(target: Path, folder: Path, size: int) -> Path:
    """A dump of about `size` bytes; its states are random, nothing here looks at them."""
    generator = torch.Generator().manual_seed(0)
    sample = CapturedSample(
        id="",
        input_ids=torch.randint(3, targets.VOCAB, (ROWS,), generator=generator),
        last_token_id=3,
        prompt_tokens=ROWS // 2,
        output_tokens=ROWS // 2 + 1,
        finish_reason="length",
        states={point: torch.randn(ROWS, targets.HIDDEN, generator=generator) for point in SPEC.points},
    )
    count = max(1, size // (ROWS * ROW_BYTES))
    samples = tuple(CapturedSample(**vars(sample) | {"id": f"p{n:06d}"}) for n in range(count))
    nothing = FinalStateParts(head=torch.empty(0), final_norm=torch.empty(0), rms_norm_eps=0.0)
    write_dump(Capture(target, identity_of(target), samples, nothing, ROWS), folder, shard_bytes=SHARD_BYTES)
    return folder


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each command on the dump."""
    files = sorted(str(path) for path in folder.iterdir())
    commands = {
        VERIFY: [str(Path(sys.executable).with_name("eagle3")), "dump", "verify", str(folder)],
        COREUTILS: ["sha256sum", *files],
    }
    if shutil.which("openssl"):
        commands[OPENSSL] = ["openssl", "dgst", "-sha256", *files]
    turns = [{name: cpu_seconds(command) for name, command in commands.items()} for _ in range(repeats)]
    return {name: statistics.median(turn[name] for turn in turns) for name in commands}


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def summary(seconds: list[dict[str, float]], sizes: list[int]) -> dict[str, float]:
    """The larger dump's figures, the price of a byte from both."""
    (small, large), (few, many) = seconds, sizes
    slopes = {name: (large[name] - small[name]) / (many - few) for name in large}
    figures = {"GB": round(many / 1e9, 2)}
    figures |= {f"CPU seconds, {name}": round(value, 2) for name, value in large.items()}
    figures |= {f"CPU seconds a GB, {name}": round(slope * 1e9, 2) for name, slope in slopes.items()}
    figures[f"CPU seconds before the first byte, {VERIFY}"] = round(large[VERIFY] - slopes[VERIFY] * many, 2)
    figures |= {f"ratio to {name}": round(large[VERIFY] / large[name], 2) for name in large if name != VERIFY}
    return figures


if __name__ == "__main__":
    sys.exit(main())
