"""Capture points and the capture spec: what is taken from the target, in canonical names.

The residual stream of an N-layer decoder has N+1 boundaries. A point is named after the module whose output it is:
`embed` (boundary 0), `layers.i` (boundary i+1: hidden + residual after decoder layer i, before any final norm) and
`norm` (the final norm applied to `layers.(N-1)`). An engine's integers exist only in `eagle3.conventions`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from eagle3.digests import sha256_json
from eagle3.errors import Eagle3Error

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,4})")
_INTEGER = re.compile(r"-?[0-9]+")
_MOST_TOLD = 8
_NAMES = "the names of capture points, e.g. [layers.2, layers.15, layers.27]"


class CaptureError(Eagle3Error, ValueError):
    """A capture point that does not exist, or a spec that cannot be captured."""


class CapturePoint(str):
    """`embed`, `layers.i` or `norm`; a plain string once it is checked."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        if not _is_name(name):
            raise CaptureError(
                f"unknown capture point {name!r:.80}: expected `embed`, `norm` or `layers.i` with i >= 0, e.g. "
                f"`layers.2`. {_whose([name]) or 'Integers of an engine are converted with `eagle3 layers`.'}"
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
        checked = core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(), serialization=core_schema.plain_serializer_function_ser_schema(str)
        )
        return core_schema.no_info_before_validator_function(_integer_as_text, checked)


def _integer_as_text(value: Any) -> Any:
    """An integer is refused for what it is, an id without its convention, and not for its type."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _whose(values: Iterable[Any]) -> str:
    """What to do about integers among the values; empty where there are none."""
    ids = ",".join([str(value) for value in values if _INTEGER.fullmatch(str(value))][:_MOST_TOLD])
    return ids and (
        "An engine's ids say nothing without their convention: engine, version, model class. `eagle3 layers "
        f"--ids {ids} --model-class CLASS --num-layers N` says which layers they capture there."
    )


def _checked_list(value: Any) -> Any:
    """The list as a whole, so that one error says all that is wrong with it."""
    if not isinstance(value, list | tuple):
        raise CaptureError(f"expected a list of {_NAMES}; got {'nothing' if value is None else f'{value!r:.80}'}")
    if not value:
        raise CaptureError(f"needs at least one point: expected {_NAMES}; got an empty list")
    wrong = [item for item in value if not isinstance(item, str) or not _is_name(item)]
    if wrong:
        got = ", ".join(f"{item!r:.80}" for item in wrong[:_MOST_TOLD])
        note = _whose(value) or "A point is `embed`, `norm` or `layers.i` with i >= 0."
        raise CaptureError(f"expected {_NAMES}; got {got}. {note}")
    twice = sorted(item for item, times in Counter(value).items() if times > 1)
    if twice:
        raise CaptureError(f"captured twice: {', '.join(twice)}. Every point may appear once")
    return value


def _is_name(text: str) -> bool:
    return text in ("embed", "norm") or _LAYER.fullmatch(text) is not None


CapturePoints = Annotated[tuple[CapturePoint, ...], BeforeValidator(_checked_list)]
"""Different capture points, at least one, in an order that means something."""


class CaptureSpec(BaseModel):
    """Which states a drafter is trained on: the slots of its `fc` in order, and the target's final state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aux: CapturePoints = Field(
        title="Captured layers",
        description="Names in the order in which they are delivered to the drafter's fc, e.g. layers.2; an engine's "
        "integers are converted by `eagle3 layers --ids`",
        examples=[["layers.2", "layers.15", "layers.27"]],
    )
    final: CapturePoint = Field(
        default=CapturePoint("norm"),
        title="Final state",
        description="The state from which the target's own distribution is computed; `norm` is after the final norm",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.final in self.aux:
            raise CaptureError(
                f"captured twice: {self.final} is the final state (`final`) and stands in `aux` too. Every point may "
                "appear once: take it out of `aux`"
            )
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
            f"{range_of_points(num_layers)}"
        )


def range_of_points(num_layers: int) -> str:
    """`all_points` in words, first and last layer only."""
    return f"embed, layers.0 ... layers.{num_layers - 1} and norm"
