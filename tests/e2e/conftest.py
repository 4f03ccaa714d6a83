"""One stack and one pipeline run on a tiny target, and one demo, for every test of this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.stack import Command, tiny_pipeline, write_prompts


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    command = Command(tmp_path_factory.mktemp("home"))
    command.run("up")
    yield command
    command.run("down")


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("config")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(dict(tiny_pipeline(tiny_llama, write_prompts(folder / "prompts.jsonl", 16)))))
    return path


@pytest.fixture(scope="session")
def result(command: Command, config: Path) -> Any:
    """What `eagle3 run --json` printed."""
    return command.json("run", "--config", str(config))


@pytest.fixture(scope="session")
def demo_command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A home of the demo's own."""
    return Command(tmp_path_factory.mktemp("demo-home"))


@pytest.fixture(scope="session")
def demo_shown(demo_command: Command) -> str:
    """What `eagle3 demo --exit` printed: ten minutes, for the slow tests only."""
    return demo_command.run("demo", "--exit", timeout=1800).stdout
