"""The drafter's shape: a Llama decoder layer, or DeepSeek's latent attention (MLA) in its place."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.contract import NormFlags
from eagle3.drafter.rope import RopeScaling
from eagle3.errors import Eagle3Error, first_fault

if TYPE_CHECKING:
    from eagle3.target.config import TargetConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"


class DrafterConfigError(Eagle3Error, ValueError):
    """A drafter's shape that is impossible, that SGLang would not run as trained, or a config.json that lacks it."""


class DrafterConfig(BaseModel):
    """The shape of an EAGLE-3 Llama drafter. Upper limits keep a hostile config.json from asking for absurd tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    architecture: ClassVar[str] = ARCHITECTURE

    hidden_size: int = Field(gt=0, le=65536)
    target_hidden_size: int = Field(gt=0, le=65536)
    num_slots: int = Field(le=64, description="Captured states that fc joins; K in the shapes")
    intermediate_size: int = Field(gt=0, le=1 << 20)
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(gt=0, le=1024)
    rope_theta: float = Field(gt=0)
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = Field(gt=0, lt=1)
    draft_vocab_size: int = Field(gt=0, le=1 << 22)
    target_vocab_size: int = Field(gt=0, le=1 << 22)
    max_positions: int = Field(gt=0, le=1 << 24)
    norm: NormFlags = NormFlags()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_slots < 2:
            raise DrafterConfigError(
                f"a drafter of {self.num_slots} slot(s): SGLang applies fc only where the captured states are wider "
                "than the embedding, so a single slot would skip fc silently. Capture at least two points"
            )
        if self.hidden_size != self.target_hidden_size:
            raise DrafterConfigError(
                f"a drafter of width {self.hidden_size} for a target of width {self.target_hidden_size}: the drafter "
                "shares the target's embedding, so both widths must be equal"
            )
        if self.num_heads % self.num_kv_heads:
            raise DrafterConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise DrafterConfigError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of values")
        if self.draft_vocab_size > self.target_vocab_size:
            raise DrafterConfigError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens is larger than the target's "
                f"{self.target_vocab_size}"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Values of a head that turn with the position."""
        return self.head_dim

    @classmethod
    def like_target(cls, target: "TargetConfig", *, num_slots: int, draft_vocab_size: int, **overrides: Any) -> Self:
        """The usual drafter: one decoder layer of the target's own geometry.

        For targets without Llama's attention (MLA, e.g. Kimi-K2.5) or without a dense MLP of the wanted width, pass
        `num_kv_heads`, `head_dim`, `intermediate_size`. Raises DrafterConfigError for a shape that is impossible.
        """
        shape = {
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_attention_heads,
            "num_kv_heads": target.num_key_value_heads,
            "head_dim": target.head_dim,
            "rope_theta": target.rope_theta,
            "rms_norm_eps": target.rms_norm_eps,
            "target_vocab_size": target.vocab_size,
            "max_positions": target.context_length,
            "num_slots": num_slots,
            "draft_vocab_size": draft_vocab_size,
        }
        return cls.from_shape(shape | overrides, where="a drafter like the target")

    @classmethod
    def from_shape(cls, shape: Mapping[str, Any], *, where: str) -> Self:
        """The shape with these fields; DrafterConfigError names the first that does not fit, after `where`."""
        try:
            return cls.model_validate(shape)
        except ValidationError as error:
            field, what = first_fault(error, "")
            raise DrafterConfigError(f"{where}: {field}: {what}" if field else f"{where}: {what}") from None


class MlaDrafterConfig(DrafterConfig):
    """The shape of an EAGLE-3 drafter with latent attention, for targets of DeepSeek's and Kimi's family.

    Written out per head, as training computes it, every head has a key of its own: `num_kv_heads` is `num_heads` and
    `head_dim` the width of a query, qk_nope_head_dim + qk_rope_head_dim. An engine's cache holds kv_lora_rank +
    qk_rope_head_dim values a token, as the target's does.
    """

    architecture: ClassVar[str] = MLA_ARCHITECTURE

    q_lora_rank: int = Field(gt=0, le=65536)
    kv_lora_rank: int = Field(gt=0, le=65536)
    qk_nope_head_dim: int = Field(gt=0, le=1024)
    qk_rope_head_dim: int = Field(gt=0, le=1024)
    v_head_dim: int = Field(gt=0, le=1024)

    @model_validator(mode="after")
    def _check_mla(self) -> Self:
        if self.qk_rope_head_dim % 2:
            raise DrafterConfigError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: positions turn pairs of values")
        if (self.num_kv_heads, self.head_dim) != (self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim):
            raise DrafterConfigError(
                f"latent attention of {self.num_heads} heads with {self.num_kv_heads} key-value heads of width "
                f"{self.head_dim}: written out it has {self.num_heads} of width "
                f"{self.qk_nope_head_dim + self.qk_rope_head_dim}"
            )
        if self.v_head_dim > self.head_dim:
            raise DrafterConfigError(
                f"values of width {self.v_head_dim} beside queries of {self.head_dim}: fused attention widens values "
                "to the queries' width, so they must not be wider"
            )
        if self.norm.norm_before_fc:
            raise DrafterConfigError(
                f"norm_before_fc: no engine's {MLA_ARCHITECTURE} has a norm over all slots; use fc_norm, one per slot"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @classmethod
    def like_target(cls, target: "TargetConfig", *, num_slots: int, draft_vocab_size: int, **overrides: Any) -> Self:
        """A decoder layer with the target's own latent attention and a dense MLP of its `intermediate_size`.

        Raises DrafterConfigError for a target without latent attention, or whose queries are not of low rank.
        """
        numbers = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        missing = [name for name in numbers if not target.text_config.get(name)]
        if missing:
            raise DrafterConfigError(
                f"{target.path}: config.json has no {', '.join(missing)}: its attention is not DeepSeek's latent one "
                f"with low-rank queries, which {MLA_ARCHITECTURE} needs. Train a Llama drafter for it"
            )
        mla = {name: target.text_config[name] for name in numbers}
        expanded = {
            "num_kv_heads": target.num_attention_heads,
            "head_dim": mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
            "rope_scaling": RopeScaling.of(target.text_config, where=str(target.path)),
        }
        return super().like_target(
            target, num_slots=num_slots, draft_vocab_size=draft_vocab_size, **mla | expanded | overrides
        )
