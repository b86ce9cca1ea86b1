"""The cost of --bitwise and of the replica check to a step: ratios of medians, all kinds in turn.

python -m benchmarks.bitwise
torchrun --standalone --nproc-per-node 2 -m benchmarks.bitwise
"""

import statistics
import time
from collections.abc import Callable

import torch

from llmtrain import GPT, GPTConfig, OptimConfig, make_optimizer
from llmtrain.console import say
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.training.step import train_step

PAIRS, UNCOUNTED = 16, 3


def main() -> None:
    accelerator = start_accelerator(bitwise=True)
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128), 2048)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(2048, (8, 129), device=accelerator.device)
    batches = [{"input_ids": ids, "labels": ids}] * (4 // accelerator.num_processes)

    def seconds(action: Callable[[], object]) -> float:
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        action()
        accelerator.wait_for_everyone()
        return time.perf_counter() - began

    plain_engine = ReplicatedEngine(accelerator, model)
    bitwise_engine = BitwiseEngine(accelerator, model)
    plain, bitwise, check = [], [], []
    for _ in range(UNCOUNTED + PAIRS):
        plain.append(seconds(lambda: train_step(plain_engine, optimizer, batches, 1.0)))
        bitwise.append(seconds(lambda: train_step(bitwise_engine, optimizer, batches, 1.0)))
        check.append(seconds(lambda: check_replicas(accelerator, model)))
    one, other, once = (statistics.median(times[UNCOUNTED:]) for times in (plain, bitwise, check))
    say("step", f"{one * 1e3:.1f} ms; --bitwise {other * 1e3:.1f} ms, {other / one:.3f}x")
    say(
        "check",
        f"replicas {once * 1e3:.2f} ms: {once / one:.2%} of a step, {once / one / 100:.4%} at every 100",
    )


if __name__ == "__main__":
    launch(main)
