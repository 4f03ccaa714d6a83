"""The page on evidence says what the code does: its tables are those of today's mistakes and thresholds."""

import re
from pathlib import Path

import pytest

from eagle3.digests import sha256_json
from eagle3.evidence.report import CHECK_SET_VERSION
from eagle3.evidence.standing import thresholds
from tests.pitfalls import MISTAKES

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()


def test_the_matrix_has_a_row_for_every_mistake_and_no_empty_mark() -> None:
    table = PAGE[PAGE.index("<!-- matrix") : PAGE.index("<!-- end of matrix")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]
    assert [(row[1], row[2]) for row in rows] == [(mistake.name, mistake.check) for mistake in MISTAKES]
    marks = [mark for row in rows for mark in row[3:] if mark != "-"]
    assert set(marks) == {"✓"}
    assert f"{len(marks)} of {len(marks)} found with their cause" in table


def test_the_clean_dumps_were_judged_by_todays_checks_and_thresholds() -> None:
    found = re.search(r"Check set (\d+), thresholds `([0-9a-f]{12})`", PAGE)
    assert found
    assert (int(found[1]), found[2]) == (CHECK_SET_VERSION, sha256_json(thresholds())[:12])
