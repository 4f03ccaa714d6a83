"""Prefect's deployments file, applied to the local stack's server."""

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import yaml

from infra.processes import MARK, last_lines, mark_of
from infra.stack_parts import base_environment
from infra.stack_runs import while_locked
from infra.stack_state import StackError, StackState

DEPLOY = "deploy"  # the mark's name of the deploying process
_TIMEOUT_S = 180.0
_POLL_S = 0.1


class Stopped(Exception):
    """Another part failed, or the user pressed Ctrl-C: this one need not be waited for."""


def apply_deployments(deployments: Path, state: StackState, stop: threading.Event) -> None:
    """`prefect deploy --all` from the folder of the file, logged to `<home>/logs/deploy.log`.

    Raises StackError with the last log lines where Prefect refuses the file, Stopped where `stop` is set meanwhile.
    """
    log = state.home / "logs" / f"{DEPLOY}.log"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    environment = base_environment() | state.environment() | {MARK: mark_of(DEPLOY, state.home)}
    deadline = time.monotonic() + _TIMEOUT_S
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=deployments.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None:
            if stop.is_set() or time.monotonic() > deadline:
                process.kill()
            time.sleep(_POLL_S)
    if stop.is_set():
        raise Stopped
    if process.returncode != 0:
        raise StackError(
            f"{deployments} could not be applied (exit code {process.returncode}). The last lines of {log}:\n"
            f"{last_lines(log)}"
        )


@while_locked
def _limit_pool(api_url: str, pool: str, limit: int, before: int) -> bool:
    with httpx.Client(base_url=api_url, timeout=10, trust_env=False) as client:
        found = client.get(f"/work_pools/{pool}").raise_for_status().json()
        if found["concurrency_limit"] not in {None, before, limit}:
            return False
        client.patch(f"/work_pools/{pool}", json={"concurrency_limit": limit}).raise_for_status()
        return True


def limit_pool(api_url: str, pool: str, limit: int, *, before: int = 1) -> bool:
    """Let `limit` flow runs at a time into the pool, unless somebody set another limit than `before`, which was ours.

    Whether it was set. Raises StackError.
    """
    try:
        return _limit_pool(api_url, pool, limit, before)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise StackError(f"the work pool {pool} could not be limited to {limit} runs at a time: {error}") from error


def are_deployed(deployments: Path, state: StackState) -> bool:
    """Whether the server has every deployment of the file. A flow is named like its function."""
    content = yaml.safe_load(deployments.read_text(encoding="utf-8"))
    entries = content.get("deployments") or [] if isinstance(content, dict) else []
    names = [f"{str(entry.get('entrypoint')).rpartition(':')[2]}/{entry.get('name')}" for entry in entries]
    try:
        with httpx.Client(base_url=state.prefect_api_url, timeout=10, trust_env=False) as client:
            return all(client.get(f"/deployments/name/{quote(name)}").is_success for name in names)
    except httpx.HTTPError:
        return False


def deployments_digest(deployments: Path) -> str:
    """Digest of the file and of the packages beside it, whose signatures the deployments show."""
    digest = hashlib.sha256(deployments.read_bytes())
    for package in sorted(deployments.parent.glob("*/__init__.py")):
        for path in sorted(package.parent.rglob("*.py")):
            digest.update(f"\0{path.relative_to(deployments.parent)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
