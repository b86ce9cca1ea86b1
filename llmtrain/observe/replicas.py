"""A check that all processes still hold the same weights. DDP compares shapes, once; this compares values."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import local_shard, sharding_of, shards_over

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def fingerprint(model: nn.Module) -> torch.Tensor:
    """Return an int64 [parameters] that changes with any bit of any parameter that this process holds.

    It also changes when two values change places. The values' bits, as integers, are summed with odd
    weights that grow along the tensor, modulo 2**64.
    """
    sums = []
    for parameter in model.parameters():
        if parameter.is_meta:  # another process holds it
            sums.append(torch.zeros((), dtype=torch.int64))
            continue
        value = local_shard(parameter).contiguous()
        bits = value.view(_INTEGERS[value.element_size()]).flatten().to(torch.int64)
        bits = bits ^ (bits >> 32)  # or two flipped signs of float64 would cancel out
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1  # none of an empty shard
        sums.append((bits * weights).sum())
    return torch.stack(sums)


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Compare the weights of all ranks that should hold the same. All ranks call this.

    Where each rank holds another shard there is nothing to compare; under tensor parallelism neighbours hold the same
    of what is not sharded. Raises :class:`UserError`, on every rank alike, with the first tensor that differs and the
    ranks that hold it.
    """
    sharding = sharding_of(accelerator)
    holders, neighbours = (1, 1) if sharding is None else (sharding.processes // sharding.replicas, sharding.tensor)
    if accelerator.num_processes == holders and neighbours == 1:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    mine = fingerprint(plain).to(accelerator.device)  # weights may live on the host
    everyone = accelerator.gather(mine[None])
    sharded = torch.tensor(["tp" in shards_over(parameter) for parameter in plain.parameters()], device=everyone.device)
    place = (torch.arange(len(everyone), device=everyone.device) % holders)[:, None]  # in the replica
    like = torch.where(sharded, place, place - place % neighbours)  # [ranks, parameters]: who should hold the same
    different = everyone != everyone.gather(0, like)
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        name = [name for name, _ in plain.named_parameters()][first]
        ranks = different[:, first].nonzero().flatten()
        named, own = (", ".join(map(str, found)) for found in (ranks.tolist(), sorted({*like[ranks, first].tolist()})))
        raise UserError(
            f"replicas drifted: {name} of rank {named} differs from rank {own}'s; the run is stopped. "
            "The newest checkpoint is from before: checkpoints are compared first."
        )
