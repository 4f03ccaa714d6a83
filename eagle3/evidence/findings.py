"""What a check found wrong: counted, and the first few in words."""


class Findings:
    """Counts what was found and keeps the first few in words."""

    def __init__(self, keep: int = 3) -> None:
        self.count = 0
        self._keep, self._first = keep, list[str]()

    def add(self, text: str) -> None:
        self.count += 1
        if len(self._first) < self._keep:
            self._first.append(text.rstrip("."))

    def join(self, later: "Findings") -> None:
        """What was found after this, by another worker, as if it had been found here."""
        self.count += later.count
        self._first += later._first[: self._keep - len(self._first)]

    def __str__(self) -> str:
        more = self.count - len(self._first)
        return "; ".join(self._first) + (f"; and {more} more" if more else "")
