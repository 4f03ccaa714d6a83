"""Where the command prints: results on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle3.errors import Eagle3Error

# Exit codes of commands that judge; 0 is proven, 2 is typer's own for wrong usage.
REFUTED, NOT_CHECKED = 1, 3

# A pipe or a log has no width of its own: lines stay whole there.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 200)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def plain(text: str) -> str:
    """Text from a foreign file (sample ids, names) for a terminal: control characters are spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def checking() -> Iterator[None]:
    """Whatever stops a check is no verdict: the message, and exit code 3."""
    try:
        yield
    except Eagle3Error as error:
        err.print(plain(f"could not be checked: {error}"), markup=False, soft_wrap=True)
        raise typer.Exit(NOT_CHECKED) from None
