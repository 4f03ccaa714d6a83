"""What SafeAILab/EAGLE captures: it takes no ids. Its target code keeps the input of layers 2, N//2 and N-3.

Source: `LlamaModel.forward` in eagle/traineagle3/modeling_llama_kv.py of github.com/SafeAILab/EAGLE, read.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import CommitConvention, ConventionError, usual_default

_NO_IDS = "EAGLE takes no layer ids: its code keeps the input of layers 2, N//2 and N-3 (`--default` shows them)"


class Eagle(CommitConvention):
    engine = "eagle"
    title = "EAGLE"
    field = "nothing: the layers are written in its model code"
    final = "after the final norm (`norm`)"
    source = "eagle/traineagle3/modeling_llama_kv.py"
    releases = ("9666a81",)

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        raise ConventionError(_NO_IDS)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        return usual_default(num_layers, self.title)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        raise ConventionError(_NO_IDS)


CONVENTION = Eagle()
