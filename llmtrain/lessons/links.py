"""Slow links: sending less than the full gradient, and what that costs.

Both ways are approximate by design, so the recipes offer neither. Gradients can be rounded to 16
bits, by a hook of PyTorch. Or every process makes a few steps with its own rows only, and then all
average their weights. That is local SGD, and this lesson writes it in a few lines of torch.
"""

import contextlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import Training, rank_rows, show, small_gpt

PROCESSES = 2
STEPS = 60


def main() -> None:
    """Train the same model with each way to exchange gradients."""
    accelerator = start_accelerator()
    _show(accelerator, "full gradients")
    _show(accelerator, "gradients in bfloat16", in_bf16=True)
    _show(accelerator, "local SGD, averaged every 4 steps", local_steps=4)


def _show(accelerator: Accelerator, name: str, in_bf16: bool = False, local_steps: int = 1) -> None:
    """Train a small model, and print what was sent and the last loss.

    Args:
        accelerator: the Accelerator of this lesson.
        name: what the line is about.
        in_bf16: send gradients in bfloat16.
        local_steps: steps that every process makes by itself before all average their weights. With
            1, gradients are averaged in every step instead.
    """
    training = Training(accelerator, small_gpt())
    is_local = local_steps > 1

    rank_loss = torch.zeros(())
    with training.recording_sent_bytes(in_bf16) as sent:
        for step in range(STEPS):
            with training.engine.no_sync() if is_local else contextlib.nullcontext():
                rank_loss = training.step(rank_rows(accelerator, 16, step))
            if is_local and (step + 1) % local_steps == 0:
                sent.extend(_average_weights(training.model))

    kib = sum(sent) / STEPS / 1024
    loss = float(accelerator.reduce(rank_loss, reduction="sum"))  # nats per token
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
