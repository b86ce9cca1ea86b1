"""A check that all processes still hold the same weights. DDP compares shapes, once; this compares values."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.shards import local_shard, shards_over

_AT_ONCE = 1 << 22  # numbers, for each of which 24 bytes are needed
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def fingerprint(model: nn.Module) -> torch.Tensor:
    """Return an int64 [parameters] that changes with any bit of any parameter that this process holds.

    It also changes when two values change places. The values' bits, as integers, are summed with odd
    weights that grow along the tensor, modulo 2**64.
    """
    found = [parameter for parameter in model.parameters() if not parameter.is_meta]
    sums = {parameter: _weighted_sum(local_shard(parameter)) for parameter in found}
    absent = torch.zeros_like(next(iter(sums.values())))  # of what another process holds
    return torch.stack([sums.get(parameter, absent) for parameter in model.parameters()])


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        some = bits[start : start + _AT_ONCE].to(torch.int64)
        some = some ^ (some >> 32)  # or two flipped signs of float64 would cancel out
        total += (some * (2 * torch.arange(start, start + len(some), device=bits.device) + 1)).sum()
    return total


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Compare the weights of all ranks that should hold the same. All ranks call this.

    Where each rank holds another shard there is nothing to compare; under tensor parallelism neighbours hold the same
    of what is not sharded. Raises :class:`UserError`, on every rank alike, with the first tensor that differs and the
    ranks that hold it.
    """
    sharding = sharding_of(accelerator)
    holders, neighbours = sharding.processes // sharding.replicas, sharding.tensor
    if sharding.processes == holders and neighbours == 1:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    everyone = accelerator.gather(
        fingerprint(plain)[None].to(accelerator.device)
    )  # weights may live on the host
    sharded = torch.tensor(
        ["tp" in shards_over(parameter) for parameter in plain.parameters()], device=everyone.device
    )
    place = (torch.arange(len(everyone), device=everyone.device) % holders)[
        :, None
    ]  # in the replica
    like = torch.where(
        sharded, place, place - place % neighbours
    )  # [ranks, parameters]: who should hold the same
    different = everyone != everyone.gather(0, like)
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        name = [name for name, _ in plain.named_parameters()][first]
        ranks = different[:, first].nonzero().flatten()
        named, own = (
            ", ".join(map(str, found))
            for found in (ranks.tolist(), sorted({*like[ranks, first].tolist()}))
        )
        raise UserError(
            f"replicas drifted: {name} of rank {named} differs from rank {own}'s; the run is stopped. "
            "The newest checkpoint is from before: checkpoints are compared first."
        )
