"""Two drafters on the same prompts: the difference of their acceptance lengths, prompt by prompt.

Prompts differ more from one another than drafters do: in pairs a gap of a tenth of a token shows on a few dozen
prompts, unpaired it drowns.
"""

import random
from collections.abc import Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict, Field

from eagle3.acceptance.definitions import AcceptanceError

_RESAMPLES = 4000
_LEVEL = 0.95


class PairedDifference(BaseModel):
    """Mean of (length - baseline's length) over the prompts that both drafted for, with its bootstrap interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_pairs: int
    mean: float
    low: float = Field(description="Lower end of the 95% interval of the mean: percentile bootstrap over the prompts")
    high: float = Field(description="Upper end")
    lower_on: int = Field(description="Prompts on which the length is below the baseline's")

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_difference(lengths: Sequence[float | None], baseline: Sequence[float | None]) -> PairedDifference:
    """Compare two sets of request lengths (`AcceptanceFigure.request_lengths`) of the same requests in the same order.

    Requests without a verification on either side are left out. The resampling is seeded: the same lengths give the
    same interval. Raises AcceptanceError for sets of unlike size, or with fewer than two pairs.
    """
    if len(lengths) != len(baseline):
        raise AcceptanceError(f"{len(lengths)} requests cannot be paired with {len(baseline)}")
    pairs = zip(lengths, baseline, strict=True)
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    if len(differences) < 2:
        raise AcceptanceError(f"{len(differences)} of {len(lengths)} requests have a verification on both sides")
    generator = random.Random(0)  # noqa: S311 - resampling, no secret
    means = sorted(fmean(generator.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    tail = round((1 - _LEVEL) / 2 * _RESAMPLES)
    return PairedDifference(
        num_pairs=len(differences),
        mean=fmean(differences),
        low=means[tail],
        high=means[-1 - tail],
        lower_on=sum(d < 0 for d in differences),
    )
