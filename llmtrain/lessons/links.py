"""Slow links: sending less than the whole gradient, and what that costs.

All of these are approximate by design, and the banner of a run says so: rounded to 16 bits (--ddp_comm_hook bf16), with
a low rank and the rest owed to the next update (powersgd), or not at all for some updates, after which the weights are
averaged (--sync_every).
"""

from functools import partial
from typing import Any

from accelerate import Accelerator

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, rows, show, small_gpt
from llmtrain.parallel.ddp import DDPConfig, DDPHandler
from llmtrain.parallel.exchange import average
from llmtrain.training.loop import accumulate, train_step
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 2
UPDATES = 60


def main() -> None:
    accelerator = start_accelerator()
    losses = {}
    for name, ddp in (
        ("whole gradients", DDPConfig()),
        ("--ddp_comm_hook bf16", DDPConfig(ddp_comm_hook="bf16")),
        ("--ddp_comm_hook powersgd", DDPConfig(ddp_comm_hook="powersgd")),
        ("--sync_every 4", DDPConfig(sync_every=4)),
    ):
        sent, losses[name] = train(accelerator, ddp)
        show(f"{name}: {sent / 1024:.0f} KiB an update to add up; loss after {UPDATES} updates {losses[name]:.1f}")
    assert max(losses.values()) < 2.5, losses  # from 4.2


def train(accelerator: Accelerator, ddp: DDPConfig) -> tuple[float, float]:
    """Bytes of an update that are added up over the processes, and the last loss."""
    accelerator.ddp_handler = DDPHandler(ddp)
    plain = small_gpt()
    optimizer = make_optimizer(plain, OptimConfig(optim="adamw", learning_rate=3e-3))
    model, optimizer = accelerator.prepare(plain, optimizer)
    sent = 0

    def watch(bucket: Any, send: Any, sent_bytes: int) -> Any:
        nonlocal sent
        sent += sent_bytes
        return send(bucket)

    accelerator.ddp_handler.watch(model, watch)
    agree = partial(accelerator.reduce, reduction="mean")
    alone = ddp.sync_every > 1
    mine = slice(8 * accelerator.process_index, 8 * accelerator.process_index + 8)
    for step in range(UPDATES):
        window = [batch(rows(16, step)[mine])]
        passes = partial(accumulate, reduce="never") if alone else None
        update = train_step(
            accelerator, model, optimizer, window, 1.0, forward_backward=passes, agree=agree if alone else None
        )
        if alone and (step + 1) % ddp.sync_every == 0:
            average(model.parameters())
            sent += sum(p.nbytes for p in model.parameters())
    nll = accelerator.reduce(update.nll, reduction="sum")
    return sent / UPDATES, float(nll / update.tokens)
