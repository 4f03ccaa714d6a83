"""No source file over 400 lines: a longer one has more than one reason to change. Exit 1 names the offenders."""

import subprocess
import sys
from pathlib import Path

LIMIT = 400


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    lengths = {name: len(Path(name).read_text().splitlines()) for name in listed if Path(name).is_file()}
    too_long = {name: lines for name, lines in lengths.items() if lines > LIMIT}
    for name, lines in sorted(too_long.items()):
        sys.stderr.write(f"{name}: {lines} lines (limit {LIMIT})\n")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
