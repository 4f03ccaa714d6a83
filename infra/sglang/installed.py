"""Which SGLang the chosen interpreter has, without importing it."""

import subprocess
from importlib.metadata import PackageNotFoundError, version

from infra.settings import Settings
from infra.sglang.client import SglangError

_ASK = "from importlib.metadata import version; print(version('sglang'))"
_TIMEOUT = 60.0  # seconds


def sglang_version(settings: Settings) -> str:
    """Version of the SGLang that `settings.sglang_python` (or this interpreter) would start."""
    if settings.sglang_python is None:
        try:
            return version("sglang")
        except PackageNotFoundError:
            raise SglangError(
                "SGLang is not installed beside this command: run `make install`, or set EAGLE3_SGLANG_PYTHON to an "
                "interpreter that has it"
            ) from None
    try:
        asked = subprocess.run(
            [str(settings.sglang_python), "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SglangError(
            f"EAGLE3_SGLANG_PYTHON is {settings.sglang_python}, which cannot say its SGLang's version ({error})"
        ) from None
    return asked.stdout.strip()
