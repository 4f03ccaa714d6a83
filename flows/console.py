"""Where the command prints: results on standard output, everything else on standard error."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

# A pipe or a log has no width of its own: lines stay whole there.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 200)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def plain(text: str) -> str:
    """Text from a foreign file (sample ids, names) for a terminal: control characters are spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
