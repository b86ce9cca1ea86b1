"""Checks that all replicas begin with the same weights, and still have them.

DDP compares shapes, once. These checks compare values.
"""

from collections.abc import Mapping

import torch
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import local_shard

_BLOCK_SIZE = 1 << 22  # values that are summed at a time; each of them needs 24 bytes
_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor, an int64 scalar.

    It changes if any bit changes, and also if two values change places. The values' bits are read
    as integers, and summed with odd weights that grow along the tensor, modulo 2**64.
    """
    bits = values.contiguous().view(_INTEGER_TYPES[values.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK_SIZE):
        integers = bits[start : start + _BLOCK_SIZE].to(torch.int64)
        integers = integers ^ (integers >> 32)  # otherwise two flipped signs of float64 cancel out
        weights = 2 * torch.arange(start, start + len(integers), device=bits.device) + 1
        total += (integers * weights).sum()
    return total


def check_replicas(ranks: Ranks, model: nn.Module) -> None:
    """Compare the weights of all ranks that should have the same values. All ranks call this.

    If every rank has another shard, there is nothing to compare.

    Args:
        ranks: the ranks of this run.
        model: the model that ``accelerator.prepare`` returned.

    Raises:
        UserError: on every rank, with the first parameter that differs and the ranks that have it.
    """
    if ranks.sharding.replicas == 1:
        return
    unwrapped = ranks.accelerator.unwrap_model(model, keep_torch_compile=False)
    shards = ranks.sharding.shards
    difference = _first_difference(ranks, dict(unwrapped.named_parameters()), shards)
    if difference is not None:
        name, drifted_ranks = difference
        expected_ranks = torch.unique(drifted_ranks % shards)
        raise UserError(
            f"replicas drifted: {name} of rank {_join(drifted_ranks)} differs from rank "
            f"{_join(expected_ranks)}'s; the run is stopped. "
            "The newest checkpoint is sound: replicas are compared before each save."
        )


def check_built_weights(ranks: Ranks, model: nn.Module) -> None:
    """Compare the weights with which the ranks have built a model. All ranks call this.

    DDP would take those of rank 0, and FSDP2 a shard of each. Weights on the meta device have no
    values yet, and quantized ones are loaded from files.

    Args:
        ranks: the ranks of this run.
        model: the model, before it is sharded or wrapped.

    Raises:
        UserError: on every rank, with the first parameter that differs.
    """
    built = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not parameter.is_meta
    }
    if ranks.world_size == 1 or not built:
        return

    difference = _first_difference(ranks, built, shards=1)
    if difference is not None:
        name, other_ranks = difference
        raise UserError(
            f"{type(model).__name__}: the ranks have built different initial weights, such as "
            f"{name} of rank {_join(other_ranks)}. torch's generators are seeded "
            "with --seed before build() is called. If build() uses others, such as numpy's, seed "
            "them alike on all ranks."
        )


def _first_difference(
    ranks: Ranks, parameters: Mapping[str, nn.Parameter], shards: int
) -> tuple[str, torch.Tensor] | None:
    """Return the name of the first parameter that differs, and the ranks on which it does.

    All ranks call this. A rank should have the values of the rank with the same shards in the first
    replica, which is one of the first ``shards`` ranks.
    """
    local_checksums = torch.stack([checksum(local_shard(p)) for p in parameters.values()])
    checksums = ranks.accelerator.gather(local_checksums[None].to(ranks.device))
    rank_numbers = torch.arange(len(checksums), device=checksums.device)
    differs = checksums != checksums[rank_numbers % shards]  # [ranks, parameters]
    if not differs.any():
        return None

    index = int(differs.any(dim=0).nonzero()[0])
    return [*parameters][index], differs[:, index].nonzero().flatten()


def _join(ranks: torch.Tensor) -> str:
    return ", ".join(map(str, ranks.tolist()))
