"""Capture points and the capture spec: what is taken from the target, in canonical names.

The residual stream of an N-layer decoder has N+1 boundaries. A point is named after the module whose output it is:
`embed` (boundary 0), `layers.i` (boundary i+1: hidden + residual after decoder layer i, before any final norm) and
`norm` (the final norm applied to `layers.(N-1)`). An engine's integers exist only in `eagle3.conventions`.
"""

import re
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from eagle3.digests import sha256_json
from eagle3.errors import Eagle3Error

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,4})")


class CaptureError(Eagle3Error, ValueError):
    """A capture point that does not exist, or a spec that cannot be captured."""


class CapturePoint(str):
    """`embed`, `layers.i` or `norm`; a plain string once it is checked."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        if name not in ("embed", "norm") and not _LAYER.fullmatch(name):
            raise CaptureError(
                f"unknown capture point {name!r}: expected `embed`, `norm` or `layers.i` with i >= 0, e.g. `layers.2`. "
                "Integers of an engine are converted with `eagle3 layers`."
            )
        return super().__new__(cls, name)

    @classmethod
    def at_boundary(cls, boundary: int) -> Self:
        """The point at a boundary of the residual stream: 0 is `embed`, b is `layers.(b-1)`."""
        if boundary < 0:
            raise CaptureError(f"there is no boundary {boundary}: boundaries count from 0 (the embedding)")
        return cls("embed" if boundary == 0 else f"layers.{boundary - 1}")

    @property
    def boundary(self) -> int | None:
        """The boundary of the residual stream, None for `norm` (it is not on the stream)."""
        if self == "norm":
            return None
        return 0 if self == "embed" else int(self.split(".")[1]) + 1

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(), serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


class CaptureSpec(BaseModel):
    """Which states a drafter is trained on: the slots of its `fc` in order, and the target's final state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aux: tuple[CapturePoint, ...] = Field(
        title="Captured layers",
        description="Capture points in the order in which they are delivered to the drafter's fc, e.g. layers.2",
        examples=[["layers.2", "layers.15", "layers.27"]],
    )
    final: CapturePoint = Field(
        default=CapturePoint("norm"),
        title="Final state",
        description="The state from which the target's own distribution is computed; `norm` is after the final norm",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.aux:
            raise CaptureError("a capture spec needs at least one point, e.g. layers.2, layers.15, layers.27; got none")
        points = self.points
        twice = sorted({p for p in points if points.count(p) > 1})
        if twice:
            raise CaptureError(f"captured twice: {', '.join(twice)}. Every point may appear once in a capture spec")
        return self

    @property
    def points(self) -> tuple[CapturePoint, ...]:
        """Every captured point: the slots in order, then the final state."""
        return (*self.aux, self.final)

    def digest(self) -> str:
        """sha256 of the canonical JSON; the order of the slots is part of it."""
        return sha256_json(self.model_dump(mode="json"))

    def check_target(self, num_layers: int) -> None:
        """Refuse points that a target of `num_layers` decoder layers does not have."""
        check_points(self.points, num_layers)


def all_points(num_layers: int) -> tuple[CapturePoint, ...]:
    """Every capture point of a target: `embed`, `layers.0` ... `layers.(N-1)`, `norm`."""
    return (*(CapturePoint.at_boundary(b) for b in range(num_layers + 1)), CapturePoint("norm"))


def check_points(points: Iterable[CapturePoint], num_layers: int) -> None:
    """Raise CaptureError where a point is not one of `all_points(num_layers)`."""
    outside = [p for p in points if p.boundary is not None and p.boundary > num_layers]
    if outside:
        raise CaptureError(
            f"the target has no {', '.join(outside)}: it has {num_layers} decoder layers, so its capture points are "
            f"embed, layers.0 ... layers.{num_layers - 1} and norm"
        )
