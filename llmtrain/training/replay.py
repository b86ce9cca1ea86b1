"""The rows of one update, each with its loss."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Facts, Forward, Window
from llmtrain.parallel.mesh import gather_rows

_TOKENS = 64  # of a row that are shown


@torch.no_grad()
def row_losses(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    forward: Forward | None = None,
) -> list[Facts]:
    """Return each row of the global batch with its loss, as the model stands before the update.

    Keys are ``row``, ``targets`` (trained tokens), ``loss`` (their mean, nats) and ``tokens`` (the first). All ranks
    call this. It draws no random numbers that the update would have drawn.
    """
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    compute = forward or accelerator.unwrap_model(model, keep_torch_compile=False)
    with torch.random.fork_rng(devices):
        mine = [
            compute(**{name: column[place : place + 1] for name, column in window.columns.items()})
            for place in range(len(window.rows))
        ]
    ids = window.columns["input_ids"][:, :_TOKENS].contiguous()
    sums = torch.stack([nll.float().reshape(()) for nll in mine])
    columns = [gather_rows(accelerator, column).tolist() for column in (window.rows, window.targets, sums, ids)]
    return [
        {"row": row, "targets": targets, "loss": nll / max(targets, 1), "tokens": tokens}
        for row, targets, nll, tokens in zip(*columns, strict=True)
        if row >= 0
    ]
