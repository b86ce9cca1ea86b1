"""Why not nn.DataParallel: one process cannot drive several GPUs well.

DataParallel is one process with a thread for each GPU. In every forward pass it copies the model to
all GPUs, scatters the batch, and gathers all outputs on the first GPU. In every backward pass it
adds all gradients there. The threads share one interpreter, the first GPU does more work than the
others, and a second machine is out of reach. DDP is one process for each GPU: the model is copied
once, and only gradients travel, while they are computed.
"""

import time

import torch
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import batch, error_of, rows, show, show_measured, small_gpt
from llmtrain.training.train import check_wrapping

PROCESSES = 1


def main() -> None:
    """Show what DataParallel does on this machine, and that llmtrain rejects it."""
    start_accelerator()
    model: nn.DataParallel[nn.Module] = nn.DataParallel(small_gpt())
    gpus = len(model.device_ids)
    plural = "" if gpus == 1 else "s"
    show(f"nn.DataParallel finds {gpus} GPU{plural} here; without a GPU it only calls the model")

    if gpus > 1:
        _time_on_gpus(model)
    elif gpus == 0:
        assert torch.equal(model(**batch(rows(8))), model.module(**batch(rows(8))))
    show(f"llmtrain's loop: {error_of(check_wrapping, model)}")


def _time_on_gpus(model: "nn.DataParallel[nn.Module]") -> None:
    first_gpu = torch.device("cuda", model.device_ids[0])  # the lessons' own device is the CPU
    tokens = batch(rows(512).to(first_gpu))
    for name, module in (("one GPU", model.module.to(first_gpu)), ("DataParallel on all", model)):
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            module(**tokens).sum().backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        show_measured(f"{name}: {1000 * seconds:.1f} ms, forward and backward")
