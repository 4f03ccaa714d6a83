"""The model classes of SGLang whose capture function was run, by the way in which they read ids.

Made from the published wheels 0.5.9 to 0.5.23; `tools/check_conventions.py` runs every class of every wheel again and
fails on any difference from this table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

RELEASES = (
    *("0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14"),
    *("0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
OLDEST, NEWEST = Version(RELEASES[0]), Version(RELEASES[-1])

Rule = Literal["output", "deepseek", "gpt_oss", "minimax_m3_vl"]


@dataclass(frozen=True)
class ModelClass:
    """How one class reads ids, from which release on, and what its walk over the layers reaches at both ends."""

    rule: Rule
    since: Version
    embed_since: Version
    """Boundary 0 can be captured from here on; before, the walk adds a residual that does not exist yet: TypeError."""
    last_since: Version | None
    """Boundary N (after the last layer) can be captured from here on; None: never."""


def _classes(
    names: Iterable[str],
    *,
    since: str = RELEASES[0],
    embed: str = RELEASES[0],
    last: str | None = None,
    rule: Rule = "output",
) -> dict[str, ModelClass]:
    known = ModelClass(rule, Version(since), Version(embed), Version(last) if last else None)
    return dict.fromkeys(names, known)


_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM", "ApertusForCausalLM")
_LLAMA_TOO = ("ExaoneMoEForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "TeleFLMForCausalLM")
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")
_QWEN_TOO = ("Qwen2_5_VLForConditionalGeneration", "BailingMoEForCausalLM", "BailingMoeForCausalLM")
_QWEN_VL = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
# Before 0.5.22 these set a list that their walk over the layers does not read: nothing was captured.
_QWEN35 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM")
_QWEN35_TOO = ("Qwen3_5MoeForCausalLM", "InternS2PreviewForConditionalGeneration", "Qwen4ExpForConditionalGeneration")
_LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Glm4MoeForCausalLM", "LongcatFlashForCausalLM")
_GEMMA = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

MODEL_CLASSES: dict[str, ModelClass] = {
    **_classes(_LLAMA + _LLAMA_TOO, embed="0.5.22"),
    **_classes(["ExaoneMoeForCausalLM"], since="0.5.22"),
    **_classes((*_QWEN, *_QWEN_TOO, "BailingMoeV2ForCausalLM")),
    **_classes(["SarvamMoEForCausalLM"], since="0.5.10"),
    **_classes((*_QWEN_VL, "InternS1ProForConditionalGeneration"), since="0.5.11"),
    **_classes(["MellumForCausalLM"], since="0.5.16"),
    **_classes(["Cosmos3ForConditionalGeneration", "Glm5NextForConditionalGeneration"], since="0.5.20"),
    **_classes((*_QWEN35, *_QWEN35_TOO, "InternS2MobiusForConditionalGeneration"), since="0.5.22"),
    **_classes(_LLAMA4, embed="0.5.21"),
    **_classes(["MiniMaxM2ForCausalLM"], embed="0.5.11"),
    # In 0.5.16 and 0.5.17 it set a list that its walk did not read.
    **_classes(["MiniMaxM3SparseForCausalLM"], since="0.5.18", last="0.5.23"),
    **_classes(["MiniMaxM3SparseForConditionalGeneration"], since="0.5.18", last="0.5.23", rule="minimax_m3_vl"),
    **_classes(_GEMMA, since="0.5.12", last="0.5.12"),
    **_classes(["Gemma4UnifiedForConditionalGeneration"], since="0.5.13", last="0.5.13"),
    **_classes(["GptOssForCausalLM"], embed="0.5.17", last="0.5.17", rule="gpt_oss"),
    **_classes((*_DEEPSEEK, "MistralLarge3ForCausalLM"), embed="0.5.14", rule="deepseek"),
    **_classes(["KimiK25ForConditionalGeneration"], since="0.5.10", embed="0.5.14", rule="deepseek"),
    **_classes(["Glm4MoeLiteForCausalLM"], embed="0.5.21", rule="deepseek"),
}
