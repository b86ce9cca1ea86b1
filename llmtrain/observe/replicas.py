"""Whether all processes still hold the same weights. DDP compares shapes, once; this compares values."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError


def fingerprint(model: nn.Module) -> torch.Tensor:
    """An int64 [parameters] that changes with any bit of any parameter, or with two values that change places.

    The values' bits, as integers, are summed with odd weights that grow along the tensor, modulo 2**64.
    """
    sums = []
    for parameter in model.parameters():
        value = parameter.detach().contiguous()
        bits = value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        bits = bits.flatten().to(torch.int64)
        bits = bits ^ (bits >> 32)  # or two flipped signs of float64 would cancel out
        weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
        sums.append((bits * weights).sum())
    return torch.stack(sums)


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError`, on every process alike, where the weights of one differ from rank 0's; it names the
    first tensor and the ranks."""
    if accelerator.num_processes == 1:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    mine = fingerprint(plain)
    everyone = accelerator.gather(mine[None])
    different = everyone != everyone[0]
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        ranks = different[:, first].nonzero().flatten().tolist()
        name = [name for name, _ in plain.named_parameters()][first]
        raise UserError(
            f"replicas drifted: {name} of rank {', '.join(map(str, ranks))} differs from rank 0's; the run is stopped. "
            "The newest checkpoint is from before: checkpoints are compared first."
        )
