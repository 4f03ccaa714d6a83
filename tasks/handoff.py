"""How a flow run hands its result to the run that started it: a small JSON object in the store, keyed by the run's id.

Prefect's own results lie on the worker's disk by default, and workers live on several machines; the store is the one
place that all of them reach. The object holds references (URI + digest) and ids, never a tensor.
"""

from typing import TypeVar

from prefect.runtime import flow_run
from pydantic import BaseModel, ValidationError

from eagle3.errors import Eagle3Error
from infra.settings import Settings
from infra.store import open_store

_MAX_BYTES = 2**20
Result = TypeVar("Result", bound=BaseModel)


class HandoffError(Eagle3Error):
    """A stage that ended without a result that its caller can use."""


def _key(run_id: str) -> str:
    return f"runs/{run_id}.json"


def leave_result(result: Result, settings: Settings) -> Result:
    """Store the result of the flow run that calls this, and return it. Outside a run it is only returned."""
    if flow_run.id:
        data = result.model_dump_json(indent=1).encode()
        open_store(settings.store, settings).put_bytes(_key(str(flow_run.id)), data)
    return result


def take_result(run_id: str, model: type[Result], settings: Settings) -> Result:
    """The result that a finished flow run left."""
    store = open_store(settings.store, settings)
    data = store.get_bytes(_key(run_id), max_bytes=_MAX_BYTES)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise HandoffError(f"the result of flow run {run_id} is not a {model.__name__}: {error}") from None
