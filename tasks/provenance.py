"""Where a run comes from: package versions, commit, the Prefect run's page; and its links into MLflow."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.artifacts import create_link_artifact
from prefect.runtime import flow_run

if TYPE_CHECKING:
    from infra.lineage import Lineage

_PACKAGES = ("eagle3-pipeline", "torch", "transformers", "sglang", "safetensors", "prefect", "mlflow", "boto3")


def package_versions() -> dict[str, str]:
    """Versions of the packages that the states or the weights depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of this software, with `-dirty` where the tree differs from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def prefect_run_url() -> str | None:
    """The page of the flow run that calls this; None outside a run."""
    return flow_run.ui_url if flow_run.id else None


def link_mlflow_run(lineage: "Lineage", run_id: str, what: str) -> None:
    """A link on the Prefect run's page to the MLflow run."""
    create_link_artifact(link=lineage.run_url(run_id), link_text=f"MLflow: {what}", key=f"mlflow-{what}")
