"""What the doctor says of SGLang: of this interpreter, and of ones that lack it."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.settings import Settings
from infra.sglang.doctor import DoctorItem, check_sglang

pytestmark = pytest.mark.unit


def items(**settings: object) -> dict[str, DoctorItem]:
    return {item.name: item for item in check_sglang(Settings.model_validate(settings))}


def test_an_environment_with_everything_is_found_well() -> None:
    found = items(sglang_device="cpu")
    assert [item.name for item in found.values() if not item.ok] == []
    assert found["SGLang"].found == "0.5.23"
    assert {"Plugin eagle3_tap", "Plugin eagle3_cpu"} <= set(found)
    assert "sgl_kernel" in found["CPU stand-ins"].found


def test_a_gpu_that_does_not_answer_is_named_with_the_setting_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = items(sglang_device="cuda")
    assert not found["Device"].ok
    assert "EAGLE3_SGLANG_DEVICE=cpu" in found["Device"].mend
    assert not found["torch and the GPU"].ok
    assert "CPU stand-ins" not in found


def test_an_interpreter_without_sglang_or_our_plugins_is_told_apart(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    found = items(sglang_python=tmp_path / "bare" / "bin" / "python", sglang_device="cpu")
    assert found["SGLang's interpreter"].ok
    assert {name for name, item in found.items() if not item.ok} == {
        "SGLang",
        "Plugin eagle3_tap",
        "Plugin eagle3_cpu",
    }
    assert all(item.mend for item in found.values() if not item.ok)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = items(sglang_python=tmp_path / "nowhere", sglang_device="cpu")
    assert str(tmp_path / "nowhere") in found["SGLang's interpreter"].found
    assert "EAGLE3_SGLANG_PYTHON" in found["SGLang's interpreter"].mend
