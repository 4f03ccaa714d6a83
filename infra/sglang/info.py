"""What a SGLang server says of itself, and whether a capture from it would be complete."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eagle3.conventions import EngineIds


class ServerInfo(BaseModel):
    """What a server says of itself: the fields that matter to us, by a white list.

    The rest is dropped unread: `launch_command` and `api_key` of /server_info hold secrets.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    model_path: str
    revision: str | None = None
    dtype: str | None = Field(None, description='What was asked for ("auto" too): read the real one off the tensors')
    device: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    context_length: int | None = None
    load_format: str | None = None
    trust_remote_code: bool = False
    max_req_input_len: int | None = Field(None, description="Longest prompt that is taken, tokens")
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None
    disable_radix_cache: bool
    chunked_prefill_size: int | None = None
    enable_mixed_chunk: bool = False
    disable_overlap_schedule: bool = False
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    attn_cp_size: int = 1
    enable_layernorm_sp: bool = False
    random_seed: int | None = None
    enable_return_aux_hidden_states: bool = False
    return_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    aux_hidden_state_capture: str | None = None
    return_hidden_states_mode: str | None = None
    cuda_graph_backend_decode: str | None = Field(None, description="As resolved, whichever flag asked for it")
    cuda_graph_backend_prefill: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_draft_model_revision: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved_graphs(cls, payload: Any) -> Any:
        """`cuda_graph_backend_*` are two of several flags for graphs; `cuda_graph_config` holds what became of them."""
        if not isinstance(payload, dict) or not isinstance(config := payload.get("cuda_graph_config"), dict):
            return payload
        phases = {name: phase for name in ("decode", "prefill") if isinstance(phase := config.get(name), dict)}
        return payload | {f"cuda_graph_backend_{name}": phase.get("backend") for name, phase in phases.items()}


class ModelInfo(BaseModel):
    """/model_info: which model answers."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_path: str
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None
    weight_version: str | None = None


def capture_problems(info: ServerInfo, ids: EngineIds) -> list[str]:
    """One sentence for each setting that would make a capture incomplete or wrong; empty where all is well."""
    problems = complete_capture_problems(info)
    served = info.return_aux_hidden_state_layer_ids
    if served is None or tuple(served) != ids.ids:
        shown = "the model's default" if served is None else list(served)
        problems.append(
            f"The server captures layer ids {shown}, the dump needs {list(ids.ids)}: start it with "
            f"--return-aux-hidden-state-layer-ids {' '.join(map(str, ids.ids))}."
        )
    if info.version != ids.version:
        problems.append(
            f"The server is SGLang {info.version}, the ids were made for {ids.version}: ids mean different things in "
            "different versions; convert the capture points again."
        )
    return problems


def complete_capture_problems(info: ServerInfo) -> list[str]:
    """One sentence for each setting that would make a capture incomplete, whatever the layers."""
    problems = []
    if not info.enable_return_aux_hidden_states:
        problems.append("Capture is off: start the server with --enable-return-aux-hidden-states.")
    if info.aux_hidden_state_capture != "eagle3":
        problems.append(
            f"The capture convention is {info.aux_hidden_state_capture!r}, expected 'eagle3': start the server with "
            "--speculative-algorithm EAGLE3 beside the capture flag."
        )
    if not info.disable_radix_cache:
        problems.append(
            "The radix cache is on: rows of a prefix that another request shares are not computed again and would be "
            "missing. Start the server with --disable-radix-cache."
        )
    if info.pp_size != 1:
        problems.append(f"Pipeline parallel size is {info.pp_size}: only the last stage's layers are seen; use 1.")
    if info.enable_layernorm_sp or info.attn_cp_size != 1:
        problems.append(
            "States are scattered over ranks (--enable-layernorm-sp, --attn-cp-size): none of them has every row of a "
            "prompt, and with the former SGLang 0.5.23 dies at the first one. Serve without."
        )
    if info.return_hidden_states_mode != "full":
        problems.append(
            f"return_hidden_states_mode is {info.return_hidden_states_mode!r}: rows of a prompt need 'full'; leave "
            "--return-hidden-states-mode unset."
        )
    if info.speculative_algorithm is not None:
        problems.append(
            f"Speculative decoding ({info.speculative_algorithm}) is on: rejected drafts pass through the model. "
            "Start the server without a drafter."
        )
    return problems


def decode_graphs_off(info: ServerInfo) -> bool:
    """Whether the tap sees decoded tokens too: a Python hook does not run when a CUDA graph is replayed."""
    return info.cuda_graph_backend_decode == "disabled"
