"""What an index into `hidden_states` of Hugging Face transformers is: 0 = the embedding, k = the output of layer k-1.

The last index, N, is no boundary: transformers overwrites it with the state **after** the final norm, so the output of
the last layer cannot be had there. Source: the documented meaning of `output_hidden_states`, and tests that run a small
model of the installed release.
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import Convention, ConventionError


class Transformers(Convention):
    engine = "transformers"
    title = "transformers"
    field = "an index into the output's hidden_states"
    final = "after the final norm (`norm`): hidden_states[N], which is also hidden_states[-1]"
    source = "output_hidden_states, run on a small model of the installed release"
    releases = ("5.19.0",)
    keeps_order = True

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        outside = [i for i in ids if not -num_layers - 1 <= i <= num_layers]
        if outside:
            raise ConventionError(
                f"hidden_states of {num_layers} layers has no {outside}: it holds {num_layers + 1} states, 0 (the "
                f"embedding) to {num_layers} (after the final norm)"
            )
        places = [i % (num_layers + 1) for i in ids]
        return tuple(CapturePoint("norm") if i == num_layers else CapturePoint.at_boundary(i) for i in places)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:  # noqa: ARG002
        raise ConventionError("transformers has no default: it returns every hidden state, and you index them")

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:
        if CapturePoint.at_boundary(num_layers) in points:
            raise ConventionError(
                f"transformers cannot give layers.{num_layers - 1}: hidden_states[{num_layers}] is overwritten with "
                "the state after the final norm. Hook the last layer instead"
            )
        return (tuple(num_layers if p.boundary is None else p.boundary for p in points),)


CONVENTION = Transformers()
