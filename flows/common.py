"""What every flow does the same way: settings of the worker, and a failure hook that says what to do next."""

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger

from infra.quiet import quiet_libraries
from infra.settings import Settings


def worker_settings() -> Settings:
    """Settings of the process that runs the flow, from its environment."""
    quiet_libraries()
    return Settings.load()


def say_what_next(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Failure and crash hook: one line a person can act on.

    After a crash it is the worker that calls it, outside any run: the logger is made for the run that ended.
    """
    flow_run_logger(flow_run, flow).error(
        "%s %s ended as %s: %s. Mend the cause, then start it again.",
        flow.name,
        flow_run.name,
        state.name,
        (state.message or "no message").strip().rstrip("."),
    )
