"""The command `eagle3` in this process: what it says, and how it ends."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from flows.cli import app


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def eagle3(*arguments: str | Path) -> Said:
    """Run a command; an Eagle3Error that it lets through is raised, as are defects."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return Said(done.exit_code, done.stdout, done.stderr)


def dump(*arguments: str | Path) -> Said:
    return eagle3("dump", *arguments)
