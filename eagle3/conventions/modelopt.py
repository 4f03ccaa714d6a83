"""What NVIDIA Model-Optimizer's layer ids capture: the output of layer i.

Source: the published wheels 0.35.0 to 0.47.0, read: hooks on the layers whose number is in the list
(torch/speculative/plugins: transformers.py, from 0.45.0 on hf_eagle.py; megatron_eagle.py: `layer_number - 1`). States
arrive as the layers run. Before 0.45.0 the default went through a set, so the *list* in an export may be unsorted.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import Convention, shifted, unshifted


class ModelOptimizer(Convention):
    engine = "modelopt"
    title = "Model-Optimizer"
    field = "eagle_architecture_config.eagle_aux_hidden_state_layer_ids"
    final = "after the final norm (`norm`) through transformers and TensorRT-LLM, before it through vLLM and streaming"
    source = "torch/speculative/plugins of the wheels 0.35.0 to 0.47.0"
    releases = (
        *("0.35.0", "0.37.0", "0.39.0", "0.40.0", "0.41.0", "0.42.0", "0.43.0", "0.44.0", "0.45.0", "0.46.0"),
        *("0.46.1", "0.47.0"),
    )

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        what = "the number of a layer whose output is captured"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=num_layers, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        ids = sorted({1, max(0, num_layers // 2 - 1), max(0, num_layers - 4)})
        return self.captured(version, model_class, ids, num_layers)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 1, self.title),)


CONVENTION = ModelOptimizer()
