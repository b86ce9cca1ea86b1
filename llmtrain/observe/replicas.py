"""A check that all replicas still have the same weights.

DDP compares shapes, once. This check compares values.
"""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.shards import local_shard, shards_over

_BLOCK_SIZE = 1 << 22  # values that are summed at a time; each of them needs 24 bytes
_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def weight_checksums(model: nn.Module) -> torch.Tensor:
    """Return a checksum of each parameter that this process holds.

    It changes if any bit changes, and also if two values change places. The values' bits are read
    as integers, and summed with odd weights that grow along the tensor, modulo 2**64.

    Returns:
        int64 [parameters]. It is 0 for a parameter on the meta device, which another pipeline stage
        holds.
    """
    parameters = list(model.parameters())
    local_parameters = [parameter for parameter in parameters if not parameter.is_meta]
    sums = {parameter: _weighted_sum(local_shard(parameter)) for parameter in local_parameters}
    absent = torch.zeros_like(next(iter(sums.values())))
    return torch.stack([sums.get(parameter, absent) for parameter in parameters])


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum that :func:`weight_checksums` describes, an int64 scalar."""
    bits = values.contiguous().view(_INTEGER_TYPES[values.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK_SIZE):
        total += _block_sum(bits[start : start + _BLOCK_SIZE], start)
    return total


def _block_sum(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Return the weighted sum of a block that begins at index ``start`` of its tensor."""
    integers = bits.to(torch.int64)
    integers = integers ^ (integers >> 32)  # otherwise two flipped signs of float64 cancel out
    weights = 2 * torch.arange(start, start + len(integers), device=bits.device) + 1
    return (integers * weights).sum()


def check_replicas(accelerator: Accelerator, model: nn.Module) -> None:
    """Compare the weights of all ranks that should have the same values. All ranks call this.

    If every rank has another shard, there is nothing to compare. Under tensor parallelism,
    neighbouring ranks have the same values of every parameter that is not sharded.

    Args:
        accelerator: the Accelerator of this run.
        model: the model that ``accelerator.prepare`` returned.

    Raises:
        UserError: on every rank, with the first parameter that differs and the ranks that have it.
    """
    sharding = sharding_of(accelerator)
    ranks_of_replica = sharding.processes // sharding.replicas
    every_rank_differs = sharding.replicas == 1 and sharding.tensor == 1
    if every_rank_differs:
        return

    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    local_checksums = weight_checksums(unwrapped)[None].to(accelerator.device)
    checksums = accelerator.gather(local_checksums)  # [ranks, parameters]
    model_ranks = _model_ranks(
        unwrapped,
        ranks=len(checksums),
        ranks_of_replica=ranks_of_replica,
        tensor_parallel_size=sharding.tensor,
        device=checksums.device,
    )
    differs = checksums != checksums.gather(0, model_ranks)
    if not differs.any():
        return

    parameter = int(differs.any(dim=0).nonzero()[0])
    name = [name for name, _ in unwrapped.named_parameters()][parameter]
    drifted_ranks = differs[:, parameter].nonzero().flatten()
    expected_ranks = torch.unique(model_ranks[drifted_ranks, parameter])
    raise UserError(
        f"replicas drifted: {name} of rank {_join(drifted_ranks)} differs from rank "
        f"{_join(expected_ranks)}'s; the run is stopped. "
        "The newest checkpoint is sound: replicas are compared before each save."
    )


def _model_ranks(
    model: nn.Module,
    ranks: int,
    ranks_of_replica: int,
    tensor_parallel_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the first rank that should have the same values as each rank.

    That is the rank with the same index in the first replica. For a parameter that tensor
    parallelism does not shard, it is the first of the neighbours of that rank.

    Args:
        model: the unwrapped model.
        ranks: the number of ranks.
        ranks_of_replica: how many ranks share one copy of the model.
        tensor_parallel_size: how many neighbouring ranks share each matrix.
        device: the device of the result.

    Returns:
        int64 [ranks, parameters].
    """
    index_in_replica = torch.arange(ranks, device=device)[:, None] % ranks_of_replica
    first_neighbour = index_in_replica - index_in_replica % tensor_parallel_size
    is_sharded = torch.tensor(
        ["tp" in shards_over(parameter) for parameter in model.parameters()], device=device
    )
    return torch.where(is_sharded, index_in_replica, first_neighbour)


def _join(ranks: torch.Tensor) -> str:
    return ", ".join(map(str, ranks.tolist()))
