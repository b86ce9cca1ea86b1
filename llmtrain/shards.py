"""A tensor of which every process holds a part (torch's DTensor): its local part, its whole, and back.

Of a plain tensor, which every process holds whole, the local part is the tensor itself.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; it shares the memory of ``tensor``, and has no gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor, to: int) -> torch.Tensor | None:
    """The whole of a tensor on the process ``to``, ``None`` on the others; all processes call this."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole if not dist.is_initialized() or dist.get_rank() == to else None


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
        part = whole
        if isinstance(target, DTensor):  # a cut without communication: each process has the whole
            part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
        local(target).copy_(part)
        left.remove(name)
    assert not left, f"nothing for {sorted(left)}"
