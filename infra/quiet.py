"""Hub access, telemetry and progress bars of libraries: off. Called before any of them is imported."""

import os

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def quiet_libraries() -> None:
    """Set what the user has not set."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
