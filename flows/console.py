"""Where the command prints: results on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle3.errors import Eagle3Error

# Exit codes of commands that judge; 0 is proven, 2 is typer's own for wrong usage.
REFUTED, NOT_CHECKED = 1, 3

# A pipe or a log has no width of its own: lines stay whole there.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 200)

JUDGES = "0 proven, 1 refuted, 2 wrong usage, 3 could not be checked"
DOES = "0 done, 1 an error with a message, 2 wrong usage"


def help_end(*examples: str, exits: str) -> str:
    """What stands below a command's options: examples to copy, one a line, and its exit codes."""
    lines = [f"[bold]{example}[/bold]" for example in examples]
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines, f"Exit codes: {exits}"])


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Says on standard error what takes long; on a terminal a spinner shows meanwhile that it goes on."""
    with err.status("working ..."):
        yield lambda sentence: err.print(plain(sentence), markup=False, soft_wrap=True)


Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file with the pipeline's parameters (see configs/). Unset: the demo's."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Other prompts: JSON lines with `prompt`, `turns` or `messages`. Unset: the configuration's.",
    ),
]
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
