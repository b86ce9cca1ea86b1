"""Started by test_plan.py: set up a model and make two steps as one of many processes.

`dry_ranks.py FILE` needs the variables of a launcher. The other processes do not exist: torch's
fake process group discards each message.
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
from tests.record.checkpoint_files import Files

CONFIG = GPTConfig(n_layer=4, n_head=4, n_embd=512, block_size=32)


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    memory_before = resident("VmRSS")

    start_time = time.perf_counter()
    accelerator = start_accelerator()
    with torch.device("meta"):
        gpt = GPT(CONFIG, 300)
    place(accelerator, ModelBundle(gpt, Files(), gpt.initial_weights(3)))
    optimizer = make_optimizer(accelerator, gpt, OptimConfig())
    model, optimizer = accelerator.prepare(gpt, optimizer)
    seconds = time.perf_counter() - start_time

    engine = engine_for(
        Ranks(accelerator),
        model,
        objective=Objective(),
        config=ParallelConfig(),
        accumulation=1,
    )
    token_ids = torch.zeros(2, 33, dtype=torch.int64)
    batches = [{"input_ids": token_ids, "labels": token_ids}]
    for _ in range(2):
        # DDP checks that its buckets were summed, which the fake process group does not do.
        with contextlib.nullcontext() if engine.ranks.is_sharded else engine.no_sync():
            train_step(engine, optimizer, batches, max_grad_norm=1.0)

    weights = [local_shard(parameter) for parameter in model.parameters()]
    result = {
        "seconds": seconds,
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "state_elements": optimizer_elements(optimizer.optimizer),
        "resident_bytes": resident("VmHWM") - memory_before,
    }
    Path(sys.argv[1]).write_text(json.dumps(result))
    os._exit(0)  # there is no process group to leave


def optimizer_elements(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of elements of this process's optimizer states."""
    elements = 0
    for state in optimizer.state.values():
        elements += sum(local_shard(value).numel() for value in state.values())
    return elements


if __name__ == "__main__":
    launch(main)
