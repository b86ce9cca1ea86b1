"""Slow links: sending less than the whole gradient, and what that costs.

All of these are approximate by design, and the banner of a run says so: rounded to 16 bits (--ddp_comm_hook bf16), with
a low rank and the rest owed to the next update (powersgd), or not at all for some updates, after which the weights are
averaged (--sync_every).
"""

from functools import partial

from accelerate import Accelerator

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, count_sent, my_rows, prepare, show, small_gpt
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.exchange import average
from llmtrain.training.step import Accumulation, train_step

PROCESSES = 2
UPDATES = 60


def main() -> None:
    """Train the same model with each exchange."""
    accelerator = start_accelerator()
    for name, parallel in (
        ("whole gradients", ParallelConfig()),
        ("--ddp_comm_hook bf16", ParallelConfig(ddp_comm_hook="bf16")),
        ("--ddp_comm_hook powersgd", ParallelConfig(ddp_comm_hook="powersgd")),
        ("--sync_every 4", ParallelConfig(sync_every=4)),
    ):
        sent, loss = _train(accelerator, parallel)
        show(
            f"{name}: {sent / 1024:.0f} KiB an update to add up; loss after {UPDATES} updates {loss:.1f}"
        )
        assert loss < 2.5  # from 4.2


def _train(accelerator: Accelerator, parallel: ParallelConfig) -> tuple[float, float]:
    """Return the bytes of an update that are added up over the ranks, and the last loss in nats a token."""
    accelerator.ddp_handler = DDPHandler(parallel)
    model, optimizer = prepare(accelerator, small_gpt())
    sent = count_sent(accelerator, model)
    alone = parallel.sync_every > 1
    forward_backward = Accumulation(accelerator, model, reduce="never" if alone else "once")
    agree = partial(accelerator.reduce, reduction="mean") if alone else None
    for step in range(UPDATES):
        window = [batch(my_rows(accelerator, 16, step))]
        update = train_step(
            accelerator, model, optimizer, window, 1.0, forward_backward, agree=agree
        )
        if alone and (step + 1) % parallel.sync_every == 0:
            average(model.parameters())
            sent += [p.nbytes for p in model.parameters()]
    return sum(sent) / UPDATES, float(
        accelerator.reduce(update.nll, reduction="sum") / update.tokens
    )
