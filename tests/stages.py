"""The targets on which the mistakes of `tests.pitfalls` are planted, and the reference that they are judged by."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.evidence.references import TargetReference
from eagle3.target import Target
from infra.settings import Settings
from infra.smollm2 import ensure_smollm2
from tests import targets
from tests.dumps import SPEC, Capture, capture
from tests.planting import Scene

MAKERS: dict[str, Callable[..., Path]] = {
    "llama": targets.make_llama,
    "qwen3": targets.make_qwen3,
    "deepseek": targets.make_deepseek,
    "deepseek-moe": lambda folder, **options: targets.make_deepseek(folder, moe=True, **options),
    "llama, long prompts": targets.make_llama,
}
LONG = {"llama, long prompts": (30, 30, 30, 150, 150, 150, 400, 400)}
"""Tokens of the prompts where they are not as short as the tests' others."""
SMOLLM2 = "smollm2"
STAGES = (*MAKERS, SMOLLM2)
SMOLLM2_SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (2, 15, 27)))
OTHER_NOISE = 0.5
"""Of a weight's own spread: what is added to every matrix of the layers to get another checkpoint."""


class RememberingReference(TargetReference):
    """The target's states of a sequence do not change from mistake to mistake: they are computed once."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._known: dict[tuple[str, tuple[int, ...]], Mapping[CapturePoint, torch.Tensor] | None] = {}

    def states(self, sample_id: str, input_ids: torch.Tensor) -> Mapping[CapturePoint, torch.Tensor] | None:
        key = "exact", tuple(input_ids.tolist())
        if key not in self._known:
            self._known[key] = super().states(sample_id, input_ids)
        return self._known[key]

    def coarse_states(
        self, input_ids: torch.Tensor, dtype: str, *, int8: bool = True
    ) -> Mapping[CapturePoint, torch.Tensor]:
        key = f"{dtype} {int8}", tuple(input_ids.tolist())
        if key not in self._known:
            self._known[key] = super().coarse_states(input_ids, dtype, int8=int8)
        states = self._known[key]
        assert states is not None
        return states


@dataclass(frozen=True)
class Stage:
    """A target that answered its prompts, in one dtype; the mistakes are planted in its capture."""

    name: str
    captured: Capture
    spec: CaptureSpec
    other: Capture
    reference: TargetReference

    def scene(self, folder: Path) -> Scene:
        return Scene(self.captured, self.spec, folder / "dump", other=self.other)


def make_stage(name: str, dtype: torch.dtype, folder: Path) -> Stage:
    """Make the target, let it answer, and let a checkpoint with other weights in its layers answer as well."""
    options: dict[str, Any] = {"dtype": dtype}
    if name == SMOLLM2:
        path = ensure_smollm2(Settings().root)
        options |= {"num_samples": 6, "max_new_tokens": 16}
    else:
        path = MAKERS[name](folder / name, dtype=dtype)
        options |= {"lengths": LONG.get(name, ())}
    return Stage(
        name=f"{name}-{str(dtype).removeprefix('torch.')}",
        captured=capture(path, **options),
        spec=SMOLLM2_SPEC if name == SMOLLM2 else SPEC,
        other=capture(_other_weights(path, folder / f"{name}-other"), **options),
        reference=RememberingReference(Target.open(path)),
    )


def _other_weights(target: Path, folder: Path) -> Path:
    shutil.copytree(target, folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if ".layers." in name and weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=generator) * OTHER_NOISE * weight.float().std()
                weights[name] = (weight.float() + noise).to(weight.dtype)
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder
