"""What every flow does the same way: settings of the worker, and a failure hook that says what to do next."""

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_run_logger

from infra.quiet import quiet_libraries
from infra.settings import Settings


def worker_settings() -> Settings:
    """Settings of the process that runs the flow, from its environment."""
    quiet_libraries()
    return Settings()


def say_what_next(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Failure and crash hook: one line a person can act on."""
    get_run_logger().error(
        "%s %s ended as %s: %s. Nothing of it is registered; mend the cause and run the deployment again.",
        flow.name,
        flow_run.name,
        state.name,
        (state.message or "no message").strip(),
    )
