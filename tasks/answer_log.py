"""Answers that arrived, beside the staged rows on this machine: with them a killed extraction goes on where it was."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.sglang.client import Generated

ANSWERS_NAME = "answers.jsonl"
MAX_LINE_BYTES = 2**26


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    answer: Generated


class AnswerLog:
    """JSON lines, added to by several threads. A line that a kill cut short is passed over."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file: BinaryIO | None = None

    def read(self, wanted: Collection[str]) -> dict[str, Generated]:
        """The last answer to each of the wanted prompts, by the prompt's id."""
        found: dict[str, Generated] = {}
        if self._path.is_file():
            with self._path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    try:
                        entry = _Line.model_validate_json(line)
                    except ValidationError:
                        continue
                    if entry.prompt in wanted:
                        found[entry.prompt] = entry.answer
        return found

    def keep(self, prompt: str, answer: Generated) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._path.open("ab")
                self._file.write(b"\n")  # ends a line that was cut short
            self._file.write(_Line(prompt=prompt, answer=answer).model_dump_json().encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
