"""The last words of a run: what a mismatch costs, its cause and its cure."""

import pytest

from eagle3.acceptance.definitions import RequestCounts, SpecSettings, summarise
from eagle3.capture import CapturePoint
from flows.show import closing_words
from tasks.results import RIGHT, WRONG, BenchmarkResult, PipelineResult, ServedFigure

pytestmark = pytest.mark.unit

FINDING = "The server delivers embed, layers.2, layers.15. Right: [2, 15, 27]."


def figure(label: str, points: tuple[str, ...], correct: int, **more: object) -> ServedFigure:
    counts = RequestCounts(verifications=10, correct=correct, proposed=30, histogram=(10 - correct, correct, 0, 0))
    return ServedFigure(
        label=label,
        points=tuple(map(CapturePoint, points)),
        prompts="p.jsonl",
        num_prompts=8,
        tokens_per_second=50.0,
        acceptance=summarise([counts], SpecSettings.chain(3)),
        same_text=8,
        **more,
    )


def words(*served: ServedFigure) -> str:
    measured = BenchmarkResult.model_construct(served=served)
    return closing_words(PipelineResult.model_construct(measured=measured))


def test_a_mismatch_is_told_with_its_cost_its_cause_its_cure_and_what_the_tensors_say() -> None:
    right = figure(RIGHT, ("layers.2", "layers.15", "layers.27"), 7)
    told = ("embed", "layers.2", "layers.15")
    wrong = figure(WRONG, told, 1, right_length=1.8, findings=(FINDING,), delivered=told)
    said = words(right, wrong)
    assert "commit 1.80, the same weights on embed, layers.2, layers.15 commit 1.10" in said
    assert f"The contract check on that server says: {FINDING}" in said
    assert "slot 1 is embed, slot 2 is layers.2, slot 3 is layers.15." in said


def test_what_nobody_looked_at_is_not_told() -> None:
    right = figure(RIGHT, ("layers.2",), 7)
    said = words(right, figure(WRONG, ("layers.1",), 1, right_length=1.8))
    assert "contract check" not in said
    assert "slot 1" not in said
    assert "1.80" not in words(right)
