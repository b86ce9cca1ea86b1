"""The steps of a recipe around its run: the Accelerator, the model in its place, the batches."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from llmtrain.console import say
from llmtrain.contract import Built, PreparesBatches, TakesColumns
from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.data.rows import Tokenized
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.export import ModelFiles
from llmtrain.parallel import fsdp
from llmtrain.parallel.mesh import data_parallel_size
from llmtrain.training.layout import Layout
from llmtrain.training.run import Run
from llmtrain.training.settings import AnySettings

S = TypeVar("S", bound=AnySettings)


def start(s: AnySettings) -> Accelerator:
    """Join the process group and make the Accelerator of a run.

    Raises :class:`UserError` where what was launched is not what was asked for, or where the global batch does not
    divide among the processes.
    """
    accelerator = start_accelerator(s.parallel, s.loop.bitwise)
    say("batch", str(Layout.of(s.data, data_parallel_size(accelerator), s.loop.bitwise)))
    return accelerator


def place(
    accelerator: Accelerator,
    build: Callable[[S, Tokenized, str], Built | nn.Module],
    s: S,
    rows: Tokenized,
) -> Built:
    """Build a recipe's model and bring it to where it is trained.

    It is spread over the ranks where the accelerate config asks for it, else whole on this rank's device. ``build(s,
    rows, precision)`` finds torch's generator seeded.
    """
    torch.manual_seed(s.loop.seed)
    built = build(s, rows, accelerator.mixed_precision)
    if isinstance(built, nn.Module):
        config = {"model_type": type(built).__name__.lower()}
        built = Built(built, ModelFiles(config, rows.tokenizer, rows.facts.dataset))
    return fsdp.place(accelerator, built)


def loaders(run: Run) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Return the windows to train on, from the run's step on, and those held out, for ``accelerator.prepare``."""
    s, rows, model = run.settings, run.rows, run.built.model
    keyed = isinstance(model, TakesColumns) and "dropout_keys" in model.columns
    prepare = model.prepare if isinstance(model, PreparesBatches) else None
    pinned = run.accelerator.device.type == "cuda"
    windows = s.data.global_batch_size, run.layout.micro_batch, range(run.step, s.optim.max_steps)
    seeds = (
        None if rows.in_order else s.loop.seed,
        s.loop.seed if keyed else None,
    )  # of the order, of dropout
    batches = train_loader(rows.train, *windows, *seeds, rows.mixture, prepare, pinned)
    if rows.eval is None and s.loop.eval_steps:
        say("held out", "no rows, so that nothing is evaluated")
    if rows.eval is None:
        return batches, None
    parts = [*rows.held_out_sources.values()]
    return batches, eval_loader(
        rows.eval, run.layout.processes, run.layout.micro_batch, prepare, pinned, parts
    )
