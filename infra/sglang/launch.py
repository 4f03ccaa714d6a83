"""How a SGLang server is started: the command and the environment, made without starting anything."""

import ctypes
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from eagle3.conventions import EngineIds
from eagle3.errors import Eagle3Error
from infra.settings import Settings
from infra.sglang.cpu.plugin import CPU_VARIABLE

HOST = "127.0.0.1"
TAP_VARIABLE = "EAGLE3_TAP_DIR"
STAND_INS = Path(__file__).parent / "cpu" / "stand_ins"
# Bounds of a CPU server's cache, unless the configuration says otherwise: SGLang would take a share of the memory.
CPU_MAX_REQUESTS = 32
CPU_MAX_TOKENS = 16384
CPU_MEM_FRACTION = 0.3
MODULE = ("-m", "sglang.launch_server")
RESERVED = ("--host", "--port", "--model-path", "--api-key", "--admin-api-key", "--config")


class LaunchError(Eagle3Error):
    """A server configuration that SGLang could not be started with."""


class CaptureServing(BaseModel):
    """Serve the target alone and capture states at the layers that `ids` name."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Capture")

    ids: EngineIds = Field(title="Layer ids", description="SGLang's integers beside their convention")
    staging: Path = Field(title="Staging folder", description="Where the tap writes a file for each request")


class DraftServing(BaseModel):
    """Serve the target with a drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Drafter")

    path: Path = Field(title="Drafter's folder")
    algorithm: Literal["EAGLE3"] = Field("EAGLE3", title="Algorithm")
    num_steps: int = Field(3, ge=1, title="Draft steps", description="Tokens drafted in a row before a verification")
    top_k: int = Field(1, ge=1, title="Branches", description="1: a chain; more: a tree")
    num_draft_tokens: int = Field(
        4, ge=2, title="Draft tokens", description="Nodes of a verification, the root included"
    )
    staging: Path | None = Field(
        None,
        title="Staging folder",
        description="Where the tap writes the states that a request asks for; unset: no tap. Chains only (top-k 1)",
    )


class ServerConfig(BaseModel):
    """What is served, and how. Unset fields are left to SGLang, on the CPU to bounds that fit a small machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="SGLang server")

    target: Path = Field(title="Target's folder", description="A Hugging Face folder: config.json and safetensors")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", title="Device", description="auto: CUDA where there is a GPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", title="Data type", description="auto: the checkpoint's on a GPU, float32 on a CPU"
    )
    capture: CaptureServing | None = Field(None, title="Capture", description="For a dump; not together with a drafter")
    draft: DraftServing | None = Field(None, title="Drafter")
    threads: int = Field(1, ge=1, title="Threads", description="CPU only: threads of each process of the model")
    max_running_requests: int | None = Field(None, ge=1, title="Requests at a time")
    max_total_tokens: int | None = Field(None, ge=1, title="Cached tokens", description="Size of the key/value cache")
    mem_fraction: float | None = Field(None, gt=0, lt=1, title="Share of memory for weights and cache")
    chunked_prefill_size: int | None = Field(None, ge=-1, title="Prefill chunk", description="Tokens; -1: off")
    tensor_parallel: int = Field(1, ge=1, title="Tensor-parallel size")
    data_parallel: int = Field(1, ge=1, title="Replicas", description="Data-parallel replicas behind one address")
    trust_remote_code: bool = Field(False, title="Trust remote code", description="Run Python that the target brings")
    disable_cuda_graph: bool = Field(
        False, title="No decode graphs", description="GPU only: needed to capture while answering; slower decoding"
    )
    random_seed: int = Field(1, ge=0, title="Random seed")
    extra_args: tuple[str, ...] = Field((), title="More arguments", description="Passed to SGLang as they are, last")

    @property
    def staging(self) -> Path | None:
        """Where the tap writes; None where it is not loaded."""
        tapped = self.capture or self.draft
        return tapped.staging if tapped else None


@dataclass(frozen=True)
class LaunchPlan:
    """A start that has not happened. `env` is set on top of the starter's environment, PYTHONPATH before what it holds.

    The API key is not in the command: SGLang gets it through a file that only its owner can read (`--config`), written
    when the server starts.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    device: Literal["cpu", "cuda"]
    api_key: SecretStr | None = field(default=None, repr=False)


def launch_plan(config: ServerConfig, port: int, settings: Settings) -> LaunchPlan:
    """The command and environment of a server on this port. Starts nothing; reads at most the target's config.json."""
    if config.capture and config.draft:
        raise LaunchError("a server either captures or drafts: SGLang loads no drafter in capture mode")
    _check_extra_args(config.extra_args)
    _check_key(settings.sglang_api_key)
    device = resolve_device(config.device, settings)
    latent = uses_latent_attention(config.target)
    command = [*interpreter(settings), *MODULE, "--model-path", str(config.target)]
    command += ["--host", HOST, "--port", str(port), "--device", device, "--dtype", _dtype(config, device)]
    command += ["--random-seed", str(config.random_seed), "--tp-size", str(config.tensor_parallel)]
    if config.data_parallel > 1:
        command += ["--dp-size", str(config.data_parallel)]
    if config.trust_remote_code:
        command += ["--trust-remote-code"]
    command += _size_flags(config, device, latent)
    command += _graph_flags(config, device)
    if config.capture:
        command += _capture_flags(config.capture)
    elif config.staging or (device == "cpu" and latent):
        command += ["--disable-radix-cache"]
    if config.draft:
        command += _draft_flags(config.draft)
    command += config.extra_args
    return LaunchPlan(tuple(command), _environment(config, device), device, settings.sglang_api_key)


def interpreter(settings: Settings) -> list[str]:
    """The command that runs SGLang's Python, where the tap must be installed; this interpreter unless set otherwise.

    Ours runs it with `-m sglang.launch_server`, and with `-c` to ask for versions: so a command of the settings ends
    with the former. LaunchError for another one.
    """
    if settings.sglang_command is None:
        return [str(settings.sglang_python or sys.executable)]
    if settings.sglang_python is not None:
        raise LaunchError("EAGLE3_SGLANG_COMMAND and EAGLE3_SGLANG_PYTHON are both set: unset one of them")
    try:
        words = shlex.split(settings.sglang_command)
    except ValueError as error:
        raise LaunchError(f"EAGLE3_SGLANG_COMMAND cannot be split into words ({error})") from None
    if len(words) < 3 or tuple(words[-2:]) != MODULE:
        raise LaunchError(
            f"EAGLE3_SGLANG_COMMAND must end with `{' '.join(MODULE)}`, after the interpreter that runs it: arguments "
            "are put behind it"
        )
    return words[:-2]


def check_device(device: Literal["cpu", "cuda"], settings: Settings) -> None:
    """Refuse to serve on a GPU that is not there, and on the CPU beside a GPU: stand-ins would shadow its packages.

    Also refuses a GPU with this project's CPU environment, whose SGLang lacks its CUDA kernels.
    """
    gpus = count_gpus()
    if device == "cuda" and not gpus:
        raise LaunchError("the device is cuda, but no NVIDIA GPU answers on this machine: set it to cpu or auto")
    ours = settings.sglang_python is None and settings.sglang_command is None
    if device == "cuda" and ours and find_spec("sgl_kernel") is None:
        raise LaunchError(
            f"{gpus} NVIDIA GPUs are visible, but this environment is the CPU's (`make install` brings no sgl_kernel): "
            'hide the GPUs with CUDA_VISIBLE_DEVICES="", or install SGLang for the GPU (docs/install.md) and name its '
            "interpreter in EAGLE3_SGLANG_PYTHON"
        )
    if device == "cpu" and gpus:
        raise LaunchError(
            f"the device is cpu, but {gpus} NVIDIA GPUs are visible, and the CPU stand-ins are never used beside one: "
            'hide them with CUDA_VISIBLE_DEVICES="", or set the device to cuda or auto'
        )


def resolve_device(device: Literal["auto", "cpu", "cuda"], settings: Settings) -> Literal["cpu", "cuda"]:
    """This device, else the settings', else CUDA where a GPU answers."""
    for wanted in (device, settings.sglang_device):
        if wanted != "auto":
            return wanted
    return "cuda" if count_gpus() else "cpu"


def count_gpus() -> int:
    """NVIDIA GPUs that a process started from here may use, asked of the driver: importing torch takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return 0 if failed else count.value


def uses_latent_attention(target: Path) -> bool:
    """Whether the target attends through latents (MLA: the DeepSeek family). False where there is no config to read."""
    try:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    text = config.get("text_config")
    return "kv_lora_rank" in config or (isinstance(text, dict) and "kv_lora_rank" in text)


def _check_extra_args(extra_args: tuple[str, ...]) -> None:
    for argument in extra_args:
        name = argument.partition("=")[0]
        # SGLang's parser takes an unambiguous beginning for the whole flag.
        taken = [flag for flag in RESERVED if name.startswith("--") and flag.startswith(name)]
        if taken:
            raise LaunchError(
                f"{name} in extra_args: {', '.join(taken)} is set by us (the address is always {HOST}, a key is given "
                "as EAGLE3_SGLANG_API_KEY)"
            )


def _check_key(key: SecretStr | None) -> None:
    # What a bearer token may hold (RFC 6750). A quote would be written otherwise in SGLang's log, and not be masked.
    if key is not None and not re.fullmatch(r"[A-Za-z0-9._~+/][A-Za-z0-9._~+/=-]{7,}", key.get_secret_value()):
        raise LaunchError(
            "EAGLE3_SGLANG_API_KEY must have 8 or more characters: letters, digits and . _ ~ + / = -, no - or = first"
        )


def _dtype(config: ServerConfig, device: str) -> str:
    # SGLang's own "auto" serves a float32 checkpoint in float16, and 16-bit products are slow on most processors.
    return "float32" if config.dtype == "auto" and device == "cpu" else config.dtype


def _size_flags(config: ServerConfig, device: str, latent: bool) -> list[str]:
    on_cpu = device == "cpu"
    chunk = config.chunked_prefill_size
    if on_cpu and latent:
        if chunk not in (None, -1):
            raise LaunchError(
                f"chunked_prefill_size is {chunk}, but this target attends through latents (MLA), whose prefill over a "
                "cached prefix the CPU stand-ins do not cover: leave it unset or set it to -1"
            )
        chunk = -1
    sizes = {
        "--max-running-requests": config.max_running_requests or (CPU_MAX_REQUESTS if on_cpu else None),
        "--max-total-tokens": config.max_total_tokens or (CPU_MAX_TOKENS if on_cpu else None),
        "--mem-fraction-static": config.mem_fraction or (CPU_MEM_FRACTION if on_cpu else None),
        "--chunked-prefill-size": chunk,
    }
    return [part for flag, value in sizes.items() if value is not None for part in (flag, str(value))]


def _graph_flags(config: ServerConfig, device: str) -> list[str]:
    decode_off, prefill_off = (["--cuda-graph-backend-" + phase, "disabled"] for phase in ("decode", "prefill"))
    if device == "cuda":
        # That the tap sees every row of a prefill graph was read in SGLang's source; nobody has run it on a GPU yet.
        return [*(decode_off if config.disable_cuda_graph else []), *(prefill_off if config.staging else [])]
    flags = [*decode_off, *prefill_off]
    flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    # Without it the scheduler polls: an idle server would keep a core busy.
    return [*flags, "--skip-server-warmup", "--sleep-on-idle"]


def _capture_flags(capture: CaptureServing) -> list[str]:
    ids = capture.ids.ids
    if capture.ids.engine != "sglang":
        raise LaunchError(f"the ids are those of {capture.ids.engine}, not SGLang's: convert the capture points first")
    if not ids or min(ids) < 0:
        raise LaunchError(
            f"SGLang's capture mode takes one or more layer ids >= 0, and got {list(ids)}: -1 (the embedding) can only "
            "be asked for by a drafter's own config. Capture layers, or serve a drafter that names -1."
        )
    if len(set(ids)) != len(ids):
        raise LaunchError(f"layer ids {list(ids)} name a layer twice")
    # --speculative-algorithm only names the convention of the ids here; no drafter is loaded.
    flags = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    # A prefix found in the radix cache would not be computed, and its rows would be missing.
    return [*flags, "--return-aux-hidden-state-layer-ids", *map(str, ids), "--disable-radix-cache"]


def _draft_flags(draft: DraftServing) -> list[str]:
    flags = ["--speculative-algorithm", draft.algorithm, "--speculative-draft-model-path", str(draft.path)]
    flags += ["--speculative-num-steps", str(draft.num_steps), "--speculative-eagle-topk", str(draft.top_k)]
    return [*flags, "--speculative-num-draft-tokens", str(draft.num_draft_tokens)]


def _environment(config: ServerConfig, device: str) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if config.staging:
        env[TAP_VARIABLE] = str(config.staging)
    if device == "cpu":
        env |= _cpu_environment(config)
    return env


def _cpu_environment(config: ServerConfig) -> dict[str, str]:
    env = {
        CPU_VARIABLE: "1",
        "PYTHONPATH": str(STAND_INS),
        "SGLANG_USE_CPU_ENGINE": "1",
        # Compiling the first EAGLE request would take 15 s.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(config.threads),
        # Several servers may share the cores: waiting threads must not spin.
        "GOMP_SPINCOUNT": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    ranks = config.tensor_parallel * config.data_parallel
    if ranks > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = _thread_binding(ranks, config.threads)
    return env


def _thread_binding(ranks: int, threads: int) -> str:
    """Cores of each process of the model (a tensor-parallel rank of a replica), as SGLang reads them: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * threads:
        raise LaunchError(
            f"{ranks} processes of the model (tensor-parallel ranks times replicas) of {threads} threads need "
            f"{ranks * threads} cores; this process may use {len(cores)}"
        )
    groups = [cores[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)
