"""Flow runs whose process or pipeline is gone: ended, so that they neither run for ever nor keep others waiting."""

from collections.abc import Iterable
from typing import Any

import httpx
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

_TIMEOUT_S = 10.0
_PAGE = 100
_HAVE_A_PROCESS = ["RUNNING", "PENDING", "CANCELLING"]
_GAVE_UP = {"FAILED", "CRASHED", "CANCELLED"}
# What a server that does not answer, or answers something else, ends in: the caller goes on without it.
_NO_ANSWER = (httpx.HTTPError, ValueError, KeyError, TypeError)


def _is_locked(error: BaseException) -> bool:
    """Two workers write to the server's SQLite beside us: a write that finds it locked waits, or gets 503."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    return isinstance(error, httpx.ReadTimeout)


while_locked = retry(
    retry=retry_if_exception(_is_locked), stop=stop_after_delay(30), wait=wait_random(0.3, 1.5), reraise=True
)


def crash_lost_runs(api_url: str, pools: Iterable[str], reason: str) -> int:
    """End the runs of these work pools that had a process, and their subflows; how many there were.

    They become Crashed, those that somebody was cancelling Cancelled. Call it only while nothing runs for these pools.
    A server that does not answer is no error: 0.
    """
    count = 0
    try:
        with _client(api_url) as client:
            state = {"type": {"any_": _HAVE_A_PROCESS}}
            lost = _find(client, _of_pools(pools), {"state": state})
            while lost:
                for run in lost:
                    kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
                    _end(client, run["id"], kind, reason)
                count += len(lost)
                parents = {"any_": [run["id"] for run in lost]}
                lost = _find(client, {}, {"state": state, "parent_flow_run_id": parents})
    except _NO_ANSWER:
        pass
    return count


def crash_orphans(api_url: str, pools: Iterable[str]) -> int:
    """Set runs that wait for their turn in these pools to Crashed where the run that wants them gave up; how many.

    They would run without anybody who takes their result. Runs that a person or a schedule asked for have no parent and
    stay. A server that does not answer is no error: 0.
    """
    count = 0
    try:
        with _client(api_url) as client:
            waiting = {"state": {"type": {"any_": ["SCHEDULED"]}}, "parent_task_run_id": {"is_null_": False}}
            for run in _find(client, _of_pools(pools), waiting):
                task = client.get(f"/task_runs/{run['parent_task_run_id']}").raise_for_status().json()
                parent = client.get(f"/flow_runs/{task['flow_run_id']}").raise_for_status().json()
                if parent["state_type"] in _GAVE_UP:
                    _end(client, run["id"], "CRASHED", f"its parent run {parent['name']} is over")
                    count += 1
    except _NO_ANSWER:
        pass
    return count


def _client(api_url: str) -> httpx.Client:
    return httpx.Client(base_url=api_url, timeout=_TIMEOUT_S, trust_env=False)


def _of_pools(pools: Iterable[str]) -> dict[str, Any]:
    return {"work_pools": {"name": {"any_": list(pools)}}}


@while_locked
def _end(client: httpx.Client, run: str, kind: str, reason: str) -> None:
    state = {"type": kind, "name": kind.capitalize(), "message": reason}
    client.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": True}).raise_for_status()


def _find(client: httpx.Client, query: dict[str, Any], runs: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = {"flow_runs": runs, "limit": _PAGE, "offset": len(found), "sort": "ID_DESC"}
        rows = client.post("/flow_runs/filter", json=query | page).raise_for_status().json()
        found += rows
        if len(rows) < _PAGE:
            return found
