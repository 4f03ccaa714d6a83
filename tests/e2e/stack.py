"""A stack of its own for a test module, driven through the command as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
_OURS = ("EAGLE3_", "PREFECT_", "MLFLOW_", "AWS_")


@dataclass(frozen=True)
class Command:
    """`eagle3` with a home of its own; nothing of the caller's environment that names a server reaches it."""

    home: Path

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
        return {**kept, "EAGLE3_HOME": str(self.home), "COLUMNS": "200"}

    def run(self, *args: str, expect: int | None = 0, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `expect` is its exit code, None where any will do."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "eagle3"), *args],
            check=False,
            cwd=PROJECT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if expect is not None and done.returncode != expect:
            raise AssertionError(
                f"eagle3 {' '.join(args)} ended with {done.returncode}, expected {expect}\n"
                f"--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
            )
        return done

    def json(self, *args: str, expect: int | None = 0, timeout: float = 600) -> Any:
        return json.loads(self.run(*args, "--json", expect=expect, timeout=timeout).stdout)


def tiny_pipeline(target: Path, prompts: Path, **changes: Any) -> Mapping[str, Any]:
    """Parameters of a pipeline that a tiny random target goes through in a minute or two."""
    return {
        "name": "tiny",
        "target": {"path": str(target)},
        "prompts": {"file": str(prompts), "num_heldout": 4},
        "capture": {"aux": ["layers.1", "layers.3", "layers.5"]},
        "answers": {"max_new_tokens": 24},
        "serving": {"threads": 1, "streams": 8, "device": "cpu"},
        "drafter": {"draft_vocab_size": 128},
        "training": {"budget": 30, "budget_unit": "steps", "log_every": 5},
        "mismatch": {"points": ["embed", "layers.1", "layers.3"], "num_prompts": 2},
        "register_as": {"model_name": "eagle3-tiny"},
        **changes,
    }


def write_prompts(path: Path, num: int) -> Path:
    """Short prompts, no two alike."""
    path.write_text(
        "".join(json.dumps({"prompt": f"Tom has {n} apples and buys {n + 3} more."}) + "\n" for n in range(num))
    )
    return path
