"""Acceptance: the identities of the definitions, and what is refused."""

import math

import pytest
from pydantic import ValidationError

from eagle3.acceptance.definitions import (
    AcceptanceError,
    RequestCounts,
    SpecSettings,
    counts_from_sglang,
    length_from_rate,
    rate_from_length,
    summarise,
)

pytestmark = pytest.mark.unit

CHAIN = SpecSettings.chain(3)


def counts(*histogram: int, steps: int = 3) -> RequestCounts:
    """A request of a chain: how many verifications had 0, 1, 2, ... correct drafts."""
    return RequestCounts(
        verifications=sum(histogram),
        correct=sum(i * n for i, n in enumerate(histogram)),
        proposed=sum(histogram) * steps,
        histogram=histogram,
    )


def test_the_aggregate_weighs_verifications_not_requests() -> None:
    figure = summarise([counts(9, 1), counts(0, 0, 0, 2)], CHAIN)
    assert figure.length == 1 + 7 / 12  # not the mean of 1.1 and 4
    assert figure.request_lengths == (1.1, 4.0)


def test_a_chains_length_is_one_plus_k_times_its_rate() -> None:
    figure = summarise([counts(4, 3, 2, 1), counts(7, 0, 1)], CHAIN)
    assert figure.length == pytest.approx(length_from_rate(figure.rate, 3), rel=1e-12)
    assert figure.rate == pytest.approx(rate_from_length(figure.length, 3), rel=1e-12)


def test_unconditional_rates_are_products_of_the_conditional_ones_and_add_up_to_the_length() -> None:
    figure = summarise([counts(4, 3, 2, 1), counts(7, 0, 1)], CHAIN)
    assert figure.unconditional == (7 / 18, 4 / 18, 1 / 18)
    product = 1.0
    for u, a in zip(figure.unconditional, figure.conditional, strict=True):
        assert a is not None
        product *= a
        assert u == pytest.approx(product, rel=1e-12)
    assert figure.length == pytest.approx(1 + sum(figure.unconditional), rel=1e-12)


def test_a_position_that_no_draft_reached_has_no_conditional_rate() -> None:
    figure = summarise([counts(5, 2)], CHAIN)
    assert figure.unconditional == (2 / 7, 0.0, 0.0)
    assert figure.conditional == (2 / 7, 0.0, None)


def test_the_field_story_in_numbers() -> None:
    assert length_from_rate(0.19, 3) == pytest.approx(1.57)
    assert length_from_rate(0.47, 3) == pytest.approx(2.41)


def test_the_standard_error_is_over_requests() -> None:
    figure = summarise([counts(1, 1), counts(1, 0, 1), counts(0, 0, 0, 1)], CHAIN)  # lengths 1.5, 2, 4
    mean = 2.5
    deviation = math.sqrt(((1.5 - mean) ** 2 + (2 - mean) ** 2 + (4 - mean) ** 2) / 2)
    assert figure.length_standard_error == pytest.approx(deviation / math.sqrt(3))
    assert summarise([counts(1, 1)], CHAIN).length_standard_error is None


def test_a_request_without_verification_is_counted_apart() -> None:
    figure = summarise([counts(), counts(1, 1)], CHAIN)
    assert (figure.num_requests, figure.num_without_verification) == (1, 1)
    assert figure.request_lengths == (None, 1.5)


def test_the_settings_are_part_of_the_figure() -> None:
    assert summarise([counts(1)], CHAIN).model_dump()["settings"] == {
        "num_steps": 3,
        "top_k": 1,
        "num_draft_tokens": 4,
        "temperature": 0.0,
    }


def test_a_tree_may_verify_more_drafts_than_it_has_steps() -> None:
    settings = SpecSettings(num_steps=3, top_k=2, num_draft_tokens=7, temperature=0)
    request = RequestCounts(verifications=2, correct=3, proposed=12, histogram=(0, 1, 1))
    assert summarise([request], settings).rate == 3 / 12


def test_no_verification_at_all_says_that_speculation_may_be_off() -> None:
    with pytest.raises(AcceptanceError, match="speculative decoding is off"):
        summarise([counts(), counts()], CHAIN)


def test_counts_of_other_settings_are_refused() -> None:
    with pytest.raises(AcceptanceError, match="other settings"):
        summarise([counts(2, 1, steps=4)], CHAIN)


def test_more_correct_drafts_than_steps_are_refused() -> None:
    deep = RequestCounts(verifications=2, correct=4, proposed=12, histogram=(1, 0, 0, 0, 1))
    with pytest.raises(AcceptanceError, match="drafts 3 steps"):
        summarise([deep], SpecSettings(num_steps=3, top_k=2, num_draft_tokens=7))


@pytest.mark.parametrize(
    "fields",
    [
        {"verifications": 3, "correct": 1, "proposed": 9, "histogram": (1, 1)},
        {"verifications": 2, "correct": 2, "proposed": 6, "histogram": (1, 1)},
        {"verifications": 1, "correct": 3, "proposed": 2, "histogram": (0, 0, 0, 1)},
        {"verifications": -1, "correct": 0, "proposed": 0},
    ],
)
def test_counts_that_contradict_each_other_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RequestCounts.model_validate(fields)


def test_a_chain_of_three_verifies_four_tokens() -> None:
    with pytest.raises(ValidationError, match="verifies 4 tokens"):
        SpecSettings(num_steps=3, top_k=1, num_draft_tokens=3)


def test_sglangs_counts_are_read() -> None:
    meta = {
        "completion_tokens": 12,
        "spec_accept_length": 2.4,
        "spec_verify_ct": 5,
        "spec_num_correct_drafts": 6,
        "spec_num_proposed_drafts": 15,
        "spec_correct_drafts_histogram": [1, 3, 0, 1],
    }
    request = counts_from_sglang(meta)
    assert request == counts(1, 3, 0, 1)
    assert request.length == 1 + 6 / 5  # not SGLang's own 2.4, which counts the prefill token


def test_an_answer_of_one_token_has_no_counts() -> None:
    assert counts_from_sglang({"completion_tokens": 1}).length is None


def test_an_answer_with_half_of_the_counts_is_refused() -> None:
    with pytest.raises(AcceptanceError, match="spec_num_correct_drafts"):
        counts_from_sglang({"spec_verify_ct": 5})
    with pytest.raises(AcceptanceError, match="contradict"):
        counts_from_sglang(
            {
                "spec_verify_ct": 5,
                "spec_num_correct_drafts": 6,
                "spec_num_proposed_drafts": 15,
                "spec_correct_drafts_histogram": [5],
            }
        )
