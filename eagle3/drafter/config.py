"""The drafter's shape, and the config.json from which SGLang builds `LlamaForCausalLMEagle3`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.contract import NormFlags
from eagle3.conventions import EngineIds
from eagle3.errors import Eagle3Error, first_fault

if TYPE_CHECKING:
    from eagle3.target.config import TargetConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONTRACT_KEY = "eagle3_contract_sha256"
ENGINE_IDS_KEY = "eagle3_engine_ids"


class DrafterConfigError(Eagle3Error, ValueError):
    """A drafter's shape that is impossible, that SGLang would not run as trained, or a config.json that lacks it."""


class DrafterConfig(BaseModel):
    """The shape of an EAGLE-3 Llama drafter. Upper limits keep a hostile config.json from asking for absurd tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0, le=65536)
    target_hidden_size: int = Field(gt=0, le=65536)
    num_slots: int = Field(le=64, description="Captured states that fc joins; K in the shapes")
    intermediate_size: int = Field(gt=0, le=1 << 20)
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(gt=0, le=1024)
    rope_theta: float = Field(gt=0)
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
        return cls._from_shape(shape | overrides, where="a drafter like the target")

    def to_engine_config(self, engine_ids: EngineIds, *, contract_sha256: str, dtype: str) -> dict[str, Any]:
        """The config.json that SGLang 0.5.23 loads (llama_eagle3.py, llama.py, spec_aux_hidden_state.py).

        `dtype` is that of the saved tensors, e.g. "float32". SGLang reads the capture ids from the nested
        `eagle_config` only; their convention stands beside them under our own key, which engines ignore.
        """
        if len(engine_ids.ids) != self.num_slots:
            raise DrafterConfigError(
                f"{len(engine_ids.ids)} layer ids ({engine_ids}) for a drafter of {self.num_slots} slots: fc would get "
                f"{len(engine_ids.ids)} x {self.target_hidden_size} values instead of {self.num_slots} x"
            )
        if self.norm.norm_before_residual:
            raise DrafterConfigError(
                "norm_before_residual: SGLang's Llama drafter keeps the residual before hidden_norm and knows no flag "
                "for it, so it would run another model than was trained"
            )
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.target_vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,  # True would make SGLang use the embedding as the head
            "attention_bias": False,
            "mlp_bias": False,
            "fc_norm": self.norm.fc_norm,
            "norm_output": self.norm.norm_output,
            "dtype": dtype,
            "torch_dtype": dtype,  # the older name of the same key
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(engine_ids.ids),
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm.norm_before_fc,
            },
            ENGINE_IDS_KEY: engine_ids.model_dump(mode="json"),
            CONTRACT_KEY: contract_sha256,
        }

    @classmethod
    def from_engine_config(cls, config: Mapping[str, Any], *, where: str) -> tuple[Self, EngineIds, str]:
        """Read a config.json that `to_engine_config` wrote -> (shape, engine ids, contract digest).

        `where` is named in errors. The ids that SGLang reads and the ids beside their convention must agree.
        """
        if config.get("architectures") != [ARCHITECTURE]:
            raise DrafterConfigError(
                f"{where}: architectures is {config.get('architectures')!r}, expected ['{ARCHITECTURE}']"
            )
        eagle = config.get("eagle_config")
        if not isinstance(eagle, dict) or "eagle_aux_hidden_state_layer_ids" not in eagle:
            raise DrafterConfigError(
                f"{where}: no eagle_config.eagle_aux_hidden_state_layer_ids; SGLang would fall back to its default "
                "layers silently. Export the checkpoint again"
            )
        try:
            engine_ids = EngineIds.model_validate(config[ENGINE_IDS_KEY])
            digest = config[CONTRACT_KEY]
            shape = {
                "hidden_size": config["hidden_size"],
                "target_hidden_size": config["target_hidden_size"],
                "num_slots": len(engine_ids.ids),
                "intermediate_size": config["intermediate_size"],
                "num_heads": config["num_attention_heads"],
                "num_kv_heads": config["num_key_value_heads"],
                "head_dim": config["head_dim"],
                "rope_theta": config["rope_theta"],
                "rms_norm_eps": config["rms_norm_eps"],
                "draft_vocab_size": config["draft_vocab_size"],
                "target_vocab_size": config["vocab_size"],
                "max_positions": config["max_position_embeddings"],
                "norm": {
                    "norm_before_fc": eagle.get("norm_before_fc", False),
                    "fc_norm": config.get("fc_norm", False),
                    "norm_output": config.get("norm_output", False),
                },
            }
            parsed = cls._from_shape(shape, where=where)
        except KeyError as error:
            raise DrafterConfigError(f"{where}: the key {error} is missing; it is not a checkpoint of ours") from None
        except ValidationError as error:
            raise DrafterConfigError(f"{where}: {ENGINE_IDS_KEY}: {first_fault(error)[1]}") from None
        if eagle["eagle_aux_hidden_state_layer_ids"] != list(engine_ids.ids):
            raise DrafterConfigError(
                f"{where}: SGLang would capture {eagle['eagle_aux_hidden_state_layer_ids']}, but the checkpoint was "
                f"exported for {engine_ids}. Somebody edited one of them: export the checkpoint again"
            )
        return parsed, engine_ids, digest

    @classmethod
    def _from_shape(cls, shape: Mapping[str, Any], *, where: str) -> Self:
        try:
            return cls.model_validate(shape)
        except ValidationError as error:
            field, what = first_fault(error, "")
            raise DrafterConfigError(f"{where}: {field}: {what}" if field else f"{where}: {what}") from None
