"""The error of the lineage."""

from eagle3.errors import Eagle3Error


class LineageError(Eagle3Error):
    """MLflow cannot be reached, a link of the lineage is missing or contradicts another, or a value does not fit."""
