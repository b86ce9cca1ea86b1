"""Whether all processes still hold the same weights. DDP compares shapes, once; this compares values."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import local_shard, sharding_of, shards_over


def fingerprint(model: nn.Module) -> torch.Tensor:
    """An int64 [parameters] that changes with any bit of any parameter that this process holds, or with two values
    that change places.

    The values' bits, as integers, are summed with odd weights that grow along the tensor, modulo 2**64.
    """
    sums = []
    for parameter in model.parameters():
        if parameter.is_meta:  # another process holds it
            sums.append(torch.zeros((), dtype=torch.int64))
            continue
        value = local_shard(parameter).contiguous()
        bits = value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        bits = bits.flatten().to(torch.int64)
        bits = bits ^ (bits >> 32)  # or two flipped signs of float64 would cancel out
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1  # of a part that holds nothing, none
        sums.append((bits * weights).sum())
    return torch.stack(sums)


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError`, on every process alike, where the weights of one differ from those of the first that
    should hold the same; it names the first tensor and the ranks. Where each process holds another part, there is
    nothing to compare; under tensor parallelism neighbours hold the same of what is not cut."""
    sharding = sharding_of(accelerator)
    parts, neighbours = (1, 1) if sharding is None else (sharding.processes // sharding.replicas, sharding.tensor)
    if accelerator.num_processes == parts and neighbours == 1:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    mine = fingerprint(plain).to(accelerator.device)  # weights may live on the host
    everyone = accelerator.gather(mine[None])
    cut = torch.tensor(["tp" in shards_over(parameter) for parameter in plain.parameters()], device=everyone.device)
    place = (torch.arange(len(everyone), device=everyone.device) % parts)[:, None]  # in the replica
    like = torch.where(cut, place, place - place % neighbours)  # [processes, parameters]: who should hold the same
    different = everyone != everyone.gather(0, like)
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        ranks = different[:, first].nonzero().flatten()
        name = [name for name, _ in plain.named_parameters()][first]
        own, ranks = sorted({*like[ranks, first].tolist()}), ranks.tolist()
        raise UserError(
            f"replicas drifted: {name} of rank {', '.join(map(str, ranks))} differs from rank "
            f"{', '.join(map(str, own))}'s; the run is stopped. "
            "The newest checkpoint is from before: checkpoints are compared first."
        )
