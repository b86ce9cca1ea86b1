"""How a parallel layout is described."""

import pytest
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.sharding import Sharding, TrainingAccelerator


@pytest.mark.parametrize(
    ("sharding", "layout", "processes"),
    [
        (Sharding(1, 4), "1x4", 4),
        (Sharding(2, 4), "2x4", 8),
        (Sharding(1, 1, cpu_offload=True), "1x1", 1),
    ],
)
def test_a_layout_is_described(sharding: Sharding, layout: str, processes: int) -> None:
    assert sharding.layout == layout
    assert sharding.processes == processes


@pytest.mark.parametrize("method", ["register_save_state_pre_hook", "register_load_state_pre_hook"])
def test_a_hook_that_no_save_would_call_is_refused(method: str) -> None:
    accelerator = TrainingAccelerator(cpu=True)
    with pytest.raises(UserError, match=f"{method} has no effect here: .*register_for_checkp"):
        getattr(accelerator, method)(object())


def test_registered_objects_are_named_by_their_classes() -> None:
    accelerator = TrainingAccelerator(cpu=True)
    first, second, third = nn.Linear(1, 1), nn.Linear(1, 1), nn.Bilinear(1, 1, 1)
    accelerator.register_for_checkpointing(first)
    accelerator.register_for_checkpointing(second, third)
    names = [part.name for part in accelerator.registered]
    assert names == ["Linear", "Linear-2", "Bilinear"]
    assert [*accelerator.registered[1].state_dict()] == ["weight", "bias"]


def test_an_object_without_a_state_is_refused() -> None:
    accelerator = TrainingAccelerator(cpu=True)
    with pytest.raises(UserError, match="got a list, which has no state_dict; give it state_dict"):
        accelerator.register_for_checkpointing([])
