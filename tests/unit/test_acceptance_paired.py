"""The paired difference of acceptance lengths."""

import random

import pytest

from eagle3.acceptance.definitions import AcceptanceError
from eagle3.acceptance.paired import paired_difference

pytestmark = pytest.mark.unit


def test_a_small_gap_between_unlike_prompts_shows_in_pairs() -> None:
    numbers = random.Random(1)
    baseline = [numbers.uniform(1.2, 3.4) for _ in range(40)]
    found = paired_difference([length - 0.1 + numbers.gauss(0, 0.1) for length in baseline], baseline)
    assert found.high < 0
    assert found.low < -0.1 < found.high
    assert found.num_pairs == 40
    assert found.lower_on > 20


def test_no_gap_has_an_interval_around_zero() -> None:
    numbers = random.Random(4)
    baseline = [numbers.uniform(1.2, 3.4) for _ in range(40)]
    found = paired_difference([length + numbers.gauss(0, 0.2) for length in baseline], baseline)
    assert found.low < 0 < found.high


def test_the_interval_covers_the_true_gap_about_as_often_as_it_says() -> None:
    numbers = random.Random(3)
    covered = 0
    for _ in range(60):
        found = paired_difference([numbers.gauss(-0.2, 0.3) for _ in range(24)], [0.0] * 24)
        covered += found.low <= -0.2 <= found.high
    assert 50 <= covered <= 60


def test_requests_without_a_verification_are_no_pairs() -> None:
    found = paired_difference([1.5, None, 2.0, 1.0], [2.0, 2.0, None, 2.0])
    assert found.num_pairs == 2
    assert found.mean == pytest.approx(-0.75)
    assert str(found) == "-0.75 [-1.00, -0.50]"


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(AcceptanceError, match="3 requests cannot be paired with 2"):
        paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(AcceptanceError, match="1 of 2 requests"):
        paired_difference([1.0, None], [2.0, 2.0])
