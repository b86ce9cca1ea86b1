"""Whether all processes still hold the same weights. DDP compares shapes, once; this compares values."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.shards import local


def fingerprint(model: nn.Module) -> torch.Tensor:
    """An int64 [parameters] that changes with any bit of any parameter that this process holds, or with two values
    that change places.

    The values' bits, as integers, are summed with odd weights that grow along the tensor, modulo 2**64.
    """
    sums = []
    for parameter in model.parameters():
        value = local(parameter).contiguous()
        bits = value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        bits = bits.flatten().to(torch.int64)
        bits = bits ^ (bits >> 32)  # or two flipped signs of float64 would cancel out
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1  # of a part that holds nothing, none
        sums.append((bits * weights).sum())
    return torch.stack(sums)


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError`, on every process alike, where the weights of one differ from those of the first that
    should hold the same; it names the first tensor and the ranks. Where each process holds another part, there is
    nothing to compare."""
    sizes = accelerator.parallelism_config if accelerator.is_fsdp2 else None
    parts = sizes.dp_shard_size if sizes is not None else 1  # neighbours hold the parts of one replica
    if accelerator.num_processes == parts:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    mine = fingerprint(plain).to(accelerator.device)  # weights may live on the host
    everyone = accelerator.gather(mine[None])
    different = everyone != everyone[:parts].repeat(len(everyone) // parts, 1)
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        ranks = different[:, first].nonzero().flatten().tolist()
        name = [name for name, _ in plain.named_parameters()][first]
        own = sorted({rank % parts for rank in ranks})
        raise UserError(
            f"replicas drifted: {name} of rank {', '.join(map(str, ranks))} differs from rank "
            f"{', '.join(map(str, own))}'s; the run is stopped. "
            "The newest checkpoint is from before: checkpoints are compared first."
        )
