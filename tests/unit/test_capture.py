"""Capture points and specs: names, order, digests, and errors that say what the target has."""

import pytest
from pydantic import TypeAdapter, ValidationError

from eagle3.capture import CaptureError, CapturePoint, CaptureSpec, all_points

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["layer.2", "layers.-1", "layers.02", "layers.", "hidden", "", "2", "layers.2 "])
def test_unknown_names_are_refused_with_what_is_expected(name: str) -> None:
    with pytest.raises(CaptureError, match=r"expected `embed`, `norm` or `layers.i`"):
        CapturePoint(name)


def test_a_boundary_is_named_after_the_module_whose_output_it_is() -> None:
    assert [CapturePoint.at_boundary(b) for b in (0, 1, 30)] == ["embed", "layers.0", "layers.29"]
    assert [CapturePoint(p).boundary for p in ("embed", "layers.0", "layers.29", "norm")] == [0, 1, 30, None]
    assert all_points(2) == ("embed", "layers.0", "layers.1", "norm")


def test_a_spec_survives_json_and_keeps_its_digest() -> None:
    spec = CaptureSpec(aux=(CapturePoint("layers.2"), CapturePoint("layers.15")))
    again = CaptureSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.digest() == spec.digest()
    assert all(isinstance(point, CapturePoint) for point in again.points)


def test_the_order_of_the_slots_is_part_of_the_digest() -> None:
    one = CaptureSpec(aux=(CapturePoint("layers.2"), CapturePoint("layers.15")))
    other = CaptureSpec(aux=(CapturePoint("layers.15"), CapturePoint("layers.2")))
    assert one.digest() != other.digest()


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ([], "needs at least one point"),
        (["layers.2", "layers.2"], "captured twice: layers.2"),
        (["norm"], "captured twice: norm is the final state"),
        ([2, 15, 27], r"got 2, 15, 27\. An engine's ids say nothing without their convention.* --ids 2,15,27 "),
        ([True], "got True"),
        (["x" * 10**6], f"got '{'x' * 79}\\. A point"),
        (list(range(10**5)), "got 0, 1, 2, 3, 4, 5, 6, 7. An"),
    ],
)
def test_a_spec_that_cannot_be_captured_is_refused(aux: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CaptureSpec.model_validate({"aux": aux})


def test_points_beyond_the_target_are_refused_with_what_it_has() -> None:
    spec = CaptureSpec(aux=(CapturePoint("layers.2"), CapturePoint("layers.30")))
    spec.check_target(31)
    with pytest.raises(CaptureError, match=r"no layers\.30: it has 30 decoder layers, .* layers\.0 \.\.\. layers\.29"):
        spec.check_target(30)


def test_an_unknown_name_in_json_is_a_validation_error() -> None:
    with pytest.raises(ValidationError, match="unknown capture point"):
        TypeAdapter(CapturePoint).validate_python("layers.x")
