"""`eagle3 demo`: the local stack, one pipeline run, one table."""

import time

from rich.console import Console

from flows import show
from infra import stack
from infra.settings import Settings
from tasks.params import PipelineParams
from tasks.results import PipelineResult


def run_demo(params: PipelineParams, settings: Settings, console: Console, *, stay: bool) -> None:
    """Up, run, show; then wait for Ctrl-C (`stay`) and take the stack down."""
    console.print("[bold]1. The local stack[/bold]: Prefect, two workers, MLflow and S3 on this machine")
    start = time.monotonic()
    state = stack.up(settings, on_progress=lambda text: console.print(f"   {text}", markup=False))
    console.print(f"   up in {time.monotonic() - start:.0f} s; logs in {settings.root / 'logs'}", markup=False)
    try:
        console.print("[bold]2. The pipeline[/bold]: extract, validate, train, benchmark, register")
        result = run_on_stack(params, settings, console)
        show.print_result(result, console)
        if stay:
            console.print(
                f"\nThe stack stays up until Ctrl-C. Prefect {state.prefect_ui_url} · MLflow {state.mlflow_url}\n"
                "Run again from the UI's form (Deployments > pipeline > Run), or: "
                f"eagle3 lineage {result.model_name}@{result.alias}",
                markup=False,
            )
            _wait_for_interrupt()
    finally:
        console.print("taking the stack down ...", markup=False)
        stack.down(settings)


def run_on_stack(params: PipelineParams, settings: Settings, console: Console) -> PipelineResult:
    """Submit to the stack that is up, and follow. Ctrl-C leaves `eagle3 run`'s flow running and says how to stop it."""
    connected = stack.connect(settings)
    from flows import follow

    run = follow.submit(params)
    console.print(f"   run {run.name}: {follow.run_url(run)}", markup=False, soft_wrap=True)
    return follow.follow(run.id, connected, console)


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
