"""Tensors of which every process holds a part (torch's DTensor): the local part, the whole, and back; and the blocks of
a model, by which it is cut.

Of a plain tensor, which every process holds whole, the local part is the tensor itself.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; it shares the memory of ``tensor``, and has no gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assembled(tensor: torch.Tensor) -> torch.Tensor:
    """The whole, on every process; all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, which every process has, cut as ``like`` is; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and type of the whole, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def gathered(tensor: torch.Tensor, to: int) -> torch.Tensor | None:
    """The whole of a tensor on the process ``to``, ``None`` on the others, which only send; all processes call this."""
    tensor = tensor.detach()
    here = not dist.is_initialized() or dist.get_rank() == to
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    if tensor.placements[-1] != Shard(0):
        whole = tensor.full_tensor()
        return whole if here else None
    mesh, part = tensor.device_mesh, tensor.to_local().contiguous()
    ranks = mesh.mesh.flatten(0, -2) if mesh.ndim > 1 else mesh.mesh[None]  # a row holds the model once
    [row] = [row.tolist() for row in ranks if to in row]
    if not here:
        if dist.get_rank() in row and part.numel():
            _exchange([dist.P2POp(dist.isend, part, to)])
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=part.device)
    parts = dict(zip(row, whole.chunk(len(row)), strict=False))  # the last ones may have nothing
    _exchange([dist.P2POp(dist.irecv, parts[rank], rank) for rank in parts if rank != to])
    if to in parts:
        parts[to].copy_(part)
    return whole


def _exchange(operations: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


def block_classes(model: nn.Module) -> set[str]:
    """Names of the classes of a model's blocks: what it says must not be split, else what its longest list holds, which
    is not inside of another."""
    present = {type(module).__name__ for module in model.modules()}
    named = set(getattr(model, "_no_split_modules", None) or ()) & present
    if named:
        return named
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {type(block).__name__ for block in max(outer, key=len, default=[])}


def reshard(model: nn.Module) -> None:
    """Free what forward passes without a backward have gathered; the parameters are this process's parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill(targets: Mapping[str, torch.Tensor], wholes: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy into each target, in place, this process's part of the whole tensor of its name. One whole tensor at a time
    is held. Every target is named once; names and shapes must agree."""
    left = set(targets)
    for name, whole in wholes:
        target = targets[name]
        assert target.shape == whole.shape, f"{name}: {tuple(whole.shape)} for {tuple(target.shape)}"
        local(target).copy_(cut(whole, target))
        left.remove(name)
    assert not left, f"nothing for {sorted(left)}"
