"""Acceptance, defined once.

Per verification the target checks a draft, keeps its correct prefix and adds one token of its own (the bonus token).

- acceptance length AL = 1 + correct drafts / verifications: tokens committed per verification, the bonus included.
- acceptance rate r = correct drafts / proposed drafts. For a chain of k: AL = 1 + k*r.
- unconditional u_i: share of verifications with at least i correct drafts (vLLM's per-position rate). AL = 1 + sum u_i.
- conditional a_i = u_i / u_(i-1): given that the draft before was right (the papers' n-alpha). u_i = a_1 * ... * a_i.

Other names for the same counts: vLLM's mean acceptance length is 1 + accepted / drafts, our AL. SGLang's own
`spec_accept_length` is completion tokens / verifications: it counts the first token, which prefill gave, and is cut by
the token limit, so we compute AL from its counts instead. A figure means nothing without its settings: it is stored
with them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.errors import Eagle3Error, first_fault


class AcceptanceError(Eagle3Error, ValueError):
    """Counts that contradict each other or their settings, or no verification at all."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SpecSettings(_Model):
    """How drafts are made and judged: stored with every figure."""

    num_steps: int = Field(
        gt=0, title="Draft steps", description="Tokens that the drafter drafts in a row; k of a chain"
    )
    top_k: int = Field(1, gt=0, title="Top-k", description="Candidates per step; 1 is a chain, more is a tree")
    num_draft_tokens: int = Field(gt=1, title="Draft tokens", description="Tokens per verification, the root included")
    temperature: float = Field(0.0, ge=0, title="Temperature", description="0 is greedy")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise AcceptanceError(
                f"a chain of {self.num_steps} steps verifies {self.num_steps + 1} tokens (its root and the drafts), "
                f"not {self.num_draft_tokens}"
            )
        return self

    @classmethod
    def chain(cls, num_steps: int, temperature: float = 0.0) -> Self:
        """The usual chain: top-k 1, k+1 draft tokens."""
        return cls(num_steps=num_steps, top_k=1, num_draft_tokens=num_steps + 1, temperature=temperature)


class RequestCounts(_Model):
    """What one request counted."""

    verifications: int = Field(ge=0)
    correct: int = Field(ge=0, description="Correct drafts, the bonus tokens not included")
    proposed: int = Field(ge=0, description="Drafts that were verified, the root not included")
    histogram: tuple[int, ...] = Field((), description="histogram[i]: verifications with exactly i correct drafts")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(self.histogram) != self.verifications:
            raise AcceptanceError(
                f"the histogram {self.histogram} does not add up to {self.verifications} verifications"
            )
        if sum(i * n for i, n in enumerate(self.histogram)) != self.correct:
            raise AcceptanceError(f"the histogram {self.histogram} does not hold {self.correct} correct drafts")
        if self.correct > self.proposed:
            raise AcceptanceError(f"{self.correct} correct drafts of {self.proposed} proposed")
        return self

    @property
    def length(self) -> float | None:
        """Acceptance length of this request alone; None without a verification."""
        return 1 + self.correct / self.verifications if self.verifications else None


class AcceptanceFigure(_Model):
    """Acceptance over a set of requests. The aggregate weighs verifications equally; the error is over requests."""

    settings: SpecSettings
    num_requests: int = Field(description="Requests with at least one verification")
    num_without_verification: int = Field(description="Requests too short to be drafted for; in no figure")
    verifications: int
    correct: int
    proposed: int
    length: float = Field(description="1 + correct / verifications")
    length_standard_error: float | None = Field(description="Of the requests' own lengths; None for a single request")
    rate: float = Field(description="correct / proposed")
    unconditional: tuple[float, ...] = Field(description="u_1 ... u_k")
    conditional: tuple[float | None, ...] = Field(description="a_1 ... a_k; None where no draft got that far")
    histogram: tuple[int, ...]
    request_lengths: tuple[float | None, ...] = Field(description="In the order of the requests, to compare in pairs")


def counts_from_sglang(meta_info: Mapping[str, Any]) -> RequestCounts:
    """The counts of a SGLang 0.5.23 answer's `meta_info`; a request without a verification has no such fields."""
    if "spec_verify_ct" not in meta_info:
        return RequestCounts(verifications=0, correct=0, proposed=0)
    try:
        return RequestCounts(
            verifications=meta_info["spec_verify_ct"],
            correct=meta_info["spec_num_correct_drafts"],
            proposed=meta_info["spec_num_proposed_drafts"],
            histogram=meta_info["spec_correct_drafts_histogram"],
        )
    except KeyError as error:
        raise AcceptanceError(
            f"the server's answer counts verifications but lacks {error}: SGLang 0.5.23 has it"
        ) from None
    except ValidationError as error:
        reason = first_fault(error)[1]
        raise AcceptanceError(f"the server's speculative counts contradict each other: {reason}") from None


def summarise(counts: Sequence[RequestCounts], settings: SpecSettings) -> AcceptanceFigure:
    """Join the counts of requests that ran with these settings.

    Raises AcceptanceError where there was no verification, or where a request counts more than the settings allow.
    """
    lengths = [c.length for c in counts]
    drafted = [length for length in lengths if length is not None]
    if not drafted:
        raise AcceptanceError(
            f"no verification in {len(counts)} requests: speculative decoding is off, or every answer was too short"
        )
    for index, request in enumerate(counts):
        _check_settings(request, settings, index)

    verifications = sum(c.verifications for c in counts)
    correct, proposed = sum(c.correct for c in counts), sum(c.proposed for c in counts)
    steps = settings.num_steps
    histogram = tuple(sum(c.histogram[i] for c in counts if i < len(c.histogram)) for i in range(steps + 1))
    reached = [sum(histogram[i:]) for i in range(steps + 1)]  # verifications with at least i correct drafts
    return AcceptanceFigure(
        settings=settings,
        num_requests=len(drafted),
        num_without_verification=len(counts) - len(drafted),
        verifications=verifications,
        correct=correct,
        proposed=proposed,
        length=1 + correct / verifications,
        length_standard_error=_standard_error(drafted),
        rate=correct / proposed,
        unconditional=tuple(n / verifications for n in reached[1:]),
        conditional=tuple(reached[i] / reached[i - 1] if reached[i - 1] else None for i in range(1, steps + 1)),
        histogram=histogram,
        request_lengths=tuple(lengths),
    )


def length_from_rate(rate: float, num_steps: int) -> float:
    """AL = 1 + k*r, for a chain of k steps only. With k = 3, 19% is 1.57 and 47% is 2.41."""
    return 1 + num_steps * rate


def rate_from_length(length: float, num_steps: int) -> float:
    """r = (AL - 1) / k, for a chain of k steps only."""
    return (length - 1) / num_steps


def _check_settings(request: RequestCounts, settings: SpecSettings, index: int) -> None:
    expected = request.verifications * (settings.num_draft_tokens - 1)
    if request.proposed != expected:
        raise AcceptanceError(
            f"request {index} counts {request.proposed} proposed drafts in {request.verifications} verifications; "
            f"{settings.num_draft_tokens} draft tokens make {expected}. The server runs with other settings than these"
        )
    if any(request.histogram[settings.num_steps + 1 :]):
        raise AcceptanceError(
            f"request {index} has {len(request.histogram) - 1} correct drafts in one verification, but the drafter "
            f"drafts {settings.num_steps} steps. The server runs with other settings than these"
        )


def _standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean: sample deviation (n - 1) over the root of n."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
