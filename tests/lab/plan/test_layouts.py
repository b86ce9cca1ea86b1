"""A plan chooses the micro-batch of a layout."""

from types import SimpleNamespace

import torch

from llmtrain.devices import DEVICES
from llmtrain.lab.plan.layouts import Plan, _best_layout
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

    rows = SimpleNamespace(positions=32, train=SimpleNamespace(columns={}))
    recipe = RecipeModel(model, settings, precision="bf16", rows=rows)
    device = DEVICES["h100-80gb"]
    link = Link(device.link, 0.0)
    return Plan(
        memory=Memory.of(recipe, on_gpu=True),
        device=device,
        cluster=Cluster(per_machine=8, inside=link, between=link, nccl=True),
        mfu=0.4,
        layouts=[],
        left_out=[],
    )


def test_a_micro_batch_may_fit_although_smaller_ones_do_not() -> None:
    """Each process has 4 rows of the global batch. The recipe has micro-batches of 2 rows.

    A step of several micro-batches keeps full gradients between them, which take 70 GiB.
    """
    plan = plan_of(global_batch_size=4 * PROCESSES, per_device_train_batch_size=2)

    layout = _best_layout(plan, "FSDP2", FSDP2)

    assert layout.largest == 4
    assert layout.rows == 4
    assert layout.accumulation == 1
    assert layout.bytes.total < 20 * 2**30
