"""What is there and what is missing for serving with SGLang, each with the step that mends it."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from eagle3.conventions.sglang import NEWEST, OLDEST
from infra.settings import Settings
from infra.sglang.launch import LaunchError, count_gpus, interpreter, resolve_device

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGINS = ("eagle3_tap", "eagle3_cpu")

# Runs in the interpreter that would serve. It imports none of the packages (torch takes seconds), except torch on a
# machine with a GPU, where only torch can say whether it reaches it.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
found = {name: version(name) for name in ("sglang", "torch", "transformers")}
found["python"] = ".".join(map(str, sys.version_info[:3]))
found["plugins"] = sorted(e.name for e in m.entry_points(group=sys.argv[1]))
found["real"] = [name for name in ("triton", "torchvision", "sgl_kernel") if u.find_spec(name)]
if sys.argv[2] == "cuda":
    import torch
    found["cuda_devices"] = torch.cuda.device_count()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class DoctorItem:
    """One thing that was looked at: what was found, and what to do where it is not right."""

    name: str
    ok: bool
    found: str
    mend: str = ""


def check_sglang(settings: Settings) -> list[DoctorItem]:
    """Device, interpreter, SGLang's version, plugins and stand-ins of the SGLang that would be started; about 1 s."""
    device = resolve_device("auto", settings)
    gpus = count_gpus()
    items = [_device_item(device, gpus)]
    try:
        python = interpreter(settings)
    except LaunchError as error:
        return [*items, DoctorItem("SGLang's interpreter", False, str(error), "Set or unset these two settings.")]
    shown = " ".join(python)
    try:
        found = _probe(python, device)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        mend = "Set EAGLE3_SGLANG_PYTHON (or EAGLE3_SGLANG_COMMAND) to an interpreter that has SGLang, or unset it."
        return [*items, DoctorItem("SGLang's interpreter", False, f"{shown}: {type(error).__name__}", mend)]
    items.append(DoctorItem("SGLang's interpreter", True, f"{shown} (Python {found['python']})"))
    items.append(_version_item(found))
    items += [_plugin_item(name, found["plugins"]) for name in PLUGINS if name != "eagle3_cpu" or device == "cpu"]
    items.append(_torch_item(found) if device == "cuda" else _stand_ins_item(found))
    return items


def _probe(python: list[str], device: str) -> dict[str, Any]:
    done = subprocess.run(
        [*python, "-c", _PROBE, PLUGIN_GROUP, device], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    if not isinstance(found, dict):
        raise ValueError("the interpreter answered something else than asked")  # noqa: TRY004 (caught with the others)
    return found


def _device_item(device: str, gpus: int) -> DoctorItem:
    if device == "cuda" and not gpus:
        mend = "Set EAGLE3_SGLANG_DEVICE=cpu (or auto), or make the NVIDIA driver reachable."
        return DoctorItem("Device", False, "cuda asked for, no GPU answers", mend)
    if device == "cpu" and gpus:
        mend = 'Hide the GPUs with CUDA_VISIBLE_DEVICES="", or set EAGLE3_SGLANG_DEVICE=auto.'
        return DoctorItem("Device", False, f"cpu asked for beside {gpus} visible GPUs", mend)
    return DoctorItem("Device", True, f"cuda ({gpus} GPU)" if device == "cuda" else f"cpu ({gpus} GPU)")


def _version_item(found: dict[str, Any]) -> DoctorItem:
    version = found["sglang"]
    if version is None:
        mend = "On a CPU: make install. On a GPU machine: pip install .[sglang], or set EAGLE3_SGLANG_PYTHON."
        return DoctorItem("SGLang", False, "not installed", mend)
    try:
        known = OLDEST <= Version(version) <= NEWEST
    except InvalidVersion:
        known = False
    mend = f"What layer ids mean is known for {OLDEST} to {NEWEST}: install one of these."
    return DoctorItem("SGLang", known, version, "" if known else mend)


def _plugin_item(name: str, plugins: list[str]) -> DoctorItem:
    installed = name in plugins
    mend = "Install this project in SGLang's interpreter, so that SGLang finds its plugins."
    return DoctorItem(f"Plugin {name}", installed, "found" if installed else "not found", "" if installed else mend)


def _torch_item(found: dict[str, Any]) -> DoctorItem:
    devices = found.get("cuda_devices", 0)
    mend = "Install a CUDA build of torch in SGLang's interpreter; check CUDA_VISIBLE_DEVICES."
    return DoctorItem("torch and the GPU", devices > 0, f"{found['torch']}, {devices} GPU", "" if devices else mend)


def _stand_ins_item(found: dict[str, Any]) -> DoctorItem:
    needed = ["sgl_kernel", *(name for name in ("triton", "torchvision") if name not in found["real"])]
    return DoctorItem("CPU stand-ins", True, f"used for {', '.join(needed)}, in servers started here only")
