"""Layer ids of engines, and what they mean: keyed by engine, version and model class; never guessed."""

from collections.abc import Iterable

from eagle3.capture import CapturePoint
from eagle3.conventions import sglang
from eagle3.conventions.base import ConventionError, EngineIds

__all__ = ["ENGINES", "ConventionError", "EngineIds", "ids_of", "points_of"]

ENGINES = ("sglang",)


def points_of(engine_ids: EngineIds, num_layers: int) -> tuple[CapturePoint, ...]:
    """Which points an engine's ids capture, in the order in which they are delivered."""
    _check_engine(engine_ids.engine)
    return sglang.to_points(engine_ids, num_layers)


def ids_of(
    points: Iterable[CapturePoint], *, engine: str, version: str, model_class: str, num_layers: int
) -> EngineIds:
    """The ids that make an engine deliver exactly these points in this order; ConventionError says why none do."""
    _check_engine(engine)
    return sglang.to_ids(points, version, model_class, num_layers)


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ConventionError(f"unknown engine {engine!r}: known are {', '.join(ENGINES)}")
