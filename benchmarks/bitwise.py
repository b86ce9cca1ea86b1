"""What --bitwise and the comparison of replicas cost, in steps of a small GPT.

| measured | compared with |
|---|---|
| a step with --bitwise | a plain step |
| one comparison of the replicas' weights | a plain step; by default it is made every 100 steps |

Repeat it with `python -m benchmarks.bitwise`, and on two processes with
`torchrun --standalone --nproc-per-node 2 -m benchmarks.bitwise`. It writes no file.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.comparison import take_turns
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

ROUNDS = 16
WARM_UP_ROUNDS = 3
STEPS_BETWEEN_CHECKS = 100

VOCABULARY = 2048
MODEL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128)
MICRO_BATCH = 8
MICRO_BATCHES = 4  # of a step, over all processes


def main() -> None:
    accelerator = start_accelerator(ParallelConfig(bitwise=True))
    model = GPT(MODEL, VOCABULARY)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(VOCABULARY, (MICRO_BATCH, MODEL.block_size + 1), device=accelerator.device)
    batch = {"input_ids": ids, "labels": ids}
    batches = [batch] * (MICRO_BATCHES // accelerator.num_processes)

    def step(engine: Engine) -> None:
        train_step(engine, optimizer, batches, max_grad_norm=1.0)

    def milliseconds(action: Callable[[], object]) -> float:
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        action()
        accelerator.wait_for_everyone()
        return 1000 * (time.perf_counter() - start)

    plain_step = partial(step, ReplicatedEngine(Ranks(accelerator), model))
    bitwise_step = partial(step, BitwiseEngine(Ranks(accelerator), model))
    check = partial(check_replicas, Ranks(accelerator), model)
    turns = take_turns(
        {
            "plain": partial(milliseconds, plain_step),
            "bitwise": partial(milliseconds, bitwise_step),
            "check": partial(milliseconds, check),
        },
        rounds=ROUNDS,
        warm_up_rounds=WARM_UP_ROUNDS,
        retries=0,  # all processes have to make the same rounds
    )

    plain = turns["plain"].median
    bitwise = turns["bitwise"].median
    check_share = turns["check"].median / plain
    say("step", f"{plain:.1f} ms; --bitwise {bitwise:.1f} ms, {bitwise / plain:.3f}x")
    say(
        "check",
        f"replicas {turns['check'].median:.2f} ms: {check_share:.2%} of a step, "
        f"{check_share / STEPS_BETWEEN_CHECKS:.4%} if every {STEPS_BETWEEN_CHECKS} steps",
    )


if __name__ == "__main__":
    launch(main)
