"""What SafeAILab/EAGLE captures: it takes no ids. Its target code keeps the input of layers 2, N//2 and N-3.

Source: `LlamaModel.forward` in eagle/traineagle3/modeling_llama_kv.py of github.com/SafeAILab/EAGLE, read.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import CommitConvention, ConventionError, usual_default

_TOO_FEW = "EAGLE takes no layer ids: such a target cannot be trained for with its code as it is."


def _no_ids(num_layers: int) -> ConventionError:
    kept = f"2, {num_layers // 2} and {num_layers - 3}"
    return ConventionError(
        f"EAGLE takes no layer ids: its code always keeps the inputs of layers {kept} (2, N//2 and N-3 of N). "
        "`eagle3 layers --engine eagle --default` says what these are; other layers need a change in its code"
    )


class Eagle(CommitConvention):
    engine = "eagle"
    title = "EAGLE"
    field = "nowhere, the layers are written in its model code"
    takes_ids = False
    final = "after the final norm (`norm`)"
    source = "eagle/traineagle3/modeling_llama_kv.py"
    releases = ("9666a81",)

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        raise _no_ids(num_layers)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        return usual_default(num_layers, self.title, _TOO_FEW)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        raise _no_ids(num_layers)


CONVENTION = Eagle()
