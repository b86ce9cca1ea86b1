"""The cost of --bitwise and of the replica check to a step: ratios of medians, all kinds in turn.

python -m benchmarks.bitwise
torchrun --standalone --nproc-per-node 2 -m benchmarks.bitwise
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from llmtrain import GPT, GPTConfig, OptimConfig, make_optimizer
from llmtrain.console import say
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step

PAIRS = 16
UNCOUNTED = 3


def main() -> None:
    accelerator = start_accelerator(ParallelConfig(bitwise=True))
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128), 2048)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(2048, (8, 129), device=accelerator.device)
    batches = [{"input_ids": ids, "labels": ids}] * (4 // accelerator.num_processes)

    def step(engine: Engine) -> None:
        train_step(engine, optimizer, batches, max_grad_norm=1.0)

    actions: dict[str, Callable[[], None]] = {
        "plain": partial(step, ReplicatedEngine(Ranks(accelerator), model)),
        "bitwise": partial(step, BitwiseEngine(Ranks(accelerator), model)),
        "check": partial(check_replicas, accelerator, model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(UNCOUNTED + PAIRS):
        for name, action in actions.items():
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            action()
            accelerator.wait_for_everyone()
            seconds[name].append(time.perf_counter() - began)

    plain, bitwise, check = (
        1e3 * statistics.median(times[UNCOUNTED:]) for times in seconds.values()
    )
    say("step", f"{plain:.1f} ms; --bitwise {bitwise:.1f} ms, {bitwise / plain:.3f}x")
    say(
        "check",
        f"replicas {check:.2f} ms: {check / plain:.2%} of a step, "
        f"{check / plain / 100:.4%} at every 100",
    )


if __name__ == "__main__":
    launch(main)
