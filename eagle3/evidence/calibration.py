"""How far from the reference a right row may lie: measured on the target itself, for every boundary and dtype."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from eagle3.capture import CapturePoint
from eagle3.dump.content import DTYPES
from eagle3.evidence.attributed import Candidate
from eagle3.target.states import decoder_parts

NOISE_ROWS = 96
"""Rows from which the noise of a target is measured."""
FACTOR = 3.0
"""The bound is this many times the noise. Measured, as share of the bound, largest over all points: a target that ran
in bfloat16 0.18 (SmolLM2-135M) to 0.29 (tiny mixtures of experts); one with weights rounded to int8 0.35 (SmolLM2)
to 0.59; fp8 rows of the lab, 0.027 where int8 moves them by 0.012, 0.75."""
FLOOR = 2.0**-7
"""The least noise that is assumed: `embed` does not move with the layers, and rounding it to bfloat16 moves it by
0.0017, to int8 by 0.006 to 0.011 (half of the bound)."""
MIN_FITTING = 0.9
"""Share of rows that must fit one by one, over all and in each group. Measured on 100 clean dumps, lowest: 0.97 in a
group of a dense target (SmolLM2), whatever it was served in; 0.70 in a mixture of experts in bfloat16 with weights in
int8, where the calibration finds 0.81."""
CHANCE = 3.0
"""Standard deviations that a share may lie below the one that was calibrated."""
UNCALIBRATED_SHARE = {"float32": 0.9, "bfloat16": 0.75, "float16": 0.75}
CALM = 0.1
"""Fewer bits move every row, routing flips of a mixture of experts some: the least moved rows tell."""
OWN_MOST = 0.015
"""Above this 8 bits cannot be told from a dtype's own noise. Measured below it on tiny targets that ran in bfloat16, as
multiples of the calibrated noise: clean rows up to 1.42, rows that went through fp8 (e4m3) 2.2 to 3.1; above it 1.95
and 2.1."""
OWN_FLOOR = {"float32": 1e-3, "bfloat16": 2.0**-8, "float16": 2.0**-8}
"""The least that a dtype's own arithmetic is taken to explain. Two engines in float32 are at most 1.3e-6 apart, and
1e-3 leaves room for TF32; a row that is stored in bfloat16 moves by 0.0017, one that went through fp8 by 0.026."""
UNCALIBRATED = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""Bounds for a probe, which cannot be computed again. It comes from the engine and arithmetic of the dump itself. Two
paths through SmolLM2 are 5e-6 apart in float32, at most 0.017 in bfloat16; through a tiny mixture of experts 0.07."""


class Calibration:
    """Collects, for every point, how far rows move when the target is computed in coarser arithmetic."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._noise: dict[CapturePoint, list[torch.Tensor]] = {}
        self._own: dict[CapturePoint, list[torch.Tensor]] = {}
        self.rows = 0

    @property
    def missing_rows(self) -> int:
        return max(0, NOISE_ROWS - self.rows)

    def add(
        self,
        clean: Mapping[CapturePoint, torch.Tensor],
        noisy: Mapping[CapturePoint, torch.Tensor],
        own: Mapping[CapturePoint, torch.Tensor] | None,
    ) -> None:
        """The same rows [t, D], as the reference gives them and in coarser arithmetic ([t', D], t' <= t).

        `own`: under the arithmetic of the dtype alone; None where the reference itself is no more exact.
        """
        for kept, moved in ((self._noise, noisy), (self._own, own or {})):
            for point, state in moved.items():
                exact = clean[point][: len(state)]
                kept.setdefault(point, []).append((state - exact).norm(dim=-1) / exact.norm(dim=-1))
        self.rows += len(next(iter(noisy.values())))

    def bound(self, candidate: Candidate) -> float:
        """The largest median error that noise explains at this candidate."""
        found = self._noise.get(candidate.point)
        if not found:
            return UNCALIBRATED[self._dtype]
        return FACTOR * max(FLOOR, float(torch.cat(found).median()))

    def least_share(self, candidate: Candidate, loose: float, rows: int) -> float:
        """The share of `rows` rows that must be at most `loose` from this candidate: what it is under noise, less what
        chance does to it, and `MIN_FITTING` at the most."""
        found = self._noise.get(candidate.point)
        if not found:
            return UNCALIBRATED_SHARE[self._dtype]
        noise = torch.cat(found)
        astray = float((noise > loose).float().mean())
        chance = CHANCE * (astray * (1 - astray) * (1 / len(noise) + 1 / rows)) ** 0.5
        return min(MIN_FITTING, 1 - astray - chance)

    def own(self, candidate: Candidate) -> float | None:
        """What the dtype's own arithmetic does at this candidate to the rows that it moves least (their `CALM`
        quantile); None where that is not known, or too much to tell 8 bits from it."""
        found = self._own.get(candidate.point)
        noise = float(torch.cat(found).quantile(CALM)) if found else torch.inf
        return max(OWN_FLOOR[self._dtype], noise) if noise <= OWN_MOST else None


@contextmanager
def coarser_arithmetic(model: Any, num_layers: int, dtype: str, *, int8: bool = True) -> Iterator[None]:
    """Inside, the decoder computes with weights rounded to int8 (if `int8`) and, for a 16-bit `dtype`, in 16 bits.

    The weights of one layer at a time are rounded while that layer runs, and put back: no second model is held.
    """
    layers, _ = decoder_parts(model, num_layers)
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}
    to = DTYPES[dtype]

    def coarsen(layer: torch.nn.Module, _args: Any) -> None:
        for weight in layer.parameters():
            if int8 and weight.dim() >= 2 and weight.is_floating_point():
                kept[weight] = weight.data
                weight.data = _int8(weight.data)

    def restore() -> None:
        for weight, exact in kept.items():
            weight.data = exact
        kept.clear()

    def round_output(_layer: torch.nn.Module, _args: Any, output: Any) -> Any:
        restore()
        if isinstance(output, tuple):
            return (_rounded(output[0], to), *output[1:])
        return _rounded(output, to)

    hooks: list[Any] = []
    try:
        for layer in layers:
            hooks += [layer.register_forward_pre_hook(coarsen), layer.register_forward_hook(round_output)]
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=to, enabled=to != torch.float32):
            yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 255 steps for every output channel, as int8 weights are."""
    step = weight.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / 127
    return (weight / step).round() * step


def _rounded(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return state.to(dtype).to(state.dtype)
