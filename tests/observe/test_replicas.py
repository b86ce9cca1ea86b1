import pytest
import torch
from torch import nn

from llmtrain.errors import UserError
from llmtrain.observe import replicas
from llmtrain.observe.replicas import check_built_weights, check_replicas, weight_checksums
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.sharding import Sharding, TrainingAccelerator


class TwoRanks(TrainingAccelerator):
    """An accelerator whose other rank holds ``other``."""

    num_processes = 2
    device = torch.device("cpu")

    def __init__(self, other: nn.Module) -> None:
        self.sharding = Sharding(replicas=2, shards=1)
        self.other = other

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool) -> nn.Module:
        return model

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, weight_checksums(self.other)[None]])


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_last_bit_of_one_weight_is_noticed_and_named(dtype: torch.dtype) -> None:
    other = model(dtype)
    check_replicas(Ranks(TwoRanks(other)), model(dtype))
    integers = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
    with torch.no_grad():
        other[1].weight.view(integers[dtype])[2, 5] ^= 1
    with pytest.raises(UserError, match=r"1\.weight of rank 1 differs from rank 0's"):
        check_replicas(Ranks(TwoRanks(other)), model(dtype))


def test_two_weights_that_change_places_are_noticed() -> None:
    other = model()
    with torch.no_grad():
        other[0].bias[:2] = other[0].bias[:2].flip(0)
    with pytest.raises(UserError, match=r"0\.bias"):
        check_replicas(Ranks(TwoRanks(other)), model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_flipped_signs_do_not_cancel_out(dtype: torch.dtype) -> None:
    other = model(dtype)
    with torch.no_grad():
        other[0].bias[:2] *= -1
    with pytest.raises(UserError, match=r"0\.bias"):
        check_replicas(Ranks(TwoRanks(other)), model(dtype))


def test_a_sum_of_values_would_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: lazier checksums pass drifted weights."""
    other = model()
    with torch.no_grad():
        other[0].bias[:2] = other[0].bias[:2].flip(0)
    lazy = lambda module: torch.stack([p.double().sum() for p in module.parameters()])  # noqa: E731
    monkeypatch.setattr(replicas, "weight_checksums", lazy)
    monkeypatch.setitem(globals(), "weight_checksums", lazy)
    check_replicas(Ranks(TwoRanks(other)), model())


def test_an_empty_shard_is_like_another() -> None:
    empty = nn.Linear(8, 0)
    check_replicas(Ranks(TwoRanks(empty)), empty)


class TwoReplicasOfTwo(TrainingAccelerator):
    """An accelerator of four ranks: 0 and 2 hold one half of a model, 1 and 3 the other."""

    num_processes = 4
    device = torch.device("cpu")

    def __init__(self, *halves: nn.Module) -> None:
        self.halves = halves
        self.sharding = Sharding(replicas=2, shards=2)

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool) -> nn.Module:
        return model

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight_checksums(half) for half in self.halves])


def test_replicas_of_sharded_models_are_compared_shard_by_shard() -> None:
    one, two, drifted = model(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), model()
    check_replicas(Ranks(TwoReplicasOfTwo(one, two, one, two)), one)
    with torch.no_grad():
        drifted[1].weight.view(torch.int32)[2, 5] ^= 1
    with pytest.raises(UserError, match=r"1\.weight of rank 2 differs from rank 0's"):
        check_replicas(Ranks(TwoReplicasOfTwo(one, two, drifted, two)), one)
    with pytest.raises(UserError, match=r"of rank 3 differs from rank 1's"):
        check_replicas(Ranks(TwoReplicasOfTwo(one, two, one, one)), one)


def test_ranks_that_built_other_weights_are_named_before_the_first_step() -> None:
    check_built_weights(Ranks(TwoRanks(model())), model())
    unseeded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    with pytest.raises(
        UserError, match=r"different initial weights, such as 0\.weight of rank 1\."
    ):
        check_built_weights(Ranks(TwoRanks(unseeded)), model())
