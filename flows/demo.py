"""`eagle3 demo` and `eagle3 run`: a pipeline run from the terminal, followed to its table or left with Ctrl-C.

What imports Prefect is imported after `stack.connect`, which sets the server's address: Prefect reads it once.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eagle3.errors import Eagle3Error
from infra import stack
from infra.settings import Settings
from tasks.params import PipelineParams
from tasks.results import PipelineResult

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun


class ForeignServer(Eagle3Error):
    """The environment names another Prefect server than the one that this command starts."""


def run_demo(params: PipelineParams, settings: Settings, console: Console, *, stay: bool) -> None:
    """Up, run, show; then wait for Ctrl-C (`stay`). A stack that this call started is taken down at the end.

    Ctrl-C before that cancels the run; SIGTERM and SIGHUP (a closed terminal) do what Ctrl-C does.
    """
    with _signals_as_interrupt():
        _run_demo(params, settings, console, stay=stay)


def _run_demo(params: PipelineParams, settings: Settings, console: Console, *, stay: bool) -> None:
    console.print("[bold]1. The local stack[/bold]: Prefect, two workers, MLflow and S3 on this machine")
    start = time.monotonic()
    up = stack.up(settings, on_progress=lambda text: console.print(f"   {text}", markup=False))
    own = not up.found
    console.print(f"   up in {time.monotonic() - start:.0f} s; logs in {settings.root / 'logs'}", markup=False)
    try:
        refuse_foreign_server(up.state.prefect_api_url)
        console.print("[bold]2. The pipeline[/bold]: extract, validate, train, benchmark, register")
        result = _run(params, settings, console)
        from flows import show

        show.print_result(result, console)
        console.print(
            f"\nPrefect {up.state.prefect_ui_url} · MLflow {up.state.mlflow_url}\n"
            "Run again from the UI's form (Deployments > pipeline > Run), or: "
            f"eagle3 lineage {result.model_name}@{result.alias}",
            markup=False,
        )
        if own and stay:
            console.print("The stack stays up until Ctrl-C.")
            _wait_for_interrupt()
    finally:
        if own:
            console.print("taking the stack down ...", markup=False)
            stack.down(settings)
            console.print("Everything is kept: `eagle3 up` brings it back at the same addresses.", markup=False)
        else:
            console.print("The stack was up before, so it stays up: `eagle3 down` ends it.", markup=False)


def _run(params: PipelineParams, settings: Settings, console: Console) -> PipelineResult:
    """Submit and follow; Ctrl-C cancels the run."""
    connected = stack.connect(settings)
    from flows import follow

    run = _submit(params, console)
    try:
        return follow.follow(run.id, connected, console)
    except KeyboardInterrupt:
        follow.cancel(run.id)
        console.print(f"\n{run.name} is being cancelled", markup=False)
        raise


def run_on_stack(params: PipelineParams, settings: Settings, console: Console) -> PipelineResult:
    """Submit to the stack that is up, and follow. Ctrl-C leaves the run, and says how to watch and cancel it."""
    connected = stack.connect(settings)
    from flows import follow

    run = _submit(params, console)
    try:
        return follow.follow(run.id, connected, console)
    except KeyboardInterrupt:
        console.print(
            f"\n{run.name} goes on. Watch it, or cancel it, at {follow.run_url(run)}\n"
            f"or cancel it with: {follow.cancel_command(run.id)}",
            markup=False,
            soft_wrap=True,
        )
        raise


def _submit(params: PipelineParams, console: Console) -> "FlowRun":
    from flows import follow

    run = follow.submit(params)
    console.print(f"   run {run.name}: {follow.run_url(run)}", markup=False, soft_wrap=True)
    return run


def refuse_foreign_server(own: str) -> None:
    """Raise ForeignServer where PREFECT_API_URL names another server than `own`."""
    named = os.environ.get("PREFECT_API_URL")
    if named and named.rstrip("/") != own:
        raise ForeignServer(
            f"PREFECT_API_URL is {named}, and the demo runs on its own stack ({own}): unset the variable, or use "
            "`eagle3 run`, which submits to the server that it names"
        )


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Without this a SIGTERM would skip every `finally`: five servers would stay."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
