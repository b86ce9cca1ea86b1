"""How a parallel layout is described."""

import pytest

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
