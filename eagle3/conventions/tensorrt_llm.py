"""What TensorRT-LLM's layer ids capture: the output of layer i.

Source: `Eagle3SpecMetadata` and `Eagle3OneModelSpecMetadata` in tensorrt_llm/_torch/speculative/eagle3.py of
github.com/NVIDIA/TensorRT-LLM, read at two commits; the ids are a set, sorted when it is built.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import CommitConvention, ConventionError, shifted, unshifted, usual_default


class TensorrtLlm(CommitConvention):
    engine = "tensorrt_llm"
    title = "TensorRT-LLM"
    field = "speculative_config.eagle3_layers_to_capture"
    final = "after the final norm (`norm`)"
    source = "tensorrt_llm/_torch/speculative/eagle3.py"
    releases = ("001e670", "f933a60")

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        what = "the number of a layer whose output is captured"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=num_layers, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        if num_layers <= 5:
            raise ConventionError(f"TensorRT-LLM refuses a default for {num_layers} layers: name the ids explicitly")
        return usual_default(num_layers, self.title)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 1, self.title),)


CONVENTION = TensorrtLlm()
