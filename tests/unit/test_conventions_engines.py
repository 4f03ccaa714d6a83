"""Every row of the table of engines: what an id captures, how points are written, defaults, order, refusals."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.capture import CapturePoint, all_points
from eagle3.conventions import ENGINES, ConventionError, EngineIds, convention, default_points_of, ids_of, points_of
from eagle3.conventions.sglang_dflash import default_ids

pytestmark = pytest.mark.unit

LLAMA, KIMI = "LlamaForCausalLM", "KimiK25ForConditionalGeneration"
NEWEST = {engine: convention(engine).newest for engine in ENGINES}


def _points(names: str) -> tuple[CapturePoint, ...]:
    return tuple(CapturePoint(name) for name in names.split())


def _read(engine: str, version: str, ids: tuple[int, ...], num_layers: int = 61, model_class: str = LLAMA) -> str:
    captured = points_of(EngineIds(engine=engine, version=version, model_class=model_class, ids=ids), num_layers)
    return " ".join(captured)


@pytest.mark.parametrize(
    ("engine", "version", "model_class", "ids", "captured"),
    [
        ("sglang", "0.5.23", LLAMA, (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("sglang", "0.5.12", KIMI, (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("sglang", "0.5.13", KIMI, (2, 30, 58), "layers.1 layers.29 layers.57"),
        ("sglang", "0.5.23", KIMI, (1, 29, 57), "layers.1 layers.29 layers.57"),
        ("sglang", "0.5.23", "Glm4MoeLiteForCausalLM", (3, 31, 59), "layers.2 layers.30 layers.58"),
        ("sglang", "0.5.23", "GptOssForCausalLM", (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("sglang", "0.5.17", "GptOssForCausalLM", (2, 30, 61), "layers.1 layers.29 layers.60"),
        ("sglang", "0.5.23", LLAMA, (-1, 2, 30), "embed layers.2 layers.30"),
        ("sglang", "0.5.23", KIMI, (0, 3, 31), "embed layers.2 layers.30"),
        ("sglang", "0.5.23", "Gemma3ForCausalLM", (2, 30, 60), "layers.2 layers.30 layers.60"),
        ("sglang_dflash", "0.5.23", KIMI, (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("sglang_dflash", "0.5.11", LLAMA, (1, 29, 57), "layers.1 layers.29 layers.57"),
        ("vllm", "0.33.0", LLAMA, (3, 31, 59), "layers.2 layers.30 layers.58"),
        ("vllm", "0.33.0", LLAMA, (0, 3, 61), "embed layers.2 layers.60"),
        ("vllm", "0.30.0", KIMI, (59, 3, 31), "layers.2 layers.30 layers.58"),
        ("tensorrt_llm", "001e670", LLAMA, (58, 2, 30), "layers.2 layers.30 layers.58"),
        ("transformers", "5.19.0", LLAMA, (31, 3, 0), "layers.30 layers.2 embed"),
        ("transformers", "5.19.0", LLAMA, (3, 61), "layers.2 norm"),
        ("transformers", "5.19.0", LLAMA, (3, -1), "layers.2 norm"),
        ("specforge", "0.2.0", LLAMA, (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("specforge", "0.2.0", KIMI, (2, 30, 58), "layers.1 layers.29 layers.57"),
        ("torchspec", "4643a09", LLAMA, (2, 30, 58), "layers.2 layers.30 layers.58"),
        ("modelopt", "0.47.0", LLAMA, (58, 2, 30), "layers.2 layers.30 layers.58"),
        ("angelslim", "0.5.0", LLAMA, (58, 2, 30), "layers.58 layers.2 layers.30"),
        ("speculators", "0.9.0", LLAMA, (3, 31, 59), "layers.2 layers.30 layers.58"),
        ("speculators", "0.4.0.1", LLAMA, (2, 30, 58), "layers.2 layers.30 layers.58"),
    ],
)
def test_ids_capture_what_the_engine_says(
    engine: str, version: str, model_class: str, ids: tuple[int, ...], captured: str
) -> None:
    assert _read(engine, version, ids, model_class=model_class) == captured


@pytest.mark.parametrize(
    ("engine", "model_class", "expected"),
    [
        ("sglang", LLAMA, (2, 30, 58)),
        ("sglang", KIMI, (3, 31, 59)),
        ("sglang_dflash", KIMI, (2, 30, 58)),
        ("vllm", KIMI, (3, 31, 59)),
        ("tensorrt_llm", KIMI, (2, 30, 58)),
        ("transformers", KIMI, (3, 31, 59)),
        ("specforge", KIMI, (3, 31, 59)),
        ("torchspec", KIMI, (2, 30, 58)),
        ("modelopt", KIMI, (2, 30, 58)),
        ("angelslim", KIMI, (2, 30, 58)),
        ("speculators", KIMI, (3, 31, 59)),
    ],
)
def test_the_same_layers_are_written_in_each_engines_own_numbers(
    engine: str, model_class: str, expected: tuple[int, ...]
) -> None:
    wanted = _points("layers.2 layers.30 layers.58")
    found = ids_of(wanted, engine=engine, version=NEWEST[engine], model_class=model_class, num_layers=61)
    assert found.ids == expected


@pytest.mark.parametrize(
    ("engine", "version", "num_layers", "default"),
    [
        ("sglang", "0.5.23", 61, "layers.1 layers.29 layers.57"),
        ("sglang", "0.5.23", 32, "layers.1 layers.15 layers.28"),
        ("vllm", "0.33.0", 32, "layers.1 layers.15 layers.28"),
        ("tensorrt_llm", "f933a60", 32, "layers.1 layers.15 layers.28"),
        ("specforge", "0.2.0", 32, "layers.1 layers.15 layers.28"),
        ("torchspec", "4643a09", 32, "layers.1 layers.15 layers.28"),
        ("modelopt", "0.40.0", 32, "layers.1 layers.15 layers.28"),
        ("modelopt", "0.47.0", 4, "layers.0 layers.1"),
        ("angelslim", "0.5.0", 31, "layers.1 layers.14 layers.27"),
        ("angelslim", "0.2.2", 31, "layers.1 layers.15 layers.28"),
        ("speculators", "0.9.0", 32, "layers.1 layers.15 layers.28"),
        ("speculators", "0.4.0", 32, "layers.2 layers.16 layers.29"),
        ("eagle", "9666a81", 32, "layers.1 layers.15 layers.28"),
    ],
)
def test_the_default_is_what_the_engine_falls_back_to(engine: str, version: str, num_layers: int, default: str) -> None:
    found = default_points_of(engine=engine, version=version, model_class=LLAMA, num_layers=num_layers)
    assert " ".join(found) == default


def test_one_class_of_sglang_shifts_its_default() -> None:
    on = {"engine": "sglang", "version": "0.5.23", "num_layers": 61}
    shifted = default_points_of(model_class="MiniMaxM3SparseForConditionalGeneration", **on)
    assert shifted == _points("layers.2 layers.30 layers.58")
    assert default_points_of(model_class="MiniMaxM3SparseForCausalLM", **on) == _points("layers.1 layers.29 layers.57")


def test_the_dflash_default_depends_on_the_drafter() -> None:
    assert default_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_ids(36, 1) == (18,)
    with pytest.raises(ConventionError, match=r"\[1, 9, 17, 25, 33\] for d = 5"):
        default_points_of(engine="sglang_dflash", version="0.5.23", model_class=LLAMA, num_layers=36)


@pytest.mark.parametrize(
    ("engine", "version", "model_class", "ids", "why"),
    [
        ("sglang", "0.5.12", KIMI, (-1, 2, 30), "cannot capture the embedding"),
        ("sglang", "0.5.21", LLAMA, (-1, 2, 30), r"TypeError\. Possible from 0\.5\.22 on"),
        ("sglang", "0.5.23", KIMI, (-1, 2, 30), "silently deliver 2 states instead of 3"),
        ("sglang", "0.5.16", "GptOssForCausalLM", (2, 30, 60), "never"),
        ("sglang", "0.5.21", "Qwen3_5ForConditionalGeneration", (2, 30, 58), "captures layers from SGLang 0.5.22 on"),
        ("sglang_dflash", "0.5.23", LLAMA, (-1, 2), "captures nothing for \\[-1\\]"),
        ("sglang_dflash", "0.5.10", LLAMA, (2,), "known are 0.5.11 to 0.5.23"),
        ("sglang_dflash", "0.5.23", "KimiK3ForConditionalGeneration", (2,), "was not checked"),
        ("vllm", "0.33.0", KIMI, (0, 3, 31), "cannot capture the embedding"),
        ("vllm", "0.33.0", LLAMA, (3, 62), "from 0 to 61"),
        ("vllm", "0.33.0", LLAMA, (3, 3, 31), "layers.2 twice"),
        ("vllm", "0.29.0", LLAMA, (3,), "known are 0.30.0 to 0.33.0"),
        (
            "vllm",
            "0.33.0",
            "FooForCausalLM",
            (3,),
            r"not checked\. Capture a few .* Known are Afmoe",
        ),
        ("tensorrt_llm", "1.2.1", LLAMA, (2,), "was read at commit 001e670 and f933a60"),
        ("tensorrt_llm", "001e670", LLAMA, (-1,), "captures nothing"),
        ("transformers", "5.19.0", LLAMA, (62,), "holds 62 states"),
        ("transformers", "4.57.0", LLAMA, (2,), "was not checked"),
        ("specforge", "0.2.0", LLAMA, (2, 30), "exactly three"),
        ("specforge", "0.2.0", LLAMA, (-1, 2, 30), "none negative"),
        ("torchspec", "4643a09", LLAMA, (30, 2, 58), r"ascending, \[2, 30, 58\]"),
        ("torchspec", "4643a09", LLAMA, (2, 30), "exactly three"),
        ("vllm", "0.33.0", "LlamaForCausaLLM", (3,), r"Did you mean LlamaForCausalLM\?"),
        ("transformers", "4.0", LLAMA, (3,), r"known is 5\.19\.0\."),
        ("modelopt", "0.34.0", LLAMA, (2,), "known are 0.35.0"),
        ("angelslim", "0.5.0", LLAMA, (2, 30, 60), "after the final norm"),
        ("angelslim", "0.2.0", LLAMA, (2, 30), "exactly three"),
        ("speculators", "0.2.0", LLAMA, (2,), "known are 0.3.0 to 0.9.0"),
        ("eagle", "9666a81", LLAMA, (2,), "takes no layer ids"),
    ],
)
def test_what_an_engine_cannot_do_or_nobody_knows_is_refused_with_its_reason(
    engine: str, version: str, model_class: str, ids: tuple[int, ...], why: str
) -> None:
    with pytest.raises(ConventionError, match=why):
        _read(engine, version, ids, model_class=model_class)


@pytest.mark.parametrize(
    ("engine", "points", "why"),
    [
        ("transformers", "layers.2 layers.60", "overwritten with the state after the final norm"),
        ("tensorrt_llm", "embed layers.2", "captures nothing for"),
        ("modelopt", "layers.2 norm", "cannot capture norm as a slot"),
        ("vllm", "layers.30 layers.2", "Possible: layers.2, layers.30"),
        ("eagle", "layers.1 layers.29 layers.57", "takes no layer ids"),
    ],
)
def test_points_that_cannot_be_written_are_refused(engine: str, points: str, why: str) -> None:
    with pytest.raises(ConventionError, match=why):
        ids_of(_points(points), engine=engine, version=NEWEST[engine], model_class=LLAMA, num_layers=61)


@pytest.mark.parametrize("num_layers", [6, 7, 12])
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "eagle"])
def test_whatever_is_written_leads_back_to_the_same_points(engine: str, num_layers: int) -> None:
    """Every ascending triple of points, for each release and each of SGLang's rules."""
    known = convention(engine)
    classes = (LLAMA, KIMI, "GptOssForCausalLM", "Gemma3ForCausalLM")
    points, written = all_points(num_layers), 0
    for version in (known.releases[0], known.newest):
        for model_class in classes:
            if model_class not in (known.known_model_classes(version) or classes):
                continue
            for low in range(0, num_layers, 2):
                wanted = (points[low], points[low + 1], points[-2])
                try:
                    ids = ids_of(wanted, engine=engine, version=version, model_class=model_class, num_layers=num_layers)
                except ConventionError:
                    continue
                assert points_of(ids, num_layers) == wanted
                written += 1
            for low in range(num_layers - 3):
                wanted = points[low + 1 : low + 4]
                try:
                    ids = ids_of(wanted, engine=engine, version=version, model_class=model_class, num_layers=num_layers)
                except ConventionError:
                    assert engine in ("sglang", "specforge"), f"{engine} can write {wanted}"  # DeepSeek's hole
                    assert model_class == KIMI
                    assert wanted[0] == "layers.0"
                    continue
                assert points_of(ids, num_layers) == wanted
                written += 1
    assert written > num_layers - 3


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_where_it_reads_ids_and_what_its_final_state_is(engine: str) -> None:
    known = convention(engine)
    assert known.field
    assert "norm" in known.final
    assert known.source
    assert known.releases


def test_an_index_into_hidden_states_is_what_the_installed_transformers_returns() -> None:
    """Run, not read: a small Llama with a hook on each module that a point is named after."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, vocab_size=32, **shape)).eval()
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        return lambda _module, _inputs, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    model.model.embed_tokens.register_forward_hook(keep("embed"))
    model.model.norm.register_forward_hook(keep("norm"))
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layers.{i}"))
    with torch.inference_mode():
        states = model(torch.arange(8)[None], output_hidden_states=True).hidden_states
    assert len(states) == 5
    for index in range(-5, 5):
        (point,) = points_of(EngineIds(engine="transformers", version="5.19.0", model_class="any", ids=(index,)), 4)
        assert torch.equal(states[index], seen[point]), f"hidden_states[{index}] is {point}"
