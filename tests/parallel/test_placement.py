"""How a new model gets its memory and weights on one process."""

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


def test_a_model_without_memory_gets_its_weights(
    accelerator: Accelerator, capsys: pytest.CaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    weight = torch.arange(6.0).view(3, 2)
    parameters = dict(model.named_parameters())
    is_real_when_checked: list[bool] = []

    def check() -> None:
        is_real_when_checked.append(not model.weight.is_meta)

    weights = iter([("bias", torch.ones(3)), ("weight", weight)])
    place(accelerator, ModelBundle(model, FILES, weights, check=check))

    assert torch.equal(model.weight, weight)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], "an optimizer may hold it"
    assert is_real_when_checked == [True]
    assert "Linear: 9 parameters, 6 of them trained (66.67%)" in capsys.readouterr().out


def test_a_model_with_weights_keeps_them(accelerator: Accelerator) -> None:
    model = nn.Linear(2, 3)
    weight = model.weight.detach().clone()
    assert place(accelerator, ModelBundle(model, FILES)).model is model
    assert torch.equal(model.weight, weight)


def test_weights_that_nobody_has_are_asked_for(accelerator: Accelerator) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    sharded = TrainingAccelerator(Sharding(replicas=1, shards=2), cpu=True)
    for requested in (accelerator, sharded):
        with pytest.raises(UserError, match=r"Linear has .* such as weight; pass their names"):
            place(requested, ModelBundle(model, FILES))


def test_quantized_weights_are_not_sharded() -> None:
    sharded = TrainingAccelerator(Sharding(replicas=1, shards=2), cpu=True)
    packed = nn.Module()
    packed.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        UserError, match=r"--load_in_4bit weights cannot be sharded; use a DDP config"
    ):
        place(sharded, ModelBundle(packed, FILES))


def test_a_gpu_that_is_too_small_is_named_before_the_weights_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model = nn.Linear(2**14, 2**14, bias=False)  # 1 GiB
    sharding = Sharding(replicas=1, shards=1)
    gpu = torch.device("cuda")
    sizes = SimpleNamespace(total_memory=1.9 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sizes)
    with pytest.raises(
        UserError, match=r"needs at least 2\.0 GiB, but this GPU has 1\.9: 1\.0 GiB for weights"
    ):
        check_memory(sharding, gpu, model)
    model.requires_grad_(False)
    check_memory(sharding, gpu, model)
