"""What SGLang's layer ids capture.

Source: `set_eagle3_layers_to_capture` of each model class, taken out of the published wheels 0.5.9 to 0.5.23 and run,
with what it delegates to (`tools/check_conventions.py`; classes in `sglang_models.py`). Sglang pull request 25454
changed the DeepSeek family in 0.5.13, gpt_oss changed in 0.5.17. The function stores `layers_to_capture`, a list of
boundaries; boundary b is the residual stream at the input of layer b. The model walks its layers and tests
`b in layers_to_capture`: the order of the ids changes nothing, and boundary N (after the last layer) is reached by few
classes.
"""

from collections.abc import Iterable, Sequence

from packaging.version import Version

from eagle3.capture import CapturePoint
from eagle3.conventions.base import LIVE_LIST_SETTLES, Convention, ConventionError, EngineIds, unshifted
from eagle3.conventions.sglang_models import MODEL_CLASSES, NEWEST, OLDEST, RELEASES, ModelClass

__all__ = ["CONVENTION", "NEWEST", "OLDEST", "boundaries", "known_model_classes", "live_points"]

DEEPSEEK_CHANGED = Version("0.5.13")
GPT_OSS_CHANGED = Version("0.5.17")


class Sglang(Convention):
    engine = "sglang"
    title = "SGLang"
    field = "eagle_config.eagle_aux_hidden_state_layer_ids in the drafter's config.json (a top-level key is ignored)"
    final = "after the final norm (`norm`)"
    source = "set_eagle3_layers_to_capture of each model class, run from the wheels 0.5.9 to 0.5.23"
    releases = RELEASES
    settles = LIVE_LIST_SETTLES

    def known_model_classes(self, version: str) -> tuple[str, ...]:
        release = self.release(version)
        return tuple(sorted(name for name, known in MODEL_CLASSES.items() if release >= known.since))

    def check(self, version: str, model_class: str) -> None:
        known = MODEL_CLASSES.get(model_class)
        if known and self.release(version) < known.since:
            raise ConventionError(
                f"{model_class} captures layers from SGLang {known.since} on, and this is {version}: serve the target "
                "with a newer one"
            )
        super().check(version, model_class)

    def boundaries(self, version: str, model_class: str, num_layers: int, ids: Sequence[int] | None) -> tuple[int, ...]:
        """`layers_to_capture` as the live model of that version holds it, in the order of the ids."""
        self.check(version, model_class)
        rule, release = MODEL_CLASSES[model_class].rule, self.release(version)
        if ids is None:
            default = (2, num_layers // 2, num_layers - 3)
            return tuple(b + 1 for b in default) if rule == "minimax_m3_vl" else default
        raw = tuple(ids)
        if rule == "deepseek" and release >= DEEPSEEK_CHANGED and raw[0] != 1:
            return raw
        if rule == "gpt_oss" and release >= GPT_OSS_CHANGED and max(raw) == num_layers:
            return raw
        return tuple(i + 1 for i in raw)

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:
        held = self.boundaries(version, model_class, num_layers, ids)
        known, release = MODEL_CLASSES[model_class], self.release(version)
        if 0 in held and release < known.embed_since:
            raise ConventionError(
                f"SGLang {version} cannot capture the embedding (boundary 0) of {model_class}: its walk adds a "
                "residual that does not exist before the first layer, and the first forward pass raises a "
                f"TypeError. Possible from {known.embed_since} on"
            )
        return _points(held, num_layers, last=_reaches_last(known, release))

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        held = self.boundaries(version, model_class, num_layers, None)
        try:
            return live_points(held, num_layers, model_class=model_class, version=version)
        except ConventionError as error:
            raise ConventionError(
                f"SGLang's default needs more layers than {num_layers}: {error}. Name the ids explicitly."
            ) from None

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return unshifted(points, 1, self.title), unshifted(points, 0, self.title)

    def to_ids(self, points: Iterable[CapturePoint], version: str, model_class: str, num_layers: int) -> EngineIds:
        wanted = tuple(points)
        unshifted(wanted, 0, self.title)  # `norm` is refused before its order is
        return super().to_ids(wanted, version, model_class, num_layers)


CONVENTION = Sglang()


def known_model_classes(version: str = str(NEWEST)) -> tuple[str, ...]:
    """The model classes whose ids are known for that version of SGLang."""
    return CONVENTION.known_model_classes(version)


def boundaries(version: str, model_class: str, num_layers: int, ids: Iterable[int] | None) -> tuple[int, ...]:
    """`layers_to_capture` as the live model of that version holds it, in the order of the ids.

    `ids` None is what SGLang does where the drafter's config names none: the default list, which is *not* shifted.
    """
    given = None if ids is None else tuple(ids)
    if given == ():
        raise ConventionError("an empty id list captures nothing: name at least one layer")
    return CONVENTION.boundaries(version, model_class, num_layers, given)


def live_points(
    layers_to_capture: Iterable[int], num_layers: int, *, model_class: str | None = None, version: str | None = None
) -> tuple[CapturePoint, ...]:
    """Points of a live model's own `layers_to_capture`, in delivered order. What the walk never meets is an error.

    Boundary N counts as met only for a class and version that are known to meet it; an unknown build is refused there.
    """
    known, last = MODEL_CLASSES.get(model_class or ""), False
    if known and version:
        try:
            last = _reaches_last(known, CONVENTION.release(version))
        except ConventionError:
            last = False
    wanted = tuple(layers_to_capture)
    points = _points(wanted, num_layers, last=last)
    if len(set(wanted)) != len(wanted):
        raise ConventionError(f"layers_to_capture {list(wanted)} names a boundary twice; SGLang delivers it once")
    return tuple(sorted(points, key=lambda p: p.boundary or 0))


def _reaches_last(known: ModelClass, release: Version) -> bool:
    return known.last_since is not None and release >= known.last_since


def _points(held: tuple[int, ...], num_layers: int, *, last: bool) -> tuple[CapturePoint, ...]:
    highest = num_layers if last else num_layers - 1
    unmet = [b for b in held if not 0 <= b <= highest]
    if unmet:
        raise ConventionError(
            f"layers_to_capture {list(held)} names boundaries {unmet} that a walk over {num_layers} layers never "
            f"meets: SGLang captures at the input of layers 0 ... {num_layers - 1} and would silently deliver "
            f"{len(set(held)) - len(set(unmet))} states instead of {len(held)}"
        )
    return tuple(CapturePoint.at_boundary(b) for b in held)
