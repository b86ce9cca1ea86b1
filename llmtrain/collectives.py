"""What processes that compute together send each other, and what then becomes of a gradient (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). A mesh is here of one dimension: the processes that see the same rows.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh


def rows_of(size: int, mesh: DeviceMesh, rank: int | None = None) -> range:
    """What a process has of a dimension of so many: as many as the others, and the last ones what is left."""
    each = -(-size // mesh.size())
    rank = mesh.get_local_rank() if rank is None else rank
    return range(min(rank * each, size), min((rank + 1) * each, size))


def copied(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """``x``, which all processes have, where each begins to do something else with it: its gradient is the sum of what
    it is on each."""
    return _Copied.apply(x, mesh)


def summed_over(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of what the processes have, on each of them, all of which go on alike from it."""
    return _Summed.apply(x, mesh)


def split(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This process's part of the last dimension of what all have."""
    return _Split.apply(x, mesh)


def joined(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    """The parts of a last dimension of so many, one after the other, on each process; all go on alike from it."""
    return _Joined.apply(x, mesh, size)


def added(x: torch.Tensor, mesh: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum over the processes, or another reduction; not in place, and without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, mesh.get_group())
    return x


def _part_of_last(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    mine = rows_of(x.shape[-1], mesh)
    return x[..., mine.start : mine.stop].contiguous()


def _all_of_last(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    padded = F.pad(x, (0, len(rows_of(size, mesh, 0)) - x.shape[-1])).contiguous()
    everyone = [torch.empty_like(padded) for _ in range(mesh.size())]
    dist.all_gather(everyone, padded, mesh.get_group())
    return torch.cat(everyone, -1)[..., :size]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return added(grad, ctx.mesh), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return added(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, ctx.size = mesh, x.shape[-1]
        return _part_of_last(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all_of_last(grad, ctx.mesh, ctx.size), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
        ctx.mesh = mesh
        return _all_of_last(x, mesh, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _part_of_last(grad, ctx.mesh), None, None
