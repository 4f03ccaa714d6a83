"""The command `eagle3`. Exit codes: 0 done, 1 an error with a message, 2 wrong usage (3: could not be checked)."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eagle3.errors import Eagle3Error
from flows import cli_dump_store, cli_layers, cli_plan, cli_probe
from flows.cli_checkpoint import checkpoint_app
from flows.cli_dump import dump_app
from flows.console import DOES, AsJson, Config, Prompts, err, help_end, out, plain, print_json, telling
from infra.quiet import quiet_libraries
from infra.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="From prompts to an audited EAGLE-3 drafter.\n\n"
    "Start with [bold]eagle3 demo[/bold]. Everything is kept in the folder EAGLE3_HOME (unset: .eagle3 where you are).",
    epilog="Exit codes: 0 done or proven, 1 an error with a message, or refuted, 2 wrong usage, 3 could not be checked",
)

NumTrain = Annotated[int | None, typer.Option(min=1, help="Train on so many of the prompts; unset: on all.")]
Also = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Report acceptance on the prompts of this file too (repeatable)."),
]


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


@app.command(
    epilog=help_end(
        "eagle3 demo",
        "eagle3 demo --exit",
        "eagle3 demo --prompts my.jsonl --num-train 200 --also gsm8k_test.jsonl",
        exits=DOES,
    )
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

    run_demo(pipeline_params(prompts=prompts, num_train=num_train, also=also), Settings.load(), out, stay=not leave)


@app.command(epilog=help_end("eagle3 up && eagle3 status", "EAGLE3_HOME=/data/eagle3 eagle3 up", exits=DOES))
def up() -> None:
    """Start the local stack: Prefect server, a worker for each pool, MLflow, S3; apply the deployments."""
    from infra import stack

    start = time.monotonic()
    state = stack.up(Settings.load(), on_progress=lambda text: out.print(text, markup=False)).state
    out.print(f"up in {time.monotonic() - start:.0f} s")
    out.print(
        f"Prefect  {state.prefect_ui_url}\nMLflow   {state.mlflow_url}\nS3       {state.s3_endpoint}", markup=False
    )


@app.command(epilog=help_end("eagle3 down", exits=DOES))
def down() -> None:
    """End every process of the local stack, flow runs and SGLang servers included. Data stays."""
    from infra import stack

    settings = Settings.load()
    ended = stack.down(settings, on_progress=lambda text: out.print(text, markup=False))
    what = f"ended {ended} processes of" if ended else "nothing ran in"
    out.print(f"{what} {settings.root} (EAGLE3_HOME)", markup=False, soft_wrap=True)


@app.command(
    epilog=help_end("eagle3 status", "eagle3 status --json", exits="0 every part runs, 1 one does not, 2 wrong usage")
)
def status(as_json: AsJson = False) -> None:
    """Say which parts of the stack run, where, and what to do about those that do not."""
    from rich.table import Table

    from infra import stack

    settings = Settings.load()
    parts = stack.status(settings)
    if as_json:
        print_json([part.model_dump(mode="json") for part in parts])
    else:
        table = Table("part", "state", "address", "what to do")
        for part in parts:
            table.add_row(
                part.name, part.state if part.healthy else f"[red]{part.state}[/red]", part.url or "", part.mend
            )
        out.print(table)
        out.print(f"home: {settings.root} (EAGLE3_HOME)", markup=False, soft_wrap=True)
    if not all(part.healthy for part in parts):
        raise typer.Exit(1)


@app.command(
    epilog=help_end(
        "eagle3 run --config configs/smollm2.yaml",
        "eagle3 run --config configs/kimi-k2.5.yaml --dry-run",
        exits="0 completed, 1 refused or failed, with a message, 2 wrong usage",
    )
)
def run(
    config: Config = None,
    prompts: Prompts = None,
    num_train: NumTrain = None,
    also: Also = None,
    name: Annotated[str | None, typer.Option(help="Name of the run: lower-case letters, digits, dashes.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the inputs and print what `eagle3 plan` prints; start nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline on the stack that is up (`eagle3 up`), and follow it. Ctrl-C leaves it running."""
    from flows.options import pipeline_params

    params = pipeline_params(config, prompts=prompts, num_train=num_train, also=also, name=name)
    settings = Settings.load()
    if dry_run:
        from flows import show
        from tasks.planning import plan_pipeline

        with telling() as tell:
            plan = plan_pipeline(params, settings, on_progress=tell)
        if as_json:
            print_json(plan.model_dump(mode="json"))
        else:
            show.print_plan(plan, out)
        return
    from flows.demo import run_on_stack

    result = run_on_stack(params, settings, err if as_json else out)
    from flows import show  # it imports Prefect, which must not come before the server's address

    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show.print_result(result, out)


@app.command(
    epilog=help_end("eagle3 lineage eagle3-smollm2@champion", "eagle3 lineage eagle3-smollm2@3 --json", exits=DOES)
)
def lineage(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="NAME@ALIAS or NAME@VERSION in MLflow.")],
    as_json: AsJson = False,
) -> None:
    """Walk from a registered drafter back to the tensors that it was trained on."""
    from eagle3.evidence.standing import contract_standing
    from infra.lineage import Lineage, render
    from infra.stack import connect

    name, _, which = drafter.rpartition("@")
    if not name or not which:
        raise typer.BadParameter(f"expected NAME@ALIAS or NAME@VERSION, got {drafter!r}")
    tree = Lineage(connect(Settings.load()).mlflow_uri()).walk(name, which)
    stands = contract_standing(tree.drafter.contract)
    if as_json:
        print_json(tree.model_dump(mode="json") | {"evidence_current": stands.current, "evidence": stands.reason})
    else:
        out.print(render(tree))
        stale = "" if stands.current else "careful, stale evidence: "
        out.print(plain(f"{stale}{stands.reason}"), markup=False, soft_wrap=True)


@app.command(
    epilog=help_end(
        "eagle3 doctor",
        "eagle3 doctor --server http://127.0.0.1:30000 --staging /data/tap",
        exits="0 nothing is missing, 1 something is, 2 wrong usage",
    )
)
def doctor(
    server: Annotated[str | None, typer.Option(metavar="URL", help="A running SGLang server to ask too.")] = None,
    staging: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its EAGLE3_TAP_DIR: what its tap says of the model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is there and what is missing on this machine, each with the step that mends it."""
    from rich.table import Table

    from infra.stack import connect
    from tasks.doctor import examine_machine

    items = examine_machine(connect(Settings.load()), server, staging)
    if as_json:
        print_json([asdict(item) for item in items])
    else:
        table = Table("what", "ok", "found", "what to do")
        for item in items:
            table.add_row(item.name, "yes" if item.ok else "[red]no[/red]", item.found, item.mend)
        out.print(table)
    if not all(item.ok for item in items):
        raise typer.Exit(1)


# `--help` lists them in this order, behind the ones above.
app.command("plan", epilog=cli_plan.EPILOG)(cli_plan.plan)
app.command("layers", epilog=cli_layers.EPILOG)(cli_layers.layers)
app.command("probe", epilog=cli_probe.EPILOG)(cli_probe.probe)
cli_dump_store.add_to(dump_app)
app.add_typer(dump_app, name="dump")
app.add_typer(checkpoint_app, name="checkpoint")

if __name__ == "__main__":
    main()
