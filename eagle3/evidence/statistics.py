"""What the rows of a capture point look like in numbers; `eagle3.evidence.norms` measures them."""

from pydantic import Field

from eagle3.capture import CapturePoint
from eagle3.evidence.measured import EvidenceModel, Measured


class Spread(EvidenceModel):
    """How the energy of a capture point is spread over its dimensions: finite rows, a few of each sample.

    A row counts by its share of energy x^2 / |x|^2, so that the few huge rows of attention sinks do not outvote the
    rest.
    """

    rows: int = Field(gt=0)
    mean_std: Measured = Field(description="Standard deviation of a dimension, averaged over the dimensions")
    top_dimension: int = Field(ge=0, description="The dimension with the largest share of energy")
    top_share: Measured = Field(description="Its share of a row's energy; 1/H where all are alike")
    massive: int = Field(ge=0, description="Dimensions with more than 16 times the energy of the average one")
    mean_share: Measured = Field(description="Share of energy in the mean row: what every token has in common")


class RowStatistics(EvidenceModel):
    """The rows of one slot: their L2 norms, and how their energy is spread. None where there is no finite row."""

    rows: int = Field(description="Finite rows, over which the norms are taken")
    nonfinite_rows: int
    mean_norm: Measured | None
    std_norm: Measured | None
    min_norm: Measured | None
    max_norm: Measured | None
    p05_norm: Measured | None = Field(description="5th percentile, to 2%")
    median_norm: Measured | None = Field(description="Median, to 2%: unmoved by the few huge rows of attention sinks")
    p95_norm: Measured | None = Field(description="95th percentile, to 2%")
    mean_rms: Measured | None = Field(description="mean_norm / sqrt(H)")
    near_max_rows: int = Field(default=0, description="Rows with a value near the dtype's largest number")
    spread: Spread | None = None
    first_values: tuple[Measured | None, ...] = Field(
        default=(), description="The first values of the first row, for a person's eye; None where one is not finite"
    )


class PointStatistics(RowStatistics):
    """The rows of one capture point."""

    point: CapturePoint
