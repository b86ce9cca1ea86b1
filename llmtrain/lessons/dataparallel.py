"""Why not nn.DataParallel: one process cannot drive several GPUs well.

DataParallel is one process with a thread a GPU. In every forward pass it copies the model to all GPUs, cuts the batch,
and brings all outputs back to the first; in every backward pass it adds all gradients there. The threads share one
interpreter, the first GPU does more than the others, and a second machine is out of reach. DDP is a process a GPU: the
model is copied once, and only gradients travel, while they are computed.
"""

import time

import torch
from torch import nn

from llmtrain.errors import UserError
from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, measured, rows, show, small_gpt
from llmtrain.training.loop import check_can_train

PROCESSES = 1


def main() -> None:
    accelerator = start_accelerator()
    model = nn.DataParallel(small_gpt())
    show(f"GPUs that nn.DataParallel finds here: {len(model.device_ids)}; without one it only calls the model")
    if not model.device_ids:
        tokens = rows(8)
        assert torch.equal(model(**batch(tokens)), model.module(**batch(tokens)))
    if len(model.device_ids) > 1:
        _measure(model)
    try:
        check_can_train(accelerator, model)
    except UserError as error:
        show(f"llmtrain's loop: {error}")
    else:
        raise AssertionError("the loop would have trained it")


def _measure(model: nn.DataParallel) -> None:
    """The same rows through one GPU and through all, forward and backward."""
    first = torch.device("cuda", model.device_ids[0])  # the lessons' own device is the CPU
    tokens = batch(rows(512).to(first))
    seconds = {}
    for name, module in (("one GPU", model.module.to(first)), ("DataParallel on all", model)):
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            module(**tokens).sum().backward()
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
    measured(", ".join(f"{name}: {1000 * taken:.1f} ms" for name, taken in seconds.items()))
