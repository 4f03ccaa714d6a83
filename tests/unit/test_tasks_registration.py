"""Which drafters are registered, and which are not."""

import pytest

from eagle3.acceptance.definitions import AcceptanceFigure, RequestCounts, SpecSettings, summarise
from eagle3.refs import CheckpointRef
from tasks.registration import NotRegistered, deserved
from tasks.results import PLAIN, RIGHT, BenchmarkResult, ServedFigure

pytestmark = pytest.mark.unit

FIGURE = summarise([RequestCounts(verifications=4, correct=5, proposed=12, histogram=(1, 1, 2))], SpecSettings.chain(3))


def measured(acceptance: AcceptanceFigure | None, same_text: int, dtype: str = "float32") -> BenchmarkResult:
    shared = {"points": None, "prompts": "p", "num_prompts": 4, "tokens_per_second": 9.0}
    plain = ServedFigure(label=PLAIN, acceptance=None, same_text=None, **shared)
    right = ServedFigure(label=RIGHT, acceptance=acceptance, same_text=same_text, **shared)
    checkpoint = CheckpointRef(uri="s3://eagle3/drafters/x", sha256="a" * 64)
    return BenchmarkResult(checkpoint=checkpoint, served=(plain, right), dtype=dtype, mlflow_run_id="r", seconds=1)


def test_a_drafter_that_never_drafted_is_not_registered() -> None:
    with pytest.raises(NotRegistered, match="counted no verification"):
        deserved(measured(None, 4))


def test_a_drafter_that_changes_the_text_is_not_registered_where_float32_was_served() -> None:
    """Whatever was asked for: `auto` is float32 on a CPU."""
    with pytest.raises(NotRegistered, match="3 of 4 answers equal"):
        deserved(measured(FIGURE, 3, "float32"))


def test_other_drafters_are_registered() -> None:
    assert deserved(measured(FIGURE, 4)) == FIGURE
    assert deserved(measured(FIGURE, 3, "bfloat16")) == FIGURE
