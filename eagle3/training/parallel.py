"""Several processes that train one drafter: started by torchrun, data by stream, gradients summed.

DDP keeps the whole drafter and its optimiser in every process; FSDP2 (`fully_shard`) a part of each. gloo joins
processes on CPUs, NCCL on GPUs. A single process needs none of it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.training.samples import TrainingError


@dataclass(frozen=True)
class Processes:
    """This process among those of a training."""

    rank: int = 0
    number: int = 1
    device: torch.device | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def streams(self, total: int) -> range:
        """Which of the `total` streams this process reads: as many as every other."""
        if total % self.number:
            raise TrainingError(
                f"{total} micro-batches a step cannot be shared evenly by {self.number} processes: set "
                f"gradient_accumulation to a multiple of {self.number}"
            )
        each = total // self.number
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, figures: Tensor) -> Tensor:
        """Over all processes, the same bits in each."""
        if self.number == 1:
            return figures
        there = figures.to(self.device)
        dist.all_reduce(there)
        return there.to(figures.device)


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started; one alone where it did not."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        several = dist.is_initialized()
        yield Processes(dist.get_rank(), dist.get_world_size(), device) if several else Processes(device=device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def wrap(module: nn.Module, how: Literal["ddp", "fsdp"], among: Processes) -> nn.Module:
    """The module as it is called for a step."""
    if among.number == 1:
        return module
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = next(module.parameters()).device.type
        return fully_shard(module, mesh=init_device_mesh(device, (among.number,)))
    return nn.parallel.DistributedDataParallel(module)


@contextmanager
def gradients_stay(module: nn.Module) -> Iterator[None]:
    """No exchange of gradients yet: more micro-batches of the step follow."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    elif hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    else:
        with nullcontext():
            yield


def whole(tensor: Tensor) -> Tensor:
    """A parameter, gradient or norm as one process alone would hold it. Every process must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def set_whole(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write whole tensors into parameters that may be kept in parts."""
    for parameter, value in zip(parameters, values, strict=True):
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            parts = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
            parameter.copy_(parts)
        else:
            parameter.copy_(value)
