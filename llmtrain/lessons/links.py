"""Slow links: sending less than the full gradient, and what that costs.

Both ways are approximate by design. Gradients can be rounded to 16 bits (--ddp_comm_hook bf16); a
run with this flag prints at its start that it is approximate. Or every process makes a few steps
with its own rows only, and then all average their weights. That is local SGD, and this lesson
writes it in a few lines of torch.
"""

import contextlib

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    batch,
    prepare,
    rank_rows,
    recording_sent_bytes,
    show,
    small_gpt,
)
from llmtrain.parallel.config import ParallelConfig
from llmtrain.training.step import train_step

PROCESSES = 2
STEPS = 60


def main() -> None:
    """Train the same model with each way to exchange gradients."""
    accelerator = start_accelerator()
    exact = ParallelConfig()
    compressed = ParallelConfig(ddp_comm_hook="bf16")

    _show(accelerator, "full gradients", exact)
    _show(accelerator, "--ddp_comm_hook bf16", compressed)
    _show(accelerator, "local SGD, averaged every 4 steps", exact, local_steps=4)


def _show(
    accelerator: Accelerator, name: str, parallel: ParallelConfig, local_steps: int = 1
) -> None:
    """Train a small model, and print what was sent and the last loss.

    Args:
        accelerator: the Accelerator of this lesson.
        name: what the line is about.
        parallel: how gradients are sent.
        local_steps: steps that every process makes by itself before all average their weights. With
            1, gradients are averaged in every step instead.
    """
    engine, optimizer = prepare(accelerator, small_gpt(), parallel)
    is_local = local_steps > 1

    with recording_sent_bytes(engine) as sent:
        for step in range(STEPS):
            micro_batches = [batch(rank_rows(accelerator, 16, step))]
            with engine.no_sync() if is_local else contextlib.nullcontext():
                result = train_step(engine, optimizer, micro_batches, max_grad_norm=1.0)
            if is_local and (step + 1) % local_steps == 0:
                sent.extend(_average_weights(engine.model))

    kib = sum(sent) / STEPS / 1024
    nll = engine.ranks.sum_over_ranks(result.sums.loss)
    loss = float(nll / result.denominator)  # nats per token
    show(f"{name}: {kib:.0f} KiB per step to add up; loss after {STEPS} steps {loss:.1f}")
    assert loss < 2.5  # from 4.2


def _average_weights(model: nn.Module) -> list[int]:
    """Replace all weights by their mean over the processes.

    Returns:
        The bytes of each tensor that was sent.
    """
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data.div_(dist.get_world_size())
    return [parameter.nbytes for parameter in model.parameters()]
