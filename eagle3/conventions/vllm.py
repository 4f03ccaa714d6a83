"""What vLLM's layer ids capture: boundary i itself, 0 = the embedding, N = after the last layer, before the final norm.

Source: the published wheels 0.30.0 to 0.33.0, read: `EagleModelMixin` (models/interfaces.py: sorted, repeats dropped),
`DeepseekV2Model.forward` (models/deepseek_v2.py), `_get_eagle3_aux_layers_from_config` (v1/worker/gpu_model_runner.py).
"""

from collections.abc import Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions.base import Convention, ConventionError, shifted, unshifted, usual_default

# These hold a DeepseekV2Model, whose own walk adds a residual that does not exist before the first layer.
_DEEPSEEK = frozenset(
    {
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
# The targets that take EagleModelMixin's walk in each of the four releases (registry.py, SupportsEagle3).
_MIXIN = frozenset(
    {
        *("AfmoeForCausalLM", "ApertusForCausalLM", "Ernie4_5ForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM"),
        *("Gemma4ForConditionalGeneration", "InternLM3ForCausalLM", "LagunaForCausalLM", "Llama4ForCausalLM"),
        *("Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration", "MiMoForCausalLM"),
        *("MiMoV2FlashForCausalLM", "MiniCPMForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM"),
        *("Mistral3ForConditionalGeneration", "MistralForCausalLM", "NemotronHForCausalLM", "Phi3ForCausalLM"),
        *("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "TeleFLMForCausalLM"),
    }
)


class Vllm(Convention):
    engine = "vllm"
    title = "vLLM"
    field = "eagle_aux_hidden_state_layer_ids at the top level of the drafter's config.json, then eagle_config"
    final = "before the final norm (id N, the output of the last layer)"
    source = "EagleModelMixin and DeepseekV2Model, read in the wheels 0.30.0 to 0.33.0"
    releases = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")

    def known_model_classes(self, version: str) -> tuple[str, ...]:
        self.release(version)
        return tuple(sorted(_MIXIN | _DEEPSEEK))

    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:
        if 0 in ids and model_class in _DEEPSEEK:
            raise ConventionError(
                f"vLLM {version} cannot capture the embedding (id 0) of {model_class}: its walk adds a residual that "
                "does not exist before the first layer, and the first forward pass raises a TypeError"
            )
        what = "a boundary of the residual stream"
        return shifted(ids, num_layers, shift=0, lowest=0, highest=num_layers, title=self.title, what=what)

    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        self.check(version, model_class)
        return usual_default(num_layers, self.title)

    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        return (unshifted(points, 0, self.title),)


CONVENTION = Vllm()
