"""What SpecForge's layer ids capture: it hands them to SGLang, and inherits SGLang's rule for that model.

Source: the wheel 0.2.0 (`resolve_eagle_capture_layers` in algorithms/model_providers.py, the checks in
application/planning.py and training/capture_contract.py), which pins sglang 0.5.14.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions import sglang
from eagle3.conventions.base import Convention, ConventionError

SGLANG = "0.5.14"


class SpecForge(Convention):
    engine = "specforge"
    title = "SpecForge"
    field = (
        "model.aux_hidden_state_layer_ids, then eagle_config.eagle_aux_hidden_state_layer_ids of the drafter's config"
    )
    final = "after the final norm (`norm`)"
    source = f"resolve_eagle_capture_layers of the wheel 0.2.0, and SGLang {SGLANG}"
    releases = ("0.2.0",)

    def known_model_classes(self, version: str) -> tuple[str, ...]:
        self.release(version)
        return sglang.known_model_classes(SGLANG)

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        if len(ids) != 3 or min(ids) < 0:
            raise ConventionError(f"SpecForge takes exactly three layer ids, none negative; got {list(ids)}")
        return sglang.CONVENTION.captured(SGLANG, model_class, ids, num_layers)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        """Its own list, which goes through SGLang's rule: unlike SGLang's own default, these are ids."""
        self.check(version, model_class)
        return self.captured(version, model_class, default_ids(num_layers), num_layers)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:
        return sglang.CONVENTION.candidates(points, num_layers)


def default_ids(num_layers: int) -> tuple[int, ...]:
    return (1, num_layers // 2 - 1, num_layers - 4)


CONVENTION = SpecForge()
