"""The measures of a slot's rows, where many rows are bad at once."""

import time

import pytest
import torch

from eagle3.evidence.row_measure import NEAR_MAX, RowMeasure

pytestmark = pytest.mark.unit

ROWS = 32_768


def test_tens_of_thousands_of_bad_rows_are_told_apart_in_a_moment() -> None:
    state = torch.ones(ROWS, 64)
    state[::2, 1] = torch.nan
    state[1::4, 2] = 1.01 * NEAR_MAX * torch.finfo(torch.float32).max
    measure = RowMeasure(64, torch.float32)
    begun = time.monotonic()
    suspects = measure.see(state)
    assert time.monotonic() - begun < 2, "one by one these rows take some 10 s"
    assert suspects.nonfinite == tuple(range(0, ROWS, 2))
    assert suspects.near_max == tuple(range(1, ROWS, 4))
    measures = measure.measures()
    assert (measures["nonfinite_rows"], measures["near_max_rows"]) == (ROWS // 2, ROWS // 4)


def test_a_row_that_is_large_in_its_norm_alone_is_not_suspect() -> None:
    limit = NEAR_MAX * torch.finfo(torch.float16).max
    state = torch.full((3, 64), 0.5 * limit, dtype=torch.float16)  # the norm is four times the limit
    state[1, 7] = -limit
    suspects = RowMeasure(64, torch.float16).see(state)
    assert (suspects.nonfinite, suspects.near_max) == ((), (1,))
