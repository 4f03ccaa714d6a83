"""Progress of a long stage: what, how far, how long still. A Prefect artifact: UI and terminal show the same."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

_EVERY_SECONDS = 1.0
_TELLING = 0.05  # share of the work after which the pace says something


class StageProgress:
    """Counts units of work; the artifact is updated at most once a second, the log at every tenth part.

    with StageProgress("extract", "prompts") as progress:
        progress.begin("answering", total=126)
        progress.advance()
    """

    def __init__(self, stage: str, unit: str) -> None:
        self._stage, self._unit, self._total = stage, unit, 0.0
        self._done, self._started_at, self._shown, self._logged = 0.0, 0.0, 0.0, 0
        self._opened = self._start = time.monotonic()
        self._note = ""
        self._artifact: UUID = create_progress_artifact(0.0, key=f"progress-{stage}", description="starting")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self._done = self._total
            seconds = time.monotonic() - self._opened
            self._show(f"{self._count()} in {seconds:.0f} s")
        else:
            self._show(f"stopped at {self._count()}: {error}"[:400])

    def note(self, text: str) -> None:
        """Say what is going on now (a server starts, a file is uploaded), shown beside the count."""
        self._note = text
        self._shown = 0.0
        self.advance(0)

    def wait(self, text: str) -> Callable[[float, str], None]:
        """Something starts that says nothing of its end: what to call with (seconds so far, its last log line)."""
        return lambda seconds, _line: self.advance(0, f"{text}: {seconds:.0f} s so far")

    def begin(self, note: str, total: float | None = None) -> None:
        """The counted work begins, or goes on after a wait: what came before is not part of its pace."""
        self._total = self._total if total is None else total
        self._start, self._started_at = time.monotonic(), self._done
        self.note(note)

    def advance(self, units: float = 1.0, note: str | None = None) -> None:
        self.at(self._done + units, note)

    def at(self, done: float, note: str | None = None, seconds_left: float | None = None) -> None:
        """Set the count. `seconds_left` where the work knows better than the average so far."""
        self._done = min(done, self._total)
        self._note = self._note if note is None else note
        now = time.monotonic()
        if now - self._shown < _EVERY_SECONDS:
            return
        self._shown = now
        if seconds_left is None and self._total and self._done - self._started_at >= _TELLING * self._total:
            pace = (now - self._start) / (self._done - self._started_at)
            seconds_left = pace * (self._total - self._done)
        left = f", {seconds_left:.0f} s left" if seconds_left is not None else ""
        text = " · ".join(part for part in (f"{self._count()}{left}", self._note) if part)
        self._show(text)
        tenth = int(self._percent() / 10)
        if tenth > self._logged:
            self._logged = tenth
            get_run_logger().info("%s: %s", self._stage, text)

    def _count(self) -> str:
        return f"{self._done:.0f} of {self._total:.0f} {self._unit}" if self._total else ""

    def _percent(self) -> float:
        return 100.0 * self._done / self._total if self._total else 0.0

    def _show(self, text: str) -> None:
        try:
            update_progress_artifact(self._artifact, self._percent(), description=text)
        except (httpx.HTTPError, PrefectException) as error:  # hours of work do not end for a progress bar
            get_run_logger().warning("progress could not be shown: %s", error)
