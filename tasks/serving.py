"""Server configurations of the stages, from their parameters."""

from pathlib import Path

from eagle3.conventions import EngineIds
from infra.settings import Settings
from infra.sglang.launch import CaptureServing, DraftServing, ServerConfig
from tasks.params import BenchmarkParams, ExtractParams, ServingParams


def capture_config(params: ExtractParams, target: Path, ids: EngineIds, staging: Path) -> ServerConfig:
    """The target alone, its states captured at `ids`."""
    return _config(
        params.serving,
        target,
        trust_remote_code=params.target.trust_remote_code,
        capture=CaptureServing(ids=ids, staging=staging),
    )


def draft_config(
    params: BenchmarkParams, target: Path, drafter: Path | None, staging: Path | None = None
) -> ServerConfig:
    """The target with a drafter, or without one. `staging`: where the tap puts what the drafter is given.

    No prefix is kept, with the tap and without: the servers of a benchmark are compared with one another.
    """
    draft = None
    if drafter is not None:
        draft = DraftServing(
            path=drafter,
            num_steps=params.spec.num_steps,
            top_k=params.spec.top_k,
            num_draft_tokens=params.spec.num_draft_tokens,
            staging=staging,
        )
    serving = params.serving.model_copy(update={"extra_args": ("--disable-radix-cache", *params.serving.extra_args)})
    return _config(serving, target, trust_remote_code=params.target.trust_remote_code, draft=draft)


def _config(
    serving: ServingParams,
    target: Path,
    *,
    trust_remote_code: bool,
    capture: CaptureServing | None = None,
    draft: DraftServing | None = None,
) -> ServerConfig:
    return ServerConfig(
        target=target,
        device=serving.device,
        dtype=serving.dtype,
        capture=capture,
        draft=draft,
        threads=serving.threads,
        max_running_requests=serving.streams,
        max_total_tokens=serving.max_total_tokens,
        chunked_prefill_size=serving.chunked_prefill_size,
        tensor_parallel=serving.tensor_parallel,
        trust_remote_code=trust_remote_code,
        disable_cuda_graph=serving.disable_decode_graphs,
        extra_args=serving.extra_args,
    )


def log_path(settings: Settings, name: str) -> Path:
    """Where the SGLang server of a stage logs."""
    folder = settings.root / "logs" / "sglang"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"
