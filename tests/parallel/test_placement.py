"""A new model gets its memory and its weights."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle, ModelFormat
from llmtrain.parallel.placement import check_memory, place
from llmtrain.parallel.sharding import Sharding, TrainingAccelerator

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
    place(accelerator, ModelBundle(model, FILES, weights, check=check))

    assert torch.equal(model.weight, weight)
    for name, parameter in model.named_parameters():
        assert parameter is parameters_before[name], "an optimizer may hold it"
    assert weights_are_there == [True], "the check of the bundle comes last"
    assert "Linear: 9 parameters, 6 of them trained (66.67%)" in capsys.readouterr().out


def test_a_model_with_weights_keeps_them(accelerator: Accelerator) -> None:
    model = nn.Linear(2, 3)
    weight = model.weight.detach().clone()

    assert place(accelerator, ModelBundle(model, FILES)).model is model
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("sharding", [None, TWO_SHARDS], ids=["one process", "sharded"])
def test_a_model_without_memory_needs_weights(sharding: Sharding | None) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    accelerator = TrainingAccelerator(sharding, cpu=True)

    with pytest.raises(UserError, match=r"Linear has .* such as weight; pass their names"):
        place(accelerator, ModelBundle(model, FILES))


def test_quantized_weights_are_not_sharded() -> None:
    accelerator = TrainingAccelerator(TWO_SHARDS, cpu=True)
    quantized = nn.Module()
    quantized.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    message = r"--load_in_4bit weights cannot be sharded; use a DDP config"
    with pytest.raises(UserError, match=message):
        place(accelerator, ModelBundle(quantized, FILES))


def test_a_gpu_that_is_too_small_is_an_error_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2**14, 2**14, bias=False)  # 1 GiB
    one_process = Sharding(replicas=1, shards=1)
    gpu = torch.device("cuda")
    properties = SimpleNamespace(total_memory=1.9 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    message = r"needs at least 2\.0 GiB, but this GPU has 1\.9: 1\.0 GiB for weights"
    with pytest.raises(UserError, match=message):
        check_memory(one_process, gpu, model)

    model.requires_grad_(False)
    check_memory(one_process, gpu, model)  # it has no gradients
