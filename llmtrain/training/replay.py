"""The rows of one update, each with its loss."""

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Facts, Forward, MeasuresItself, Window
from llmtrain.parallel.mesh import gather_rows
from llmtrain.training.step import surveyed

_TOKENS = 64  # of a row that are shown


@torch.no_grad()
def row_losses(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    forward: Forward | None = None,
) -> list[Facts]:
    """Return each row of the global batch with its loss, as the model stands before the update.

    Keys are ``row``, ``targets`` (trained tokens), ``loss`` (their mean, nats; or that over what the model counts) and
    ``tokens`` (the first). All ranks call this. It draws no random numbers that the update would have drawn.
    """
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    batches, _ = surveyed(accelerator, model, window.batches, window.targets.sum())
    load = {name: value for name, value in batches[0].items() if name == "load" and isinstance(plain, MeasuresItself)}
    alone = [{name: one[i : i + 1] for name, one in window.columns.items()} for i in range(len(window.rows))]
    with torch.random.fork_rng(devices):
        mine = [(forward or plain)(**row, **load) for row in alone]
    units = torch.stack([plain.units(row) for row in alone]) if isinstance(plain, MeasuresItself) else window.targets
    ids = window.columns["input_ids"][:, :_TOKENS].contiguous()
    sums = torch.stack([nll.float().reshape(()) for nll in mine])
    columns = [gather_rows(accelerator, column).tolist() for column in (window.rows, window.targets, units, sums, ids)]
    return [
        {"row": row, "targets": targets, "loss": nll / max(count, 1), "tokens": tokens}
        for row, targets, count, nll, tokens in zip(*columns, strict=True)
        if row >= 0
    ]
