"""The lineage in MLflow: write the graph, walk the graph.

target (external model) -> extraction run -> dump (dataset, "output") -> validation run, training run (dataset,
"training") -> drafter (logged model) -> benchmark runs, registered version -> alias.

MLflow's client retries for minutes, reports home and prints to stdout by default. These are process-wide settings that
it reads from the environment, so they are bounded here, before it is imported; what the user has set stays.
"""

import os

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Artifacts come through the MLflow server, not by its presigned URLs: a client need not reach the object store.
os.environ.setdefault("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")

from infra.lineage.connection import UiUrls
from infra.lineage.dataset import PromptSet
from infra.lineage.errors import LineageError
from infra.lineage.render import render
from infra.lineage.tree import LineageTree
from infra.lineage.uses import DumpUse
from infra.lineage.write import Lineage, TrainingRecord

__all__ = [
    "DumpUse",
    "Lineage",
    "LineageError",
    "LineageTree",
    "PromptSet",
    "TrainingRecord",
    "UiUrls",
    "render",
]
