"""A worker loads a flow in about a second: nothing heavy is imported with it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

HEAVY = ("torch", "transformers", "mlflow", "matplotlib", "safetensors", "boto3")


def test_flow_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, flows.extract, flows.validate, flows.train, flows.benchmark, flows.pipeline, "
        "flows.extract_partition; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_starts_without_prefect() -> None:
    code = "import sys, flows.cli; print([m for m in ('prefect', 'torch', 'mlflow', 'boto3') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verifying_a_dump_imports_nothing_heavy() -> None:
    """Hashing is all that `dump verify` does: its price beside sha256sum is measured in benchmarks/verify.py."""
    code = (
        "import sys, flows.cli, flows.cli_dump, tasks.artifacts, infra.stack, eagle3.evidence.files; "
        "print([m for m in ('torch', 'transformers', 'mlflow', 'prefect', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
