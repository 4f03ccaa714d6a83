"""`eagle3 plan`: what an extraction takes, and whether there is room for it. Starts nothing.

Exit codes: 0 it fits, 1 it does not (or an error), 2 wrong usage, 3 the room could not be asked for.
"""

from pathlib import Path
from typing import Annotated

import typer

from flows.console import AsJson, Config, Prompts, err, help_end, out, print_json, telling
from infra.settings import Settings

EPILOG = help_end(
    "eagle3 plan --config configs/smollm2.yaml",
    "eagle3 plan --config configs/kimi-k2.5.yaml --price 2.5 --staging /data/staging",
    exits="0 it fits, 1 it does not, or an error, 2 wrong usage, 3 the room is not known from here",
)
_EXIT = {"fits": 0, "lacking": 1, "unknown": 3}


def plan(
    config: Config = None,
    prompts: Prompts = None,
    num_train: Annotated[
        int | None, typer.Option(min=1, help="Answer so many of the prompts; unset: all that are not held out.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Of a GPU-hour, in the configuration's currency (plan.currency).")
    ] = None,
    staging: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The disk for captured rows. Unset: EAGLE3_HOME's, where the target is on this machine."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what an extraction takes before it starts: tokens, bytes, time, money, room on disk and in the store.

    Refuses what the run would refuse at its start, with the sample named.
    What is assumed is said, and set by the configuration's `plan`.
    The demo's model is made on its first use (270 MB under EAGLE3_HOME).
    """
    from flows.options import pipeline_params
    from flows.show import print_plan
    from infra.stack import connect
    from tasks.planning import plan_pipeline
    from tasks.room import refuse_lacking

    params = pipeline_params(config, prompts=prompts, num_train=num_train)
    if price is not None:
        params = params.model_copy(update={"plan": params.plan.model_copy(update={"price_per_gpu_hour": price})})
    with telling() as tell:
        planned = plan_pipeline(params, connect(Settings.load()), staging, tell)
    if as_json:
        print_json(planned.model_dump(mode="json") | {"verdict": planned.verdict})
    else:
        print_plan(planned, out)
    refuse_lacking(planned.rooms)
    if code := _EXIT[planned.verdict]:
        err.print("the room could not be asked for: see `room` above", markup=False)
        raise typer.Exit(code)
