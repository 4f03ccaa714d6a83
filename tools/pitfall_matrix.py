"""Plant every mistake of the catalogue on every target, and write which were found into docs/evidence.md.

    python tools/pitfall_matrix.py [--stages llama qwen3 ...] [--dtypes float32 bfloat16] [--write]

Each column is a target in one dtype; a cell says whether the right check failed and named the cause. With --write the
table replaces the one between the markers in docs/evidence.md. Exit code 1 where a mistake was not found.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from infra.quiet import quiet_libraries
from tests.pitfalls import MISTAKES, miss
from tests.stages import STAGES, make_stage

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence.md"
BEGIN, END = "<!-- matrix: written by tools/pitfall_matrix.py -->", "<!-- end of matrix -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--write", action="store_true", help="into docs/evidence.md")
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    columns: dict[str, dict[str, str]] = {}
    for name in options.stages:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as scratch:
                columns[f"{name} {dtype}"] = run(name, getattr(torch, dtype), Path(scratch))
    table = markdown(columns)
    sys.stdout.write(table)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}", encoding="utf-8")
    return 1 if any(why for column in columns.values() for why in column.values()) else 0


def run(name: str, dtype: torch.dtype, folder: Path) -> dict[str, str]:
    """For each mistake, why it was not found; empty where it was."""
    started = time.monotonic()
    stage = make_stage(name, dtype, folder)
    missed = {}
    for number, mistake in enumerate(MISTAKES):
        missed[mistake.name] = miss(mistake, stage.scene(folder / str(number)), stage.reference)
        if missed[mistake.name]:
            tell(f"{stage.name}: {mistake.name} was not found: {missed[mistake.name]}")
        for file in (folder / str(number)).rglob("*.safetensors"):
            file.unlink()
    found = sum(not why for why in missed.values())
    tell(f"{stage.name}: {found} of {len(missed)} found, {time.monotonic() - started:.0f} s")
    return missed


def tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def markdown(columns: dict[str, dict[str, str]]) -> str:
    found = sum(not why for column in columns.values() for why in column.values())
    total = sum(map(len, columns.values()))
    lines = [
        f"{found} of {total} found with their cause.",
        "",
        f"| kind | mistake | found by | {' | '.join(columns)} |",
        f"| --- | --- | --- | {' | '.join(':-:' for _ in columns)} |",
    ]
    kind = ""
    for mistake in MISTAKES:
        cells = " | ".join("**no**" if column[mistake.name] else "✓" for column in columns.values())
        lines.append(f"| {mistake.kind if mistake.kind != kind else ''} | {mistake.name} | {mistake.check} | {cells} |")
        kind = mistake.kind
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
