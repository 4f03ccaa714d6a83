"""Flow runs whose process is gone: said to be crashed, so that they neither run for ever nor keep others waiting."""

from collections.abc import Iterable
from typing import Any

import httpx

_TIMEOUT_S = 10.0
_PAGE = 100
_HAVE_A_PROCESS = ["RUNNING", "PENDING", "CANCELLING"]


def crash_lost_runs(api_url: str, pools: Iterable[str], reason: str) -> int:
    """Set the unfinished runs of these work pools, and their subflows, to Crashed; how many there were.

    Call it only while nothing runs for these pools. A server that does not answer is no error: 0.
    """
    count = 0
    try:
        with httpx.Client(base_url=api_url, timeout=_TIMEOUT_S, trust_env=False) as client:
            lost = _unfinished(client, {"work_pools": {"name": {"any_": list(pools)}}})
            while lost:
                for run in lost:
                    state = {"type": "CRASHED", "name": "Crashed", "message": reason}
                    answer = client.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": True})
                    answer.raise_for_status()
                count += len(lost)
                lost = _unfinished(client, {}, parents=lost)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        pass
    return count


def _unfinished(client: httpx.Client, query: dict[str, Any], parents: list[str] | None = None) -> list[str]:
    runs: dict[str, Any] = {"state": {"type": {"any_": _HAVE_A_PROCESS}}}
    if parents is not None:
        runs["parent_flow_run_id"] = {"any_": parents}
    found: list[str] = []
    while True:
        page = {"flow_runs": runs, "limit": _PAGE, "offset": len(found), "sort": "ID_DESC"}
        answer = client.post("/flow_runs/filter", json=query | page)
        ids = [str(run["id"]) for run in answer.raise_for_status().json()]
        found += ids
        if len(ids) < _PAGE:
            return found
