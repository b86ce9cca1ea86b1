"""How a parallel layout is described."""

import pytest

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import Sharding, TrainingAccelerator


@pytest.mark.parametrize(
    ("sharding", "method", "layout", "processes"),
    [
        (Sharding(1, 4), "FSDP2", "1x4", 4),
        (Sharding(2, 4), "FSDP2", "2x4", 8),
        (Sharding(1, 1, cpu_offload=True), "FSDP2", "1x1", 1),
        (Sharding(2, 1, tensor=2), "tensor parallelism (2)", "2x1x2", 4),
        (Sharding(1, 2, tensor=2), "FSDP2 and tensor parallelism (2)", "1x2x2", 4),
        (Sharding(3, 1, stages=2), "2 stages", "3x1 in 2 stages", 6),
        (Sharding(1, 2, stages=2), "FSDP2 and 2 stages", "1x2 in 2 stages", 4),
    ],
)
def test_a_layout_is_described(
    sharding: Sharding, method: str, layout: str, processes: int
) -> None:
    assert sharding.method == method
    assert sharding.layout == layout
    assert sharding.processes == processes


@pytest.mark.parametrize(
    "method",
    [
        "register_for_checkpointing",
        "register_save_state_pre_hook",
        "register_load_state_pre_hook",
    ],
)
def test_what_a_checkpoint_would_lose_is_refused(method: str) -> None:
    """Accelerate saves registered objects in `save_state`, which a run does not call."""
    accelerator = TrainingAccelerator(cpu=True)
    with pytest.raises(UserError, match=f"{method} has no effect here: checkpoints hold"):
        getattr(accelerator, method)(object())
