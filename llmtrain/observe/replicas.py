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

    If every rank holds another shard, there is nothing to compare. Under tensor parallelism,
    neighbouring ranks hold the same of what is not sharded.

    Raises:
        UserError: on every rank, with the first parameter that differs and the ranks that hold it.
    """
    sharding = sharding_of(accelerator)
    ranks_of_replica = sharding.processes // sharding.replicas
    every_rank_differs = sharding.replicas == 1 and sharding.tensor == 1
    if every_rank_differs:
        return

    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    local_fingerprint = fingerprint(unwrapped)[None].to(accelerator.device)
    fingerprints = accelerator.gather(local_fingerprint)  # [ranks, parameters]
    model_ranks = _model_ranks(
        unwrapped,
        ranks=len(fingerprints),
        ranks_of_replica=ranks_of_replica,
        tensor_parallel_size=sharding.tensor,
        device=fingerprints.device,
    )
    differs = fingerprints != fingerprints.gather(0, model_ranks)
    if not differs.any():
        return

    parameter = int(differs.any(dim=0).nonzero()[0])
    name = [name for name, _ in unwrapped.named_parameters()][parameter]
    drifted_ranks = differs[:, parameter].nonzero().flatten()
    expected_ranks = torch.unique(model_ranks[drifted_ranks, parameter])
    raise UserError(
        f"replicas drifted: {name} of rank {_listed(drifted_ranks)} differs from rank "
        f"{_listed(expected_ranks)}'s; the run is stopped. "
        "The newest checkpoint is from before: checkpoints are compared first."
    )


def _model_ranks(
    model: nn.Module,
    ranks: int,
    ranks_of_replica: int,
    tensor_parallel_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the first rank that should hold the same as each rank, int64 [ranks, parameters].

    That is the rank with the same place in the first replica. For a parameter that tensor parallelism
    does not shard, it is the first of the neighbours there.
    """
    place_in_replica = torch.arange(ranks, device=device)[:, None] % ranks_of_replica
    first_neighbour = place_in_replica - place_in_replica % tensor_parallel_size
    is_sharded = torch.tensor(
        ["tp" in shards_over(parameter) for parameter in model.parameters()], device=device
    )
    return torch.where(is_sharded, place_in_replica, first_neighbour)


def _listed(ranks: torch.Tensor) -> str:
    return ", ".join(map(str, ranks.tolist()))
