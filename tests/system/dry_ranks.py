"""Run by test_plan.py: set-up and two steps as one of many processes that are not there.

`dry_ranks.py FOUND`, under the variables of a launcher. What is sent goes nowhere (torch's fake
process group).
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmtrain import GPT, GPTConfig, ModelBundle, OptimConfig, launch, make_optimizer
from llmtrain.interfaces.objective import Objective
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import local_shard
from llmtrain.training.step import train_step
from tests.memory import resident
from tests.record.test_checkpoint import Files

CONFIG = GPTConfig(n_layer=4, n_head=4, n_embd=512, block_size=32)


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    base = resident("VmRSS")
    began = time.perf_counter()
    accelerator = start_accelerator()
    with torch.device("meta"):
        gpt = GPT(CONFIG, 300)
    place(accelerator, ModelBundle(gpt, Files(), gpt.initial_weights(3)))
    optimizer = make_optimizer(accelerator, gpt, OptimConfig())
    model, optimizer = accelerator.prepare(gpt, optimizer)
    seconds = time.perf_counter() - began

    engine = engine_for(
        Ranks(accelerator),
        model,
        objective=Objective(),
        config=ParallelConfig(),
        accumulation=1,
    )
    ids = torch.zeros(2, 33, dtype=torch.int64)
    batches = [{"input_ids": ids, "labels": ids}]
    for _ in range(2):
        # DDP checks that its sums were made, which they are not here.
        with contextlib.nullcontext() if engine.ranks.is_sharded else engine.no_sync():
            train_step(engine, optimizer, batches, max_grad_norm=1.0)
    held = sum(local_shard(p).numel() * p.element_size() for p in model.parameters())
    states = [v for state in optimizer.optimizer.state.values() for v in state.values()]
    found = {
        "seconds": seconds,
        "weights": held,
        "states": sum(local_shard(v).numel() * 4 for v in states),
    }
    found["resident"] = resident("VmHWM") - base
    Path(sys.argv[1]).write_text(json.dumps(found))
    os._exit(0)  # nobody is there to leave


if __name__ == "__main__":
    launch(main)
