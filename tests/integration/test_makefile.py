"""`make install` with a package index of three small wheels: what a person sees of pip."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# The project's own build backend here: an editable wheel with nothing in it.
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("project-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n")
        wheel.writestr("project-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\nRoot-Is-Purelib: 1\\n")
        wheel.writestr("project-1.0.dist-info/RECORD", "")
    return name
"""


def write_wheel(folder: Path, name: str, source: str, requires: str = "") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The Makefile beside an index whose torch needs libraries, and whose sglang wants what is left out on purpose."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "torch", "import cuda_libraries\n", "cuda_libraries")
    write_wheel(tmp_path / "wheels", "cuda_libraries", "")
    write_wheel(tmp_path / "wheels", "sglang", "", "left_out")
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "constraints.txt").write_text("sglang==1.0\ntorch==1.0\n")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    return tmp_path


def install(project: Path) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment = own | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels")}
    command = ["make", "install", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_what_is_left_out_on_purpose_is_no_noise_and_a_failure_is_shown(project: Path) -> None:
    library = project / "wheels" / "cuda_libraries-1.0-py3-none-any.whl"
    kept = library.read_bytes()
    library.unlink()
    failed = install(project)
    assert failed.returncode != 0
    assert "No matching distribution found for cuda_libraries" in failed.stderr
    assert "All that it said is in .venv/install.log" in failed.stderr
    assert not (project / ".venv" / ".installed").exists()

    library.write_bytes(kept)
    done = install(project)
    said, log = done.stdout + done.stderr, (project / ".venv" / "install.log").read_text()
    assert done.returncode == 0, said
    assert "torch came as its CUDA build" in said
    assert "left-out" in log.replace("_", "-")
    assert "left" not in said
    assert "log: .venv/install.log" in said
    assert (project / ".venv" / ".installed").exists()
