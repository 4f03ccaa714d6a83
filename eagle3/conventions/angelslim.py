"""What AngelSlim's layer ids capture: the output of layer i, read as `hidden_states[i + 1]` of transformers.

Source: the published wheels 0.2.0 to 0.5.0, read (compressor/speculative/train/models/target/target_model_wrapper.py).
Before 0.3.0 the default counted the N+1 hidden states instead of the N layers, and exactly three ids were used.
"""

from collections.abc import Sequence

from packaging.version import Version

from eagle3.capture import CapturePoint
from eagle3.conventions.base import Convention, ConventionError, shifted, unshifted

DEFAULT_CHANGED = Version("0.3.0")


class AngelSlim(Convention):
    engine = "angelslim"
    title = "AngelSlim"
    field = "aux_hidden_states_layer_ids of the drafter's config (with an s after state)"
    final = "after the final norm (`norm`): hidden_states[-1] of transformers"
    source = "target_model_wrapper.py of the wheels 0.2.0 to 0.5.0"
    releases = ("0.2.0", "0.2.1", "0.2.2", "0.3.0", "0.5.0")
    keeps_order = True

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        if self.release(version) < DEFAULT_CHANGED and len(ids) != 3:
            raise ConventionError(f"AngelSlim {version} uses exactly three layer ids; got {list(ids)}")
        if num_layers - 1 in ids:
            raise ConventionError(
                f"AngelSlim reads hidden_states[{num_layers}] of transformers for id {num_layers - 1}, which holds the "
                f"state after the final norm, not the output of layer {num_layers - 1}: choose another layer"
            )
        # -1 reads the embedding on its transformers path and the last layer on its vLLM path: no one meaning.
        what = "the number of a layer whose output is captured"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=num_layers - 1, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        counted = num_layers if self.release(version) >= DEFAULT_CHANGED else num_layers + 1
        return self.captured(version, model_class, (1, counted // 2 - 1, counted - 4), num_layers)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 1, self.title),)


CONVENTION = AngelSlim()
