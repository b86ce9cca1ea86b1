"""A parallel layout has a description, and the accelerator registers objects with a state."""

import pytest
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.sharding import Sharding, TrainingAccelerator


@pytest.mark.parametrize(
    ("sharding", "layout", "processes"),
    [
        (Sharding(replicas=1, shards=4), "1x4", 4),
        (Sharding(replicas=2, shards=4), "2x4", 8),
        (Sharding(replicas=1, shards=1, cpu_offload=True), "1x1", 1),
    ],
)
def test_a_layout_is_replicas_times_shards(sharding: Sharding, layout: str, processes: int) -> None:
    assert sharding.layout == layout
    assert sharding.processes == processes


@pytest.fixture
def accelerator() -> TrainingAccelerator:
    return TrainingAccelerator(cpu=True)


@pytest.mark.parametrize("method", ["register_save_state_pre_hook", "register_load_state_pre_hook"])
def test_hooks_that_would_never_be_called_are_refused(
    method: str, accelerator: TrainingAccelerator
) -> None:
    with pytest.raises(UserError, match=f"{method} has no effect here: .*register_for_checkp"):
        getattr(accelerator, method)(object())


def test_registered_objects_are_named_by_class_and_number(
    accelerator: TrainingAccelerator,
) -> None:
    accelerator.register_for_checkpointing(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(nn.Linear(1, 1), nn.Bilinear(1, 1, 1))

    assert [part.name for part in accelerator.registered] == ["Linear", "Linear-2", "Bilinear"]
    assert [*accelerator.registered[1].state_dict()] == ["weight", "bias"]


def test_an_object_without_a_state_is_refused(accelerator: TrainingAccelerator) -> None:
    with pytest.raises(UserError, match="got a list, which has no state_dict; give it state_dict"):
        accelerator.register_for_checkpointing([])
