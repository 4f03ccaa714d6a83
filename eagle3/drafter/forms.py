"""config.json of a drafter in the form of each engine, and the shape that such a file describes.

The engine of the layer ids decides the form: `EngineIds(engine="vllm", ...)` is written as vLLM reads it. Read in the
sources of SGLang 0.5.23 (llama_eagle3.py, kimi_k25_eagle3.py, spec_aux_hidden_state.py), vLLM 0.33.0 (llama_eagle3.py,
deepseek_eagle3.py, configs/speculators/algos.py, gpu_model_runner.py) and speculators 0.9.0 (models/eagle3/config.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from eagle3.conventions import EngineIds, convention
from eagle3.digests import canonical_json, sha256_bytes
from eagle3.drafter.config import (
    ARCHITECTURE,
    MLA_ARCHITECTURE,
    DrafterConfig,
    DrafterConfigError,
    MlaDrafterConfig,
)
from eagle3.drafter.rope import RopeScaling
from eagle3.errors import first_fault

CONTRACT_KEY = "eagle3_contract_sha256"
ENGINE_IDS_KEY = "eagle3_engine_ids"
COVERAGE_KEY = "eagle3_vocab_coverage"
SHAPE_KEY = "eagle3_shape_sha256"  # of numbers that no tensor's shape shows: rotary base, epsilon, heads
IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_ARCHITECTURE = "Eagle3Speculator"
# The classes of each engine that compute what our two drafters compute, by the names that their registries know.
LLAMA_NAMES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
MLA_NAMES = (MLA_ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM")
_SPECULATORS_STEPS = 3  # tokens that its config proposes to draft; an engine's own setting replaces it


@dataclass(frozen=True)
class Exported:
    """A config.json that `engine_config` wrote, read again."""

    config: DrafterConfig
    engine_ids: EngineIds
    contract_sha256: str | None
    coverage: float | None


def engine_config(
    config: DrafterConfig,
    engine_ids: EngineIds,
    *,
    dtype: str,
    verifier: str | None = None,
    contract_sha256: str | None = None,
    coverage: float | None = None,
) -> dict[str, Any]:
    """The config.json for the engine of these ids. `dtype` is that of the saved tensors, e.g. "float32".

    The ids stand once more beside their convention under our own keys, which engines ignore. `verifier` is the target's
    name or path in speculators' form, `coverage` the share of the training tokens that the draft vocabulary holds.
    DrafterConfigError for an engine without a form, and for what that engine would run otherwise than it was trained.
    """
    if len(engine_ids.ids) != config.num_slots:
        raise DrafterConfigError(
            f"{len(engine_ids.ids)} layer ids ({engine_ids}) for a drafter of {config.num_slots} slots: fc would get "
            f"{len(engine_ids.ids)} x {config.target_hidden_size} values instead of {config.num_slots} x"
        )
    if engine_ids.engine not in FORMS:
        raise DrafterConfigError(
            f"there is no checkpoint form for {convention(engine_ids.engine).title}: known are {', '.join(FORMS)}"
        )
    form = FORMS[engine_ids.engine](config, engine_ids, dtype, verifier)
    ours: dict[str, Any] = {ENGINE_IDS_KEY: engine_ids.model_dump(mode="json"), SHAPE_KEY: shape_digest(config)}
    ours |= {CONTRACT_KEY: contract_sha256} if contract_sha256 is not None else {}
    ours |= {COVERAGE_KEY: coverage} if coverage is not None else {}
    return form | ours


def shape_digest(config: DrafterConfig) -> str:
    """sha256 over every number of a shape and over its norm flags."""
    return sha256_bytes(canonical_json([config.architecture, config.model_dump(mode="json", exclude_none=True)]))


def read_exported(raw: Mapping[str, Any], *, where: str) -> Exported:
    """Read a config.json that `engine_config` wrote. `where` is named in errors.

    Nothing in it may differ from what would be written today: a flag that somebody edited is found, whatever it is.
    """
    if ENGINE_IDS_KEY not in raw:
        raise DrafterConfigError(f"{where}: the key '{ENGINE_IDS_KEY}' is missing; it is not a checkpoint of ours")
    try:
        engine_ids = EngineIds.model_validate(raw[ENGINE_IDS_KEY])
    except ValidationError as error:
        raise DrafterConfigError(f"{where}: {ENGINE_IDS_KEY}: {first_fault(error)[1]}") from None
    found = ids_in(raw, engine_ids.engine)
    if found is None:
        raise DrafterConfigError(
            f"{where}: no {id_key(engine_ids.engine)}; {convention(engine_ids.engine).title} would fall back to its "
            "default layers silently. Export the checkpoint again"
        )
    if found != list(engine_ids.ids):
        raise DrafterConfigError(
            f"{where}: {convention(engine_ids.engine).title} would capture {found}, but the checkpoint was exported "
            f"for {engine_ids}. Somebody edited one of them: export the checkpoint again"
        )
    config = read_shape(raw, num_slots=len(engine_ids.ids), where=where)
    exported = Exported(config, engine_ids, _digest(raw, where), _coverage(raw, where))
    written = engine_config(
        config,
        engine_ids,
        dtype=str(raw.get("dtype")),
        verifier=_verifier(raw),
        contract_sha256=exported.contract_sha256,
        coverage=exported.coverage,
    )
    if SHAPE_KEY not in raw:  # checkpoints of before it was written
        del written[SHAPE_KEY]
    missing = [key for key in written if key not in raw]
    if missing:
        raise DrafterConfigError(f"{where}: the key '{missing[0]}' is missing; it is not a checkpoint of ours")
    for key, value in written.items():
        if key == SHAPE_KEY and raw[key] != value:
            raise DrafterConfigError(
                f"{where}: it describes another drafter than was exported: somebody edited a number that no tensor "
                "shows, such as rope_theta or num_attention_heads. Export the checkpoint again"
            )
        if raw[key] != value:
            raise DrafterConfigError(
                f"{where}: {key} is {raw[key]!r:.120}, an export of this drafter has {value!r:.120}. Somebody edited "
                "it: export the checkpoint again"
            )
    return exported


def read_shape(raw: Mapping[str, Any], *, num_slots: int, where: str) -> DrafterConfig:
    """The shape that a config.json of any of the forms describes, whoever wrote it; DrafterConfigError otherwise.

    What a file may leave out has the value that the engines give it: norm flags are off, a head's width follows.
    """
    flat = flatten(raw, where=where)
    names = flat.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in (*LLAMA_NAMES, *MLA_NAMES, SPECULATORS_ARCHITECTURE, "Eagle3DraftModel"):
        raise DrafterConfigError(
            f"{where}: architectures is {names!r:.80}, expected one of {', '.join((*LLAMA_NAMES, *MLA_NAMES))} or a "
            "config of speculators: another class computes something else with the same tensors"
        )
    if flat.get("num_hidden_layers", 1) != 1:
        raise DrafterConfigError(f"{where}: {flat['num_hidden_layers']} decoder layers; a drafter of ours has one")
    eagle = eagle_config(flat)
    mla = name in MLA_NAMES
    try:
        hidden, heads, vocabulary = flat["hidden_size"], flat["num_attention_heads"], flat["vocab_size"]
        shape: dict[str, Any] = {
            "hidden_size": hidden,
            "target_hidden_size": flat.get("target_hidden_size") or hidden,
            "num_slots": num_slots,
            "intermediate_size": flat["intermediate_size"],
            "num_heads": heads,
            "rope_theta": _rope_theta(flat),
            "rope_scaling": RopeScaling.of(flat, where=where),
            "rms_norm_eps": flat["rms_norm_eps"],
            "draft_vocab_size": flat.get("draft_vocab_size") or vocabulary,
            "target_vocab_size": vocabulary,
            "max_positions": flat["max_position_embeddings"],
            "norm": {
                "norm_before_residual": bool(flat.get("norm_before_residual", False)),
                "norm_before_fc": bool(eagle.get("norm_before_fc", flat.get("norm_before_fc", False))),
                "fc_norm": bool(flat.get("fc_norm") or flat.get("use_aux_norm", False)),
                "norm_output": bool(flat.get("norm_output", False)),
            },
        }
        if mla:
            widths = {key: flat[key] for key in _MLA_WIDTHS}
            written_out = [w for key in ("qk_nope_head_dim", "qk_rope_head_dim") if isinstance(w := widths[key], int)]
            widths |= {"num_kv_heads": heads, "head_dim": sum(written_out)}
            return MlaDrafterConfig.from_shape(shape | widths, where=where)
    except KeyError as error:
        raise DrafterConfigError(f"{where}: the key {error} is missing: not the config of an EAGLE-3 drafter") from None
    head_dim = flat.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    key_value = flat.get("num_key_value_heads")
    kv_heads = heads if key_value is None else key_value
    return DrafterConfig.from_shape(shape | {"num_kv_heads": kv_heads, "head_dim": head_dim}, where=where)


def ids_in(raw: Mapping[str, Any], engine: str) -> list[int] | None:
    """The layer ids where that engine looks for them; None where it finds none there and takes its default list."""
    nested, top = eagle_config(raw).get(IDS), raw.get(IDS)
    found = {"sglang": nested, "vllm": top or nested}.get(engine, top)
    if not isinstance(found, list) or not found:
        return None
    return found if all(isinstance(i, int) and not isinstance(i, bool) for i in found) else None


def id_key(engine: str) -> str:
    """Where that engine looks for the ids, in words."""
    return f"eagle_config.{IDS}" if engine == "sglang" else f"{IDS} at the top level"


def flatten(raw: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """One level of keys: speculators nests the decoder layer's numbers and names its own beside them."""
    if "speculators_model_type" not in raw:
        return dict(raw)
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise DrafterConfigError(f"{where}: a speculator of type {kind!r:.40}; expected eagle3 with its decoder layer")
    if layer.get("model_type", "qwen3") != "llama":  # its default layer is Qwen3's, with norms on query and key
        raise DrafterConfigError(
            f"{where}: its decoder layer is of type {layer.get('model_type')!r:.40}, expected llama: another layer has "
            "other tensors"
        )
    return {**layer, **{key: value for key, value in raw.items() if key != "transformer_layer_config"}}


def eagle_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `eagle_config`, empty where there is none."""
    nested = raw.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


_MLA_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _layer(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The decoder layer as transformers' LlamaConfig or DeepseekV3Config reads it."""
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.target_vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,  # True would make SGLang use the embedding as the head
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,  # the older name of the same key
    }
    if config.rope_scaling is not None:
        layer["rope_scaling"] = config.rope_scaling.to_config()
    if isinstance(config, MlaDrafterConfig):
        layer["model_type"] = "deepseek_v3"
        del layer["head_dim"]  # transformers has another meaning for it there
        layer |= {key: getattr(config, key) for key in _MLA_WIDTHS}
        layer["first_k_dense_replace"] = 1  # its only layer has no experts
    return layer


def _flags(config: DrafterConfig) -> dict[str, Any]:
    return {"fc_norm": config.norm.fc_norm, "norm_output": config.norm.norm_output}


def _sglang(config: DrafterConfig, ids: EngineIds, dtype: str, verifier: str | None) -> dict[str, Any]:  # noqa: ARG001
    if config.norm.norm_before_residual:
        raise DrafterConfigError(
            "norm_before_residual: SGLang's drafters keep the residual before hidden_norm and know no flag for it, so "
            "it would run another model than was trained. vLLM and speculators have the flag"
        )
    return {
        "architectures": [config.architecture],
        **_layer(config, dtype),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **_flags(config),
        "eagle_config": {
            IDS: list(ids.ids),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm.norm_before_fc,
        },
    }


def _vllm(config: DrafterConfig, ids: EngineIds, dtype: str, verifier: str | None) -> dict[str, Any]:  # noqa: ARG001
    return {
        "architectures": [config.architecture],
        **_layer(config, dtype),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **_flags(config),
        "norm_before_residual": config.norm.norm_before_residual,
        IDS: list(ids.ids),
        # vLLM 0.33.0 takes a drafter of type deepseek_v3 for a multi-token-prediction head and refuses it.
        **({"model_type": "deepseek_v2"} if isinstance(config, MlaDrafterConfig) else {}),
        # vLLM captures by the top-level list, but counts fc's slots by this key or by the nested list.
        "num_aux_hidden_states": config.num_slots,
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": config.norm.norm_before_fc},
    }


def _speculators(config: DrafterConfig, ids: EngineIds, dtype: str, verifier: str | None) -> dict[str, Any]:
    if isinstance(config, MlaDrafterConfig):
        raise DrafterConfigError(
            "speculators has no drafter with latent attention (its layers are llama and qwen3): export for SGLang or "
            "vLLM"
        )
    if config.norm.norm_before_fc and config.norm.fc_norm:
        raise DrafterConfigError("norm_before_fc and fc_norm together: speculators' config takes one of them")
    return {
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": ids.version,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATORS_STEPS}],
            "verifier": {"name_or_path": verifier, "architectures": [ids.model_class]},
        },
        # vLLM reads the whole of its own config from here, and counts fc's slots by the last key.
        "transformer_layer_config": _layer(config, dtype) | {"num_aux_hidden_states": config.num_slots},
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **_flags(config),
        "norm_before_residual": config.norm.norm_before_residual,
        "norm_before_fc": config.norm.norm_before_fc,
        IDS: list(ids.ids),
        "embed_requires_grad": False,
        "dtype": dtype,
    }


FORMS: dict[str, Callable[[DrafterConfig, EngineIds, str, str | None], dict[str, Any]]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "speculators": _speculators,
}


def _rope_theta(flat: Mapping[str, Any]) -> Any:
    parameters = flat.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = flat.get("rope_theta", nested)
    return 10000.0 if theta is None else theta  # the default of Llama's and DeepSeek's config classes


def _digest(raw: Mapping[str, Any], where: str) -> str | None:
    digest = raw.get(CONTRACT_KEY)
    if digest is not None and not isinstance(digest, str):
        raise DrafterConfigError(f"{where}: {CONTRACT_KEY} is {digest!r:.80}, expected a digest")
    return digest


def _coverage(raw: Mapping[str, Any], where: str) -> float | None:
    coverage = raw.get(COVERAGE_KEY)
    if coverage is not None and (not isinstance(coverage, int | float) or not 0 <= coverage <= 1):
        raise DrafterConfigError(f"{where}: {COVERAGE_KEY} is {coverage!r:.80}, expected a share between 0 and 1")
    return coverage


def _verifier(raw: Mapping[str, Any]) -> str | None:
    nested = raw.get("speculators_config")
    verifier = nested.get("verifier") if isinstance(nested, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None
