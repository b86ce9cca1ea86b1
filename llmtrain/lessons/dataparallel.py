"""Why not nn.DataParallel: one process cannot drive several GPUs well.

DataParallel is one process with a thread a GPU. In every forward pass it copies the model to all GPUs, scatters the
batch, and gathers all outputs on the first; in every backward pass it adds all gradients there. The threads share one
interpreter, the first GPU does more than the others, and a second machine is out of reach. DDP is a process a GPU: the
model is copied once, and only gradients travel, while they are computed.
"""

import time

import torch
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, measured, refusal, rows, show, small_gpt
from llmtrain.training.loop import check_wrapping

PROCESSES = 1


def main() -> None:
    """Show that DataParallel does nothing without a GPU, time it where there are two, and see it refused."""
    accelerator = start_accelerator()
    model: nn.DataParallel[nn.Module] = nn.DataParallel(small_gpt())
    show(
        f"GPUs that nn.DataParallel finds here: {len(model.device_ids)}; without one it only calls the model"
    )
    if len(model.device_ids) > 1:
        _time_on_gpus(model)
    elif not model.device_ids:
        assert torch.equal(model(**batch(rows(8))), model.module(**batch(rows(8))))
    show(f"llmtrain's loop: {refusal(check_wrapping, accelerator, model)}")


def _time_on_gpus(model: "nn.DataParallel[nn.Module]") -> None:
    first = torch.device("cuda", model.device_ids[0])  # the lessons' own device is the CPU
    tokens = batch(rows(512).to(first))
    for name, module in (("one GPU", model.module.to(first)), ("DataParallel on all", model)):
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            module(**tokens).sum().backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        measured(f"{name}: {1000 * seconds:.1f} ms, forward and backward")
