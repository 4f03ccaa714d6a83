"""What SGLang's layer ids capture.

Source: `set_eagle3_layers_to_capture` of each model class, taken out of the published wheels and run, with what it
delegates to, for 0.5.9, 0.5.10.post1, 0.5.11, 0.5.12, 0.5.13, 0.5.16, 0.5.17, 0.5.20 and 0.5.23: sglang pull request
25454 changed the DeepSeek family in 0.5.13, gpt_oss changed in 0.5.17. The function stores `layers_to_capture`, a list
of boundaries; boundary b is the residual stream at the input of layer b. The model walks its layers and tests
`b in layers_to_capture`: the order of the ids changes nothing, and boundary N (after the last layer) is never reached
by most classes.
"""

from collections.abc import Iterable

from packaging.version import Version

from eagle3.capture import CapturePoint
from eagle3.conventions.base import ConventionError, EngineIds, parse_version

OLDEST, NEWEST = Version("0.5.9"), Version("0.5.23")
DEEPSEEK_CHANGED = Version("0.5.13")
GPT_OSS_CHANGED = Version("0.5.17")

_DEEPSEEK = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Glm4MoeLiteForCausalLM",
    }
)
_GPT_OSS = frozenset({"GptOssForCausalLM"})
_GENERIC = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Glm4MoeForCausalLM",
        "ApertusForCausalLM",
        "LongcatFlashForCausalLM",
        "BailingMoeForCausalLM",
        "Gemma3ForCausalLM",
    }
)
# Classes that captured nothing before; the others had their capture function in OLDEST already.
_SINCE = {
    "KimiK25ForConditionalGeneration": Version("0.5.10"),
    "Gemma3ForCausalLM": Version("0.5.12"),
}


def known_model_classes(version: str = str(NEWEST)) -> tuple[str, ...]:
    """The model classes whose ids are known for that version of SGLang."""
    release = _release(version)
    return tuple(sorted(c for c in _DEEPSEEK | _GPT_OSS | _GENERIC if release >= _SINCE.get(c, OLDEST)))


def boundaries(version: str, model_class: str, num_layers: int, ids: Iterable[int] | None) -> tuple[int, ...]:
    """`layers_to_capture` as the live model of that version holds it, in the order of the ids.

    `ids` None is what SGLang does where the drafter's config names none: the default list, which is *not* shifted.
    """
    release = _known(version, model_class)
    if ids is None:
        return (2, num_layers // 2, num_layers - 3)
    given = tuple(ids)
    if not given:
        raise ConventionError("an empty id list captures nothing: name at least one layer")
    if model_class in _DEEPSEEK and release >= DEEPSEEK_CHANGED:
        return tuple(i + 1 for i in given) if given[0] == 1 else given
    if model_class in _GPT_OSS and release >= GPT_OSS_CHANGED and max(given) == num_layers:
        return given
    return tuple(i + 1 for i in given)


def to_points(engine_ids: EngineIds, num_layers: int) -> tuple[CapturePoint, ...]:
    """The captured points in **delivered** order (execution order)."""
    return live_points(boundaries(engine_ids.version, engine_ids.model_class, num_layers, engine_ids.ids), num_layers)


def live_points(layers_to_capture: Iterable[int], num_layers: int) -> tuple[CapturePoint, ...]:
    """Points of a live model's own `layers_to_capture`, in delivered order. What the walk never meets is an error."""
    wanted = tuple(layers_to_capture)
    unmet = [b for b in wanted if not 0 <= b < num_layers]
    if unmet:
        raise ConventionError(
            f"layers_to_capture {list(wanted)} names boundaries {unmet} that a walk over {num_layers} layers never "
            f"meets: SGLang captures at the input of layers 0 ... {num_layers - 1} and would silently deliver "
            f"{len(set(wanted)) - len(set(unmet))} states instead of {len(wanted)}"
        )
    if len(set(wanted)) != len(wanted):
        raise ConventionError(f"layers_to_capture {list(wanted)} names a boundary twice; SGLang delivers it once")
    return tuple(CapturePoint.at_boundary(b) for b in sorted(wanted))


def to_ids(points: Iterable[CapturePoint], version: str, model_class: str, num_layers: int) -> EngineIds:
    """The ids that make SGLang deliver exactly these points in this order; checked by going back."""
    wanted = tuple(points)
    release = _known(version, model_class)
    off_stream = [p for p in wanted if p.boundary is None]
    if off_stream:
        raise ConventionError(
            f"SGLang cannot capture {', '.join(off_stream)} as a slot: it captures the input of a layer. The final "
            "state comes with every capture and needs no id."
        )
    stream = [b for p in wanted if (b := p.boundary) is not None]
    if stream != sorted(stream):
        raise ConventionError(
            f"SGLang delivers captured states in the order of the layers, whatever the order of the ids; "
            f"{', '.join(wanted)} cannot be had. Possible: {', '.join(map(CapturePoint.at_boundary, sorted(stream)))}"
        )
    shifted, raw = tuple(b - 1 for b in stream), tuple(stream)
    raw_first = model_class in _DEEPSEEK and release >= DEEPSEEK_CHANGED
    for ids in (raw, shifted) if raw_first else (shifted, raw):
        candidate = EngineIds(engine="sglang", version=version, model_class=model_class, ids=ids)
        try:
            if to_points(candidate, num_layers) == wanted:
                return candidate
        except ConventionError:
            continue
    raise ConventionError(
        f"SGLang {version} has no id list for {', '.join(wanted)} on {model_class} with {num_layers} layers: neither "
        f"{list(shifted)} nor {list(raw)} leads back to these points"
    )


def _known(version: str, model_class: str) -> Version:
    release = _release(version)
    known = known_model_classes(version)
    if model_class in _SINCE and model_class not in known:
        raise ConventionError(
            f"{model_class} captures layers from SGLang {_SINCE[model_class]} on, and this is {version}: serve the "
            "target with a newer one"
        )
    if model_class not in known:
        raise ConventionError(
            f"what layer ids mean for {model_class} in SGLang was not checked; known: {', '.join(known)}"
        )
    return release


def _release(version: str) -> Version:
    release = parse_version(version, "sglang")
    if not OLDEST <= release <= NEWEST:
        raise ConventionError(
            f"what layer ids mean in SGLang {version} was not checked: known are {OLDEST} to {NEWEST}. The live "
            "model's own capture list (the tap's record) settles it."
        )
    return release
