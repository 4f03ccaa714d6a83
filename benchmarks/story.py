"""The story replayed: one drafter served as it was trained, and in each way in which the field gets it wrong.

    python benchmarks/story.py [--only smollm2 llama deepseek] [--drafter FOLDER] [--prompts 96] [--threads 2]

A server for each variant, one after the other, on the same prompts; prints a markdown table for each target, and what
the contract check and the delivered tensors say. SmolLM2's drafter is the newest that `eagle3 demo` trained here, or
`--drafter`; without one the demo is run first (ten minutes). The tiny targets and their drafters are trained here, in
about a minute each.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from eagle3.contract import CONTRACT_NAME
from infra.quiet import quiet_libraries
from infra.settings import Settings
from tasks.story import markdown
from tests.replays import DEEPSEEK_POINTS, LLAMA_POINTS, Played, play_smollm2, play_tiny
from tests.trained_targets import train_deepseek, train_drafter, train_llama

TARGETS = ("smollm2", "llama", "deepseek")
DRAFTER_STEPS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--drafter", type=Path, help="a checkpoint for SmolLM2, e.g. .eagle3/cache/drafters/<digest>")
    parser.add_argument(
        "--prompts", type=int, default=96, help="of a tiny target; SmolLM2 gets the demo's held-out ones"
    )
    parser.add_argument("--threads", type=int, default=2, help="of SmolLM2's servers")
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)  # tiny products: two threads wait for each other, and take ten times as long
    for name in options.only:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            played = play(name, Path(folder), options)
        print(f"## {name}: {played.prompts} prompts, {time.monotonic() - start:.0f} s\n")
        print(markdown(tuple(played.rows.values())), flush=True)


def play(name: str, work: Path, options: argparse.Namespace) -> Played:
    if name == "smollm2":
        settings = Settings()
        return play_smollm2(options.drafter or demo_drafter(settings), work, settings, threads=options.threads)
    train, points = (train_llama, LLAMA_POINTS) if name == "llama" else (train_deepseek, DEEPSEEK_POINTS)
    target = train(work / "target")
    drafter = train_drafter(target, points, work / "drafter", steps=DRAFTER_STEPS)
    return play_tiny(target, drafter, work, prompts=options.prompts)


def demo_drafter(settings: Settings) -> Path:
    """The newest drafter of the demo on this machine."""
    folder = settings.root / "cache" / "drafters"

    def found() -> list[Path]:
        return sorted(
            (path.parent for path in folder.glob(f"*/{CONTRACT_NAME}")), key=lambda path: path.stat().st_mtime
        )

    if not found():
        print("no drafter here yet: running the demo first", file=sys.stderr)
        subprocess.run([str(Path(sys.executable).parent / "eagle3"), "demo", "--exit"], check=True, stdout=sys.stderr)
    return found()[-1]


if __name__ == "__main__":
    main()
