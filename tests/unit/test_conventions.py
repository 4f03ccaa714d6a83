"""SGLang's layer ids against what the engine's own functions returned (docs of the conventions, run per version)."""

import pytest

from eagle3.capture import CapturePoint
from eagle3.conventions import ConventionError, EngineIds, ids_of, points_of
from eagle3.conventions.sglang import boundaries, known_model_classes, live_points

pytestmark = pytest.mark.unit

KIMI = "KimiK25ForConditionalGeneration"
LLAMA = "LlamaForCausalLM"
OSS = "GptOssForCausalLM"


def _points(*names: str) -> tuple[CapturePoint, ...]:
    return tuple(CapturePoint(name) for name in names)


# layers_to_capture for N = 61, as the published wheels' own functions returned them.
@pytest.mark.parametrize(
    ("version", "model_class", "ids", "expected"),
    [
        ("0.5.23", LLAMA, (2, 30, 58), (3, 31, 59)),
        ("0.5.23", LLAMA, None, (2, 30, 58)),
        ("0.5.23", LLAMA, (-1, 2, 30), (0, 3, 31)),
        ("0.5.12", KIMI, (2, 30, 58), (3, 31, 59)),
        ("0.5.12", KIMI, (1, 29, 57), (2, 30, 58)),
        ("0.5.13", KIMI, (2, 30, 58), (2, 30, 58)),
        ("0.5.23", KIMI, (2, 30, 58), (2, 30, 58)),
        ("0.5.23", KIMI, (1, 29, 57), (2, 30, 58)),
        ("0.5.23", KIMI, (3, 31, 59), (3, 31, 59)),
        ("0.5.23", KIMI, (1, 30, 58), (2, 31, 59)),
        ("0.5.23", KIMI, (30, 1, 58), (30, 1, 58)),
        ("0.5.16", OSS, (2, 30, 61), (3, 31, 62)),
        ("0.5.17", OSS, (2, 30, 61), (2, 30, 61)),
        ("0.5.17", OSS, (2, 30, 58), (3, 31, 59)),
    ],
)
def test_ids_mean_what_the_engine_does(
    version: str, model_class: str, ids: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    assert boundaries(version, model_class, 61, ids) == expected


@pytest.mark.parametrize(
    ("version", "ids"), [("0.5.12", (2, 30, 58)), ("0.5.13", (3, 31, 59)), ("0.5.23", (3, 31, 59))]
)
def test_the_same_layers_of_kimi_need_other_ids_after_0_5_12(version: str, ids: tuple[int, ...]) -> None:
    wanted = _points("layers.2", "layers.30", "layers.58")
    found = ids_of(wanted, engine="sglang", version=version, model_class=KIMI, num_layers=61)
    assert found.ids == ids
    assert points_of(found, 61) == wanted


def test_every_triple_of_a_small_target_leads_back_or_is_refused() -> None:
    num_layers, refused = 6, []
    for a in range(num_layers + 1):
        for b in range(a + 1, num_layers + 1):
            wanted = tuple(CapturePoint.at_boundary(x) for x in (a, b))
            for model_class in (LLAMA, KIMI, OSS):
                try:
                    ids = ids_of(
                        wanted, engine="sglang", version="0.5.23", model_class=model_class, num_layers=num_layers
                    )
                except ConventionError:
                    refused.append((model_class, a, b))
                    continue
                assert points_of(ids, num_layers) == wanted
    # DeepSeek's rule has a hole at boundary 1 first; nothing reaches boundary N.
    assert (KIMI, 1, 3) in refused
    assert all(b == num_layers or (model_class == KIMI and a == 1) for model_class, a, b in refused)


def test_an_order_that_the_engine_does_not_deliver_is_refused() -> None:
    with pytest.raises(ConventionError, match="in the order of the layers"):
        ids_of(_points("layers.15", "layers.2"), engine="sglang", version="0.5.23", model_class=LLAMA, num_layers=30)


def test_the_final_norm_is_no_slot() -> None:
    with pytest.raises(ConventionError, match="cannot capture norm as a slot"):
        ids_of(_points("layers.2", "norm"), engine="sglang", version="0.5.23", model_class=LLAMA, num_layers=30)


def test_the_last_boundary_is_met_only_where_the_class_is_known_to_meet_it() -> None:
    gemma, last = "Gemma3ForCausalLM", _points("layers.2", "layers.60")
    assert live_points((61, 3), 61, model_class=gemma, version="0.5.23") == last
    for model_class, version in ((gemma, "0.5.11"), (gemma, "0.5.23+fork"), (LLAMA, "0.5.23"), (None, None)):
        with pytest.raises(ConventionError, match=r"never meets.*states instead of 2"):
            live_points((3, 61), 61, model_class=model_class, version=version)


def test_a_boundary_that_is_never_met_is_refused_with_the_silent_consequence() -> None:
    with pytest.raises(ConventionError, match="silently deliver 2 states instead of 3"):
        live_points((-1, 2, 30), 61)
    with pytest.raises(ConventionError, match="twice"):
        live_points((2, 2, 30), 61)


@pytest.mark.parametrize(
    ("engine", "version", "model_class", "message"),
    [
        ("sglang", "0.4.0", LLAMA, "was not checked"),
        ("sglang", "0.6.0", LLAMA, "`eagle3 layers --live-list`"),
        ("sglang", "0.5.23+gitabc", LLAMA, "not a release"),
        ("sglang", "0.5.13rc1", LLAMA, "not a release"),
        ("sglang", "0.5.13.post9", LLAMA, "known are 0.5.9, 0.5.10, "),
        ("sglang", "latest", LLAMA, "not a version"),
        (
            "sglang",
            "0.5.23",
            "FooForCausalLM",
            r"not checked\. The live model settles it: .* Known are ApertusForCausalLM, ",
        ),
        ("sglang", "0.5.9", KIMI, "captures layers from SGLang 0.5.10 on"),
        ("sglang", "0.5.11", "Gemma3ForCausalLM", "captures layers from SGLang 0.5.12 on"),
        ("tgi", "1.0", LLAMA, "unknown engine"),
    ],
)
def test_what_is_not_known_is_never_guessed(engine: str, version: str, model_class: str, message: str) -> None:
    ids = EngineIds(engine=engine, version=version, model_class=model_class, ids=(2, 15, 27))
    with pytest.raises(ConventionError, match=message):
        points_of(ids, 30)


def test_a_class_is_known_from_the_version_on_that_captures() -> None:
    new = set(known_model_classes("0.5.12")) - set(known_model_classes("0.5.10"))
    assert {"Gemma3ForCausalLM", "Qwen3VLForConditionalGeneration"} < new
    assert KIMI in set(known_model_classes("0.5.10")) - set(known_model_classes("0.5.9"))
    with pytest.raises(ConventionError, match="was not checked"):
        known_model_classes("0.6.0")
