"""RMSNorm, SwiGLU and rotary positions with gradients written out, for the CPU.

torch composes them from many passes over tensors that do not fit a cache; at a hidden size of 256 that costs a quarter
of a training step. Here each block of rows goes through all its passes while it lies in the cache, and less is kept for
the backward pass. On other devices torch's own (fused) operators run.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_VALUES = 1 << 16  # of a block: 256 KiB in float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x float32 or float64 [..., H] -> like x."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of equal shapes [..., I]."""
    if gate.device.type != "cpu":
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, neox style, in float32: x [B, h, T, D] with cos, sin [B, 1, T, D] -> like x."""
    return _Rotate.apply(x, *cos_sin)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension."""
    rows = max(1, _BLOCK_VALUES // max(1, x[:1].numel()))
    return (slice(first, first + rows) for first in range(0, len(x), rows))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out, scale = torch.empty_like(flat), flat.new_empty(len(flat), 1)  # scale: 1 / rms
        for rows in _blocks(flat):
            norm = torch.linalg.vector_norm(flat[rows], dim=-1, keepdim=True)
            torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps), out=scale[rows])
            torch.mul(flat[rows], scale[rows], out=out[rows]).mul_(weight)
        ctx.save_for_backward(flat, scale, weight)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, scale, weight = ctx.saved_tensors
        grad = grads[0].reshape(x.shape)
        into_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        into_weight = torch.zeros_like(weight)
        for rows in _blocks(x):
            unit = x[rows] * scale[rows]
            into_weight += (grad[rows] * unit).sum(0)
            if into_x is not None:
                scaled = grad[rows] * weight
                along = (scaled * unit).sum(-1, keepdim=True).div_(-x.shape[-1])
                torch.mul(scaled.addcmul_(unit, along), scale[rows], out=into_x[rows])
        return None if into_x is None else into_x.view(grads[0].shape), into_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for rows in _blocks(gate.flatten(0, -2)):
            g, u, o = (t.flatten(0, -2)[rows] for t in (gate, up, out))
            torch.mul(F.silu(g), u, out=o)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
        for rows in _blocks(gate.flatten(0, -2)):
            grad, g, u, dg, du = (t.flatten(0, -2)[rows] for t in (grads[0], gate, up, into_gate, into_up))
            torch.mul(grad, F.silu(g), out=du)
            torch.ops.aten.silu_backward.grad_input(grad * u, g, grad_input=dg)
        return into_gate, into_up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[a, b] -> [a cos - b sin, b cos + a sin]"""
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, cos.dtype))  # [B, T, h, D]: as it lies in memory
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)  # [B, T, 1, D]
    first, second = wide.chunk(2, dim=-1)
    sign = torch.ones(2, 1, dtype=sin.dtype, device=sin.device)
    sign[0] = -1
    signed = (sin.unflatten(-1, (2, -1)) * sign).flatten(-2)
    return torch.cat([second, first], dim=-1).mul_(signed).addcmul_(wide, cos).to(x.dtype).transpose(1, 2)
