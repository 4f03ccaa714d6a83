"""Which SGLang the chosen interpreter has, without importing it."""

import subprocess
from importlib.metadata import PackageNotFoundError, version

from infra.settings import Settings
from infra.sglang.client import SglangError
from infra.sglang.launch import interpreter

_ASK = "from importlib.metadata import version; print(version('sglang'))"
_TIMEOUT = 60.0  # seconds


def sglang_version(settings: Settings) -> str:
    """Version of the SGLang that the settings (`sglang_python`, `sglang_command`) or this interpreter would start."""
    python = interpreter(settings)
    if settings.sglang_python is None and settings.sglang_command is None:
        try:
            return version("sglang")
        except PackageNotFoundError:
            raise SglangError(
                "SGLang is not installed beside this command: run `make install`, or set EAGLE3_SGLANG_PYTHON to an "
                "interpreter that has it"
            ) from None
    try:
        asked = subprocess.run([*python, "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SglangError(
            f"SGLang is started with {' '.join(python)} (EAGLE3_SGLANG_PYTHON, EAGLE3_SGLANG_COMMAND), which cannot "
            f"say its version ({error})"
        ) from None
    return asked.stdout.strip()
