"""The tap alone, for a SGLang in an interpreter or container of its own: a wheel of its four files."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import infra.sglang.tap
from infra.sglang.launch import STAND_INS

pytestmark = pytest.mark.integration

FOLDER = Path(infra.sglang.tap.__file__).parent / "tap_dist"
TAP_FILES = ("tap", "tap_files", "tap_probe", "tap_rows")

# Both distributions in one process, as SGLang's own loader calls them.
REGISTER_BOTH = """
import sys
import eagle3_tap.tap
before = {name.partition(".")[0] for name in sys.modules}
assert not before & {"infra", "eagle3", "pydantic", "sglang"}, before
from sglang.srt.plugins.hook_registry import HookRegistry
import infra.sglang.tap
eagle3_tap.tap.register()
infra.sglang.tap.register()
print(sorted(len(hooks) for hooks in HookRegistry._hooks.values()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(out)]
    subprocess.run([*command, str(FOLDER)], check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


def run(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_wheel_holds_these_very_files_and_its_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert sorted(modules) == [f"eagle3_tap/{name}.py" for name in ("__init__", *TAP_FILES)]
        for name in modules:
            assert archive.read(name) == (FOLDER.parent / Path(name).name).read_bytes()
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
        assert text.split() == ["[sglang.srt.plugins]", "eagle3_tap", "=", "eagle3_tap.tap:register"]
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        assert "Requires-Dist" not in archive.read(metadata).decode()
    assert wheel.name.startswith(f"eagle3_tap-{infra.sglang.tap.TAP_VERSION}-")


def test_installed_twice_it_hooks_once_and_imports_nothing_of_ours(wheel: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(wheel), str(STAND_INS)])  # a wheel of plain modules can be imported as it is
    hooks = run(REGISTER_BOTH, PYTHONPATH=paths, EAGLE3_TAP_DIR=str(tmp_path / "staging"))
    assert hooks == "[1, 1, 1, 1, 1, 1, 1]"
    assert (tmp_path / "staging").stat().st_mode & 0o777 == 0o700


def test_without_a_folder_nothing_is_hooked(wheel: Path) -> None:
    assert run(REGISTER_BOTH, PYTHONPATH=os.pathsep.join([str(wheel), str(STAND_INS)]), EAGLE3_TAP_DIR="") == "[]"
