"""A plan chooses the micro-batch of a layout, and has notes about each layout."""

from types import SimpleNamespace

import pytest
import torch

from llmtrain.devices import DEVICES
from llmtrain.lab.commands.plan import notes
from llmtrain.lab.plan.layouts import Plan, PlannedLayout, _plan_layout
from llmtrain.lab.plan.speed import Cluster, Link
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import RecipeModel
from llmtrain.training.settings import OptimConfig

CONFIG = GPTConfig(n_layer=60, n_head=40, n_embd=5120, block_size=32)
PROCESSES = 64
FSDP2 = Sharding(replicas=1, shards=PROCESSES)


def plan_of(global_batch_size: int, per_device_train_batch_size: int) -> Plan:
    """Make a plan for 64 GPUs of 80 GiB, without a layout yet."""
    with torch.device("meta"):
        model = GPT(CONFIG, 1000)
    settings = SimpleNamespace(
        model=CONFIG,
        optim=OptimConfig("adamw"),
        parallel=ParallelConfig(),
        data=SimpleNamespace(
            global_batch_size=global_batch_size,
            per_device_train_batch_size=per_device_train_batch_size,
        ),
    )

    recipe = RecipeModel(model, settings, precision="bf16", rows=SimpleNamespace(positions=32))
    device = DEVICES["h100-80gb"]
    link = Link(device.link, 0.0)
    return Plan(
        memory=Memory.of(recipe, on_gpu=True),
        device=device,
        cluster=Cluster(per_machine=8, inside=link, between=link, nccl=True),
        compute=None,
        layouts=[],
        left_out=[],
    )


@pytest.fixture(scope="module")
def layout() -> PlannedLayout:
    """Each process has 4 rows of the global batch. The recipe has micro-batches of 2 rows."""
    plan = plan_of(global_batch_size=4 * PROCESSES, per_device_train_batch_size=2)
    return _plan_layout("FSDP2", FSDP2, plan)


def test_a_micro_batch_may_fit_although_smaller_ones_do_not(layout: PlannedLayout) -> None:
    """A step of several micro-batches keeps full gradients between them, which take 70 GiB."""
    assert layout.fitting == [4]
    assert layout.largest == 4
    assert layout.too_large == [1, 2]


def test_the_micro_batch_of_the_plan_fits_and_a_note_names_smaller_ones(
    layout: PlannedLayout,
) -> None:
    assert layout.rows == 4
    assert layout.accumulation == 1
    assert layout.bytes.total < 20 * 2**30
    [note] = notes(layout)
    assert "micro-batches of 4 rows fit, but smaller ones of 1 and 2 do not" in note
    assert notes(layout._replace(fitting=[1, 2, 4], too_large=[])) == []


def test_a_note_names_a_flag_with_which_the_layout_would_fit() -> None:
    """Between micro-batches of 1 row, gradients take 70 GiB. 17 rows at once need 8,475 MiB."""
    plan = plan_of(global_batch_size=17 * PROCESSES, per_device_train_batch_size=1)
    device = plan.device._replace(memory=8465 * 2**20 / 0.94)

    layout = _plan_layout("FSDP2", FSDP2, plan._replace(device=device))

    assert layout.fitting == []
    [note] = notes(layout)
    assert "--sync_each_batch" in note
    assert notes(layout._replace(fits_if_synced=False)) == []
