"""Layer ids of engines, and what they mean: keyed by engine, version and model class; never guessed."""

from collections.abc import Iterable

from eagle3.capture import CapturePoint
from eagle3.conventions import (
    angelslim,
    eagle,
    modelopt,
    sglang,
    sglang_dflash,
    specforge,
    speculators,
    tensorrt_llm,
    torchspec,
    transformers,
    vllm,
)
from eagle3.conventions.base import Convention, ConventionError, EngineIds

__all__ = [
    "ENGINES",
    "Convention",
    "ConventionError",
    "EngineIds",
    "convention",
    "default_points_of",
    "ids_of",
    "points_of",
]

_MODULES = (
    *(sglang, sglang_dflash, vllm, tensorrt_llm, transformers, specforge, torchspec, modelopt, angelslim, speculators),
    eagle,
)
_CONVENTIONS: dict[str, Convention] = {module.CONVENTION.engine: module.CONVENTION for module in _MODULES}
ENGINES = tuple(_CONVENTIONS)


def convention(engine: str) -> Convention:
    """Everything that is known of one engine; ConventionError names the known ones."""
    if engine not in _CONVENTIONS:
        raise ConventionError(f"unknown engine {engine!r}: known are {', '.join(ENGINES)}")
    return _CONVENTIONS[engine]


def points_of(engine_ids: EngineIds, num_layers: int) -> tuple[CapturePoint, ...]:
    """Which points an engine's ids capture, in the order in which they are delivered."""
    return convention(engine_ids.engine).to_points(engine_ids, num_layers)


def ids_of(
    points: Iterable[CapturePoint], *, engine: str, version: str, model_class: str, num_layers: int
) -> EngineIds:
    """The ids that make an engine deliver exactly these points in this order; ConventionError says why none do."""
    return convention(engine).to_ids(points, version, model_class, num_layers)


def default_points_of(*, engine: str, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
    """What an engine captures, in delivered order, where its ids are missing or misspelt."""
    return convention(engine).default(version, model_class, num_layers)
