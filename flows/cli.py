"""The command `eagle3`. Exit codes: 0 done, 1 an error with a message, 2 wrong usage (3: could not be checked)."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle3.capture import CapturePoint
from eagle3.conventions import EngineIds, ids_of, points_of
from eagle3.errors import Eagle3Error
from infra.quiet import quiet_libraries
from infra.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="From prompts to an audited EAGLE-3 drafter.\n\nStart with [bold]eagle3 demo[/bold].",
)
dump_app = typer.Typer(no_args_is_help=True, help="Look at dumps.")
app.add_typer(dump_app, name="dump")

# A pipe or a log has no width of its own: lines stay whole there.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 200)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
Prompts = Annotated[Path | None, typer.Option(help="Other prompts (JSON lines).")]
NumTrain = Annotated[int | None, typer.Option(min=1, help="Train on so many of the prompts; unset: on all.")]
Also = Annotated[list[Path] | None, typer.Option(help="Report acceptance on this file too (repeatable).")]


def main() -> None:
    """Entry point: an Eagle3Error is a message, anything else keeps its traceback."""
    quiet_libraries()
    try:
        app()
    except Eagle3Error as error:
        err.print(f"[bold red]error:[/bold red] {_escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


@app.command(
    epilog="Examples:  [bold]eagle3 demo[/bold]   ·   [bold]eagle3 demo --exit[/bold]   ·   "
    "[bold]eagle3 demo --prompts my.jsonl --num-train 200 --also gsm8k_test.jsonl[/bold]"
)
def demo(
    leave: Annotated[
        bool, typer.Option("--exit", help="End the stack when the run is done, unless it was up before.")
    ] = False,
    prompts: Prompts = None,
    num_train: NumTrain = None,
    also: Also = None,
) -> None:
    """Start the local stack, run the whole pipeline on a small real model, show what came out."""
    from flows.demo import run_demo
    from flows.options import pipeline_params

    run_demo(pipeline_params(prompts=prompts, num_train=num_train, also=also), Settings(), out, stay=not leave)


@app.command(epilog="Example:  [bold]eagle3 up && eagle3 status[/bold]")
def up() -> None:
    """Start the local stack: Prefect server, a worker for each pool, MLflow, S3; apply the deployments."""
    from infra import stack

    start = time.monotonic()
    state = stack.up(Settings(), on_progress=lambda text: out.print(text, markup=False)).state
    out.print(f"up in {time.monotonic() - start:.0f} s")
    out.print(
        f"Prefect  {state.prefect_ui_url}\nMLflow   {state.mlflow_url}\nS3       {state.s3_endpoint}", markup=False
    )


@app.command(epilog="Example:  [bold]eagle3 down[/bold]")
def down() -> None:
    """End every process of the local stack, flow runs and SGLang servers included. Data stays."""
    from infra import stack

    stack.down(Settings(), on_progress=lambda text: out.print(text, markup=False))


@app.command(epilog="Example:  [bold]eagle3 status --json[/bold]")
def status(as_json: AsJson = False) -> None:
    """Say which parts of the stack run; exit 1 where one does not."""
    from rich.table import Table

    from infra import stack

    parts = stack.status(Settings())
    if as_json:
        _print_json([part.model_dump(mode="json") for part in parts])
    else:
        table = Table("part", "state", "address", "what to do")
        for part in parts:
            table.add_row(
                part.name, part.state if part.healthy else f"[red]{part.state}[/red]", part.url or "", part.mend
            )
        out.print(table)
    if not all(part.healthy for part in parts):
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  [bold]eagle3 run --config configs/smollm2.yaml[/bold]   ·   "
    "[bold]eagle3 run --config configs/kimi-k2.5.yaml --dry-run[/bold]"
)
def run(
    config: Annotated[Path | None, typer.Option(help="YAML file with the pipeline's parameters.")] = None,
    prompts: Prompts = None,
    num_train: NumTrain = None,
    also: Also = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print launch command, layer ids and sizes; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline on the stack that is up, and follow it. Ctrl-C leaves it running."""
    from flows.options import pipeline_params

    params = pipeline_params(config, prompts=prompts, num_train=num_train, also=also, name=name)
    settings = Settings()
    if dry_run:
        from flows import show
        from tasks.planning import plan_pipeline

        plan = plan_pipeline(params, settings)
        if as_json:
            _print_json(plan.model_dump(mode="json"))
        else:
            show.print_plan(plan, out)
        return
    from flows.demo import run_on_stack

    result = run_on_stack(params, settings, err if as_json else out)
    from flows import show  # it imports Prefect, which must not come before the server's address

    if as_json:
        _print_json(result.model_dump(mode="json"))
    else:
        show.print_result(result, out)


@app.command(
    epilog="Examples:  [bold]eagle3 layers --model-class LlamaForCausalLM --num-layers 30 --ids 2,15,27[/bold]   ·   "
    "[bold]eagle3 layers --model-class KimiK25ForConditionalGeneration --num-layers 61 "
    "--points layers.2,layers.30,layers.58[/bold]"
)
def layers(
    model_class: Annotated[str, typer.Option(help="`architectures[0]` of the target's config.json.")],
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the target.")],
    ids: Annotated[str | None, typer.Option(help="The engine's ids, e.g. 2,15,27.")] = None,
    points: Annotated[str | None, typer.Option(help="Canonical names, e.g. layers.2,layers.15,layers.27.")] = None,
    engine: Annotated[str, typer.Option(help="Engine.")] = "sglang",
    engine_version: Annotated[str, typer.Option(help="Its version.")] = "0.5.23",
    as_json: AsJson = False,
) -> None:
    """Say which tensors an engine's layer ids capture, or which ids capture the tensors you want."""
    if (ids is None) == (points is None):
        raise typer.BadParameter("give either --ids or --points")
    if ids is not None:
        try:
            numbers = tuple(int(part) for part in ids.split(","))
        except ValueError:
            raise typer.BadParameter(
                f"--ids takes integers with commas between them, e.g. 2,15,27; got {ids!r}"
            ) from None
        engine_ids = EngineIds(engine=engine, version=engine_version, model_class=model_class, ids=numbers)
        captured = points_of(engine_ids, num_layers)
    else:
        captured = tuple(CapturePoint(part.strip()) for part in (points or "").split(","))
        engine_ids = ids_of(
            captured, engine=engine, version=engine_version, model_class=model_class, num_layers=num_layers
        )
    words = [f"{point}: {_in_words(point)}" for point in captured]
    if as_json:
        _print_json(
            {
                "points": list(captured),
                "ids": list(engine_ids.ids),
                "engine": engine_ids.model_dump(mode="json"),
                "explanation": words,
                "warnings": [],
            }
        )
        return
    out.print(f"ids     {engine_ids}\npoints  {', '.join(captured)}", markup=False)
    for line in words:
        out.print(f"  {line}", markup=False)


def _in_words(point: CapturePoint) -> str:
    if point.boundary is None:
        return "the output of the final norm"
    if point.boundary == 0:
        return "the token embedding = the input of layer 0"
    return f"captured at the input of layer {point.boundary} = output of layer {point.boundary - 1}"


@app.command(
    epilog="Examples:  [bold]eagle3 lineage eagle3-smollm2@champion[/bold]   ·   "
    "[bold]eagle3 lineage eagle3-smollm2@3 --json[/bold]"
)
def lineage(
    drafter: Annotated[str, typer.Argument(help="NAME@ALIAS or NAME@VERSION in MLflow.")],
    as_json: AsJson = False,
) -> None:
    """Walk from a registered drafter back to the tensors that it was trained on."""
    from infra.lineage import Lineage, render
    from infra.stack import connect

    name, _, which = drafter.rpartition("@")
    if not name or not which:
        raise typer.BadParameter(f"expected NAME@ALIAS or NAME@VERSION, got {drafter!r}")
    tree = Lineage(connect(Settings()).mlflow_uri()).walk(name, which)
    if as_json:
        _print_json(tree.model_dump(mode="json"))
    else:
        out.print(render(tree))


@dump_app.command(
    "verify", epilog="Example:  [bold]eagle3 dump verify s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d[/bold]"
)
def dump_verify(
    uri: Annotated[str, typer.Argument(help="s3:// or file:// prefix, or a folder.")],
    as_json: AsJson = False,
) -> None:
    """Check every file of a dump against its manifest. Exit 0 proven, 1 refuted, 3 could not be checked."""
    from infra.stack import connect
    from tasks.artifacts import CannotCheck, verify_dump

    try:
        report = verify_dump(uri, connect(Settings()))
    except CannotCheck as error:
        err.print(f"could not be checked: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(3) from None
    if as_json:
        _print_json(report.model_dump(mode="json"))
    else:
        for check in report.checks:
            out.print(f"{check.verdict:<5} {check.name:<14} {check.sentence}", markup=False, soft_wrap=True)
    if report.verdict == "fail":
        raise typer.Exit(1)


@app.command(epilog="Example:  [bold]eagle3 doctor --json[/bold]")
def doctor(as_json: AsJson = False) -> None:
    """Say what is there and what is missing on this machine, each with the step that mends it."""
    from rich.table import Table

    from infra.stack import connect
    from tasks.doctor import examine_machine

    items = examine_machine(connect(Settings()))
    if as_json:
        _print_json([asdict(item) for item in items])
    else:
        table = Table("what", "ok", "found", "what to do")
        for item in items:
            table.add_row(item.name, "yes" if item.ok else "[red]no[/red]", item.found, item.mend)
        out.print(table)
    if not all(item.ok for item in items):
        raise typer.Exit(1)
