"""What SGLang's DFLASH `target_layer_ids` capture: always the output of layer i, for every class that was run.

Source: `set_dflash_layers_to_capture` of each model class, run from the wheels 0.5.11 (the first with it) to 0.5.23,
and `resolve_target_layer_ids` in speculative/dflash_utils.py. Classes with a way of their own (Beam, MuseGlimmer,
MuseSpark, Inkling, Kimi-K3) are not claimed, nor is Nanbeige, which walks its layers several times.
"""

from collections.abc import Iterable, Sequence

from packaging.version import Version

from eagle3.capture import CapturePoint
from eagle3.conventions.base import LIVE_LIST_SETTLES, Convention, ConventionError, shifted, unshifted
from eagle3.conventions.sglang_models import RELEASES

_FIRST = "0.5.11"


def _classes(
    names: Iterable[str], since: str = _FIRST, last: str | None = None
) -> dict[str, tuple[Version, Version | None]]:
    return dict.fromkeys(names, (Version(since), Version(last) if last else None))


_LLAMA = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Phi3ForCausalLM",
    "IQuestCoderForCausalLM",
)
_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_QWEN = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLMoeForConditionalGeneration")
_QWEN35 = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "InternS1ProForConditionalGeneration",
)
_GEMMA4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_NEMOTRON_VL = ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")

# From which release on a class captures, and from which on it can also capture the output of the last layer.
MODEL_CLASSES: dict[str, tuple[Version, Version | None]] = {
    **_classes((*_LLAMA, "InternLM3ForCausalLM", "TeleFLMForCausalLM", "Llama4ForCausalLM")),
    **_classes((*_DEEPSEEK, "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM")),
    **_classes((*_QWEN, *_QWEN35)),
    **_classes(["GptOssForCausalLM"], last="0.5.17"),
    **_classes(["InternS2PreviewForConditionalGeneration"], "0.5.12"),
    **_classes(_GEMMA4, "0.5.14", "0.5.14"),
    **_classes(["LagunaForCausalLM"], "0.5.15", "0.5.15"),
    **_classes(["MellumForCausalLM"], "0.5.16"),
    **_classes(["InternS2MobiusForConditionalGeneration"], "0.5.18"),
    **_classes(["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"], "0.5.19"),
    **_classes(["Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "NemotronHForCausalLM"], "0.5.19", "0.5.19"),
    **_classes(["NemotronHPuzzleForCausalLM"], "0.5.19", "0.5.19"),
    **_classes(["Glm5NextForConditionalGeneration", "Qwen4ExpForConditionalGeneration"], "0.5.20"),
    **_classes((*_NEMOTRON_VL, "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), "0.5.20", "0.5.20"),
    **_classes(["Lfm2VlForConditionalGeneration"], "0.5.21", "0.5.21"),
}


class SglangDflash(Convention):
    engine = "sglang_dflash"
    title = "SGLang DFLASH"
    field = "dflash_config.target_layer_ids in the drafter's config.json"
    final = "after the final norm (`norm`)"
    source = "set_dflash_layers_to_capture of each model class, run from the wheels 0.5.11 to 0.5.23"
    releases = RELEASES[RELEASES.index(_FIRST) :]
    settles = LIVE_LIST_SETTLES

    def known_model_classes(self, version: str) -> tuple[str, ...]:
        release = self.release(version)
        return tuple(sorted(name for name, (since, _) in MODEL_CLASSES.items() if release >= since))

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:
        last_since = MODEL_CLASSES[model_class][1]
        reaches = last_since is not None and self.release(version) >= last_since
        highest = num_layers if reaches else num_layers - 1
        what = f"the number of a layer whose output {model_class} captures"
        return shifted(ids, num_layers, shift=1, lowest=1, highest=highest, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        raise ConventionError(
            "SGLang DFLASH's default depends on the drafter's own number of layers: d ids spread evenly from layer "
            f"1 to layer {num_layers - 3}, e.g. {list(default_ids(num_layers, 5))} for d = 5. Name the ids "
            "explicitly."
        )

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 1, self.title),)


def default_ids(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """`build_target_layer_ids` of speculative/dflash_utils.py."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    if num_layers < 4:
        raise ConventionError(f"SGLang DFLASH's default needs at least 4 layers; the target has {num_layers}")
    span = num_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


CONVENTION = SglangDflash()
