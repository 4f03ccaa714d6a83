"""What is there and what is missing for serving with SGLang, each with the step that mends it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from eagle3.conventions.sglang import NEWEST, OLDEST
from eagle3.errors import Eagle3Error
from infra.settings import Settings
from infra.sglang.info import complete_capture_problems, decode_graphs_off
from infra.sglang.launch import LaunchError, count_gpus, interpreter, resolve_device
from infra.sglang.staging import read_live

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
found["broken"] = {}
for e in m.entry_points(group=sys.argv[1]):
    if e.name.startswith("eagle3_"):
        spec = u.find_spec(e.value.partition(":")[0])
        if spec is None: found["broken"][e.name] = e.value
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
    items += [_plugin_item(name, found) for name in PLUGINS if name != "eagle3_cpu" or device == "cpu"]
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


def _plugin_item(name: str, found: dict[str, Any]) -> DoctorItem:
    broken = found["broken"].get(name)
    right = name in found["plugins"] and broken is None
    what = "installed" if right else f"its module is gone ({broken})" if broken else "not installed"
    mend = "Install it in SGLang's interpreter: pip install ./infra/sglang/tap_dist"
    if name == "eagle3_cpu":
        mend = "Serve on the CPU with the interpreter of `make install`: unset EAGLE3_SGLANG_PYTHON."
    return DoctorItem(f"Plugin {name}", right, what, "" if right else mend)


def _torch_item(found: dict[str, Any]) -> DoctorItem:
    devices = found.get("cuda_devices", 0)
    mend = "Install a CUDA build of torch in SGLang's interpreter; check CUDA_VISIBLE_DEVICES."
    return DoctorItem("torch and the GPU", devices > 0, f"{found['torch']}, {devices} GPU", "" if devices else mend)


def check_server(url: str, staging: Path | None, settings: Settings) -> list[DoctorItem]:
    """What a running server says of itself: version, capture, graphs; and of its tap, where its folder is named."""
    from infra.sglang.server import attach

    try:
        with attach(url, settings=settings) as server:
            info = server.client.server_info()
    except Eagle3Error as error:
        return [DoctorItem("Server", False, url, str(error))]
    items = [DoctorItem("Server", True, f"{url} serves {info.model_path} with SGLang {info.version}")]
    problems = complete_capture_problems(info)
    items.append(DoctorItem("Capture", not problems, "complete" if not problems else "incomplete", " ".join(problems)))
    way = "while answering" if decode_graphs_off(info) else "answer, then prefill (decode graphs are on)"
    items.append(DoctorItem("Way to capture", True, way))
    if staging is None:
        return [*items, DoctorItem("Tap", False, "not asked", "Name the server's EAGLE3_TAP_DIR with --staging.")]
    try:
        live = read_live(staging)
    except Eagle3Error as error:
        return [*items, DoctorItem("Tap", False, str(staging), str(error))]
    missing = f"; this SGLang lacks {', '.join(live.missing_hooks)}" if live.missing_hooks else ""
    found = f"tap {live.tap_version} in {live.model_class}, captures {list(live.layers_to_capture)}{missing}"
    mend = "Serve with a SGLang version that the tap knows: see docs/install.md." if live.missing_hooks else ""
    return [*items, DoctorItem("Tap", not live.missing_hooks, found, mend)]


def _stand_ins_item(found: dict[str, Any]) -> DoctorItem:
    needed = ["sgl_kernel", *(name for name in ("triton", "torchvision") if name not in found["real"])]
    return DoctorItem("CPU stand-ins", True, f"used for {', '.join(needed)}, in servers started here only")
