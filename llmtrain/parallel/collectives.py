"""Collectives that have a gradient, over a mesh of one dimension (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh


def shard_range(size: int, mesh: DeviceMesh, rank: int | None = None) -> range:
    """Return which of ``size`` rows a rank has: as many as the others, and the last ranks what is left."""
    each = -(-size // mesh.size())
    rank = mesh.get_local_rank() if rank is None else rank
    return range(min(rank * each, size), min((rank + 1) * each, size))


def all_reduce(x: torch.Tensor, mesh: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum over the ranks, or another reduction, as a new tensor without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, mesh.get_group())
    return x


def copy_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Copy ``x``, which all ranks have, to where each computes something else: the gradient is summed over them."""
    return _collective(_Copy, x, mesh)


def reduce_from(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum ``x`` over the ranks, all of which go on with the sum: the gradient is copied."""
    return _collective(_Reduce, x, mesh)


def scatter_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Scatter the last dimension of ``x``, which all ranks have: the gradient is gathered."""
    return _collective(_Scatter, x, mesh, x.shape[-1])


def gather_from(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    """Gather a last dimension of ``size`` from its shards: the gradient is scattered."""
    return _collective(_Gather, x, mesh, size)


def _collective(kind: type[torch.autograd.Function], x: torch.Tensor, mesh: DeviceMesh, size: int = 0) -> torch.Tensor:
    out: torch.Tensor = kind.apply(x, mesh, size)  # type: ignore[no-untyped-call]
    return out


def _scattered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    mine = shard_range(x.shape[-1], mesh)
    return x[..., mine.start : mine.stop].contiguous()


def _gathered(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    padded = F.pad(x, (0, len(shard_range(size, mesh, 0)) - x.shape[-1])).contiguous()
    everyone = [torch.empty_like(padded) for _ in range(mesh.size())]
    dist.all_gather(everyone, padded, mesh.get_group())
    return torch.cat(everyone, -1)[..., :size]


class _MeshContext(FunctionCtx):
    mesh: DeviceMesh
    size: int


class _OverMesh(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: _MeshContext, inputs: tuple[torch.Tensor, DeviceMesh, int], output: torch.Tensor) -> None:
        _, ctx.mesh, ctx.size = inputs


class _Copy(_OverMesh):
    @staticmethod
    def forward(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _MeshContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_reduce(grad, ctx.mesh), None, None


class _Reduce(_OverMesh):
    @staticmethod
    def forward(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
        return all_reduce(x, mesh)

    @staticmethod
    def backward(ctx: _MeshContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _Scatter(_OverMesh):
    @staticmethod
    def forward(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
        return _scattered(x, mesh)

    @staticmethod
    def backward(ctx: _MeshContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.mesh, ctx.size), None, None


class _Gather(_OverMesh):
    @staticmethod
    def forward(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
        return _gathered(x, mesh, size)

    @staticmethod
    def backward(ctx: _MeshContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(grad, ctx.mesh), None, None
