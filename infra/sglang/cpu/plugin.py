"""SGLang plugin (entry point `eagle3_cpu`): EAGLE drafting on a CPU without AMX.

Where the processor has no AMX, SGLang 0.5.23 falls back to the attention backend `torch_native`, which its EAGLE draft
backends refuse. The backend classes written for AMX need only two attention functions, and the stand-in for
`sgl_kernel` has them: so `torch_native` is answered with those classes.
"""

import logging
import os
from typing import Any

CPU_VARIABLE = "EAGLE3_SGLANG_CPU"

_log = logging.getLogger("eagle3.cpu")


def register() -> None:
    """Called by SGLang in each of its processes. Does nothing unless the server was launched for the CPU.

    `launch.check_device` refuses such a launch where a GPU is visible; a process that sees one nevertheless stays as
    it is, and says so.
    """
    if os.environ.get(CPU_VARIABLE) != "1":
        return
    import torch

    if torch.cuda.is_available():
        _log.warning('%s is set, but torch sees a GPU: nothing is changed. Set CUDA_VISIBLE_DEVICES=""', CPU_VARIABLE)
        return
    _route_torch_native()
    _silence_cuda_calls(torch)


def _route_torch_native() -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention_registry.ATTENTION_BACKENDS["torch_native"] = attention_registry.ATTENTION_BACKENDS["intel_amx"]
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", _draft_on_cpu, HookType.BEFORE
    )


def _draft_on_cpu(_factory: Any, _name: str, backend_map: dict[str, Any], *_args: Any, **_kwargs: Any) -> None:
    if "intel_amx" in backend_map:
        backend_map.setdefault("torch_native", backend_map["intel_amx"])


def _silence_cuda_calls(torch: Any) -> None:
    """`Eagle3DeepseekV2ForCausalLM.set_embed` synchronises CUDA whatever the device is (0.5.23)."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.empty_cache = lambda *_, **__: None
