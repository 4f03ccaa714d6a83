"""What every part of a report shares: frozen models, and numbers that another machine writes the same way."""

from math import isfinite
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _rounded(value: float) -> float:
    """Six significant digits: another machine's summation order does not change a report's digest."""
    if not isfinite(value):
        raise ValueError("a measured value must be finite; leave it out where it is not defined")
    return float(f"{value:.6g}")


Measured = Annotated[float, AfterValidator(_rounded)]


class EvidenceModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
