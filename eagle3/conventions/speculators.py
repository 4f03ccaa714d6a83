"""What speculators' layer ids capture: vLLM's boundary from 0.5.0 on, the output of layer i before.

Source: the published wheels 0.3.0 to 0.9.0, read. Up to 0.4.0.1 its own vLLM worker appends `hidden_states + residual`
**after** layer i ran (data_generation/custom_worker.py); from 0.5.0 on the ids go to vLLM's own extraction, whose id
is a boundary (`resolve_target_layer_ids` in models/utils.py). The default `[2, N//2, N-3]` did not change with it.
"""

from collections.abc import Sequence

from packaging.version import Version

from eagle3.capture import CapturePoint
from eagle3.conventions.base import Convention, shifted, unshifted

BOUNDARIES = Version("0.5.0")


class Speculators(Convention):
    engine = "speculators"
    title = "speculators"
    field = "eagle_aux_hidden_state_layer_ids at the top level of the config; --target-layer-ids on the command line"
    final = "before the final norm (the output of the last layer)"
    source = "data_generation/custom_worker.py and models/utils.py of the wheels 0.3.0 to 0.9.0"
    releases = (
        *("0.3.0", "0.4.0", "0.4.0.1", "0.5.0", "0.6.0", "0.6.0.1", "0.6.0.2", "0.7.0", "0.7.0.1", "0.7.0.2"),
        *("0.8.0", "0.8.1", "0.9.0"),
    )

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        if self.release(version) >= BOUNDARIES:
            what = "a boundary of the residual stream, as in vLLM"
            return shifted(ids, num_layers, shift=0, lowest=0, highest=num_layers, title=self.title, what=what)
        what = "the number of a layer whose output is captured"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=num_layers, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        return self.captured(version, model_class, default_ids(num_layers), num_layers)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return unshifted(points, 0, self.title), unshifted(points, 1, self.title)


def default_ids(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


CONVENTION = Speculators()
