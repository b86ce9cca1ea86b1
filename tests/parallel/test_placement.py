"""A new model gets its memory and its weights, and its repeated blocks are found."""

from typing import cast

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.interfaces.model import ModelBundle, ModelFormat, block_classes, blocks_of
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import Sharding, TrainingAccelerator

FILES = cast(ModelFormat, None)  # not used
TWO_SHARDS = Sharding(replicas=1, shards=2)


def test_a_model_without_memory_gets_its_weights(
    accelerator: Accelerator, capsys: pytest.CaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    weight = torch.arange(6.0).view(3, 2)
    parameters_before = dict(model.named_parameters())
    weights_are_there: list[bool] = []

    def check() -> None:
        weights_are_there.append(not model.weight.is_meta)

    weights = iter([("bias", torch.ones(3)), ("weight", weight)])
    placed = move_to_devices(accelerator.ranks, ModelBundle(model, FILES, weights, check=check))

    assert placed.model is model
    assert torch.equal(model.weight, weight)
    for name, parameter in model.named_parameters():
        assert parameter is parameters_before[name], "an optimizer may hold it"
    assert weights_are_there == [True], "the check of the bundle comes last"
    assert "9 parameters, 6 of them trained (66.67%)" in capsys.readouterr().out


@pytest.mark.parametrize("sharding", [None, TWO_SHARDS], ids=["one process", "sharded"])
def test_a_model_without_memory_needs_weights(sharding: Sharding | None) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    accelerator = TrainingAccelerator(sharding, cpu=True)

    with pytest.raises(UserError, match=r"Linear has .* such as weight; pass their names"):
        move_to_devices(accelerator.ranks, ModelBundle(model, FILES))


def test_quantized_weights_are_not_sharded() -> None:
    accelerator = TrainingAccelerator(TWO_SHARDS, cpu=True)
    quantized = nn.Module()
    quantized.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    message = r"--load_in_4bit weights cannot be sharded; use a DDP config"
    with pytest.raises(UserError, match=message):
        move_to_devices(accelerator.ranks, ModelBundle(quantized, FILES))


# --- layouts and registered objects


@pytest.mark.parametrize(
    ("sharding", "layout", "processes"),
    [
        (Sharding(replicas=2, shards=4), "2x4", 8),
        (Sharding(replicas=1, shards=1, cpu_offload=True), "1x1", 1),
    ],
)
def test_a_layout_is_replicas_times_shards(sharding: Sharding, layout: str, processes: int) -> None:
    assert sharding.layout == layout
    assert sharding.processes == processes


def test_an_object_that_is_registered_with_the_accelerator_is_refused() -> None:
    with pytest.raises(UserError, match=r"state_dict of a llmtrain\.Callback"):
        TrainingAccelerator(cpu=True).register_for_checkpointing(nn.Linear(1, 1))


# --- the repeated blocks of a model


def test_blocks_are_the_classes_that_a_model_declares_or_its_longest_list() -> None:
    declared = nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))
    declared._no_split_modules = ["Bilinear", "Absent"]
    assert block_classes(declared) == {"Bilinear"}

    with torch.device("meta"):
        gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=8), 16)
    assert block_classes(gpt) == {"Block"}
    assert len(blocks_of(gpt)) == 2

    # There are more experts than layers.
    experts = nn.ModuleList(nn.Bilinear(1, 1, 1) for _ in range(9))
    layers = nn.ModuleList(nn.ModuleDict({"experts": experts}) for _ in range(2))
    assert block_classes(nn.ModuleDict({"layers": layers})) == {"ModuleDict"}

    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == []
