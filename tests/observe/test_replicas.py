"""Replicas whose weights differ in a single bit are noticed and named."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from llmtrain.errors import UserError
from llmtrain.observe.replicas import check_built_weights, check_replicas, checksum
from llmtrain.parallel.ranks import Ranks, Sharding

INTEGER_TYPES = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
}


def checksums_of(model: nn.Module) -> torch.Tensor:
    return torch.stack([checksum(parameter.detach()) for parameter in model.parameters()])


class FakeAccelerator:
    """Stands for the accelerator of several ranks. This one is rank 0.

    Args:
        models: for each rank, its model, or its shards of a model.
    """

    device = torch.device("cpu")
    process_index = 0
    is_local_main_process = True

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models
        self.num_processes = len(models)

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool) -> nn.Module:
        return model

    def gather(self, local_checksums: torch.Tensor) -> torch.Tensor:
        checksums = torch.stack([checksums_of(model) for model in self.models])
        assert torch.equal(local_checksums, checksums[:1])
        return checksums


def two_replicas(first: nn.Module, second: nn.Module) -> Ranks:
    return Ranks(FakeAccelerator([first, second]), Sharding(replicas=2, shards=1))


def new_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype)


def flip_a_bit(model: nn.Module) -> None:
    weight = model.get_parameter("1.weight").data
    weight.view(INTEGER_TYPES[weight.dtype])[2, 5] ^= 1


def swap_two_values(model: nn.Module) -> None:
    """Their sum stays the same."""
    bias = model.get_parameter("0.bias").data
    bias[:2] = bias[:2].flip(0)


def flip_two_signs(model: nn.Module) -> None:
    """The sum of their bits stays the same, modulo 2**64."""
    model.get_parameter("0.bias").data[:2] *= -1


@pytest.mark.parametrize("dtype", INTEGER_TYPES, ids=str)
def test_equal_replicas_and_empty_shards_pass(dtype: torch.dtype) -> None:
    model = new_model(dtype)
    empty = nn.Linear(8, 0)

    check_replicas(two_replicas(model, new_model(dtype)), model)
    check_replicas(two_replicas(empty, empty), empty)


@pytest.mark.parametrize("dtype", INTEGER_TYPES, ids=str)
@pytest.mark.parametrize(
    ("change", "parameter"),
    [(flip_a_bit, "1.weight"), (swap_two_values, "0.bias"), (flip_two_signs, "0.bias")],
)
def test_the_first_parameter_that_differs_is_named(
    change: Callable[[nn.Module], None], parameter: str, dtype: torch.dtype
) -> None:
    model = new_model(dtype)
    other = new_model(dtype)
    change(other)

    with pytest.raises(UserError, match=f"{parameter} of rank 1 differs from rank 0's"):
        check_replicas(two_replicas(model, other), model)


# Ranks 0 and 2 hold the first half of a model, and ranks 1 and 3 hold the second half.
FOUR_RANKS = Sharding(replicas=2, shards=2)


@pytest.mark.parametrize(
    ("differing_rank", "message"),
    [(2, r"1\.weight of rank 2 differs from rank 0's"), (3, r"1\.weight of rank 3 .* rank 1's")],
)
def test_each_shard_is_compared_with_that_of_the_first_replica(
    differing_rank: int, message: str
) -> None:
    models = [new_model(seed=rank % 2) for rank in range(4)]
    check_replicas(Ranks(FakeAccelerator(models), FOUR_RANKS), models[0])

    flip_a_bit(models[differing_rank])
    with pytest.raises(UserError, match=message):
        check_replicas(Ranks(FakeAccelerator(models), FOUR_RANKS), models[0])


def test_ranks_that_build_different_weights_are_named_before_the_first_step() -> None:
    model = new_model(seed=0)
    check_built_weights(two_replicas(model, new_model(seed=0)), model)

    with pytest.raises(UserError, match=r"0\.weight of rank 1\."):
        check_built_weights(two_replicas(model, new_model(seed=1)), model)
