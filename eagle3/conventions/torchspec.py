"""What TorchSpec's layer ids capture: the output of layer i.

Source: `Eagle3TargetModel` and `HFTargetModel` in torchspec/models/target/eagle3_target_model.py of
github.com/torchspec-project/TorchSpec. Its transformers path joins the states in the order of the ids, its SGLang path
in the order of the layers: a list that is not ascending has two meanings, and is refused here.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import CommitConvention, ConventionError, shifted, unshifted, usual_default


class TorchSpec(CommitConvention):
    engine = "torchspec"
    title = "TorchSpec"
    field = "inference.aux_hidden_states_layers"
    final = "after the final norm (`norm`) on its transformers and SGLang paths, before it on its vLLM path"
    source = "torchspec/models/target/eagle3_target_model.py"
    releases = ("4643a09",)

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        if len(ids) != 3:
            raise ConventionError(f"TorchSpec takes exactly three layer ids for EAGLE-3; got {list(ids)}")
        if list(ids) != sorted(ids):
            raise ConventionError(
                f"TorchSpec joins the states of {list(ids)} in the order of the ids on its transformers path and in "
                f"the order of the layers on its SGLang path: give them ascending, {sorted(ids)}"
            )
        what = "the number of a layer whose output is captured"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=num_layers, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        return usual_default(num_layers, self.title)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 1, self.title),)


CONVENTION = TorchSpec()
