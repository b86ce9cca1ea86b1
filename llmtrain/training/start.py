"""The steps of a recipe around its run: the Accelerator, the model in its place, the batches."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from llmtrain.console import say
from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.data.prepare import Tokenized
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.export import ModelFiles
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel import placement
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.layout import Layout
from llmtrain.training.run import Run
from llmtrain.training.settings import AnySettings
from llmtrain.types import ModelBundle

S = TypeVar("S", bound=AnySettings)


def start(s: AnySettings) -> Accelerator:
    """Join the process group and make the Accelerator of a run.

    Raises :class:`UserError` where what was launched is not what was asked for, or where the global batch does not
    divide among the processes.
    """
    accelerator = start_accelerator(s.parallel, s.loop.bitwise)
    say("batch", str(Layout.of(s.data, Ranks(accelerator).data_parallel_size, s.loop.bitwise)))
    return accelerator


def place(
    accelerator: Accelerator,
    build: Callable[[S, Tokenized, str], ModelBundle | nn.Module],
    s: S,
    rows: Tokenized,
) -> ModelBundle:
    """Build a recipe's model and bring it to where it is trained.

    It is sharded over the ranks if the accelerate config asks for it. Otherwise every rank holds the
    whole model on its device.

    Args:
        accelerator: the Accelerator that :func:`start` made.
        build: called with ``s``, ``rows`` and the mixed precision (``no``, ``fp16`` or ``bf16``);
            torch's generator is seeded. It returns the model, or a bundle with all that belongs to it.
        s: the settings of the recipe.
        rows: the rows to train on.
    """
    torch.manual_seed(s.loop.seed)
    bundle = build(s, rows, accelerator.mixed_precision)
    if isinstance(bundle, nn.Module):
        config = {"model_type": type(bundle).__name__.lower()}
        files = ModelFiles(config, rows.tokenizer, rows.facts.dataset)
        bundle = ModelBundle(model=bundle, files=files)
    make_trainable(bundle.model)
    return placement.place(accelerator, bundle)


def loaders(run: Run) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Return the loaders of training and eval batches, for ``accelerator.prepare``.

    Training begins at the run's step. The second loader is ``None`` if there are no eval rows.
    """
    settings = run.settings
    rows = run.rows
    bundle = run.bundle
    pinned = run.accelerator.device.type == "cuda"
    takes_keys = "dropout_keys" in bundle.columns
    batches = train_loader(
        rows.train,
        global_batch_size=settings.data.global_batch_size,
        micro_batch=run.layout.micro_batch,
        steps=range(run.step, settings.optim.max_steps),
        seed=None if rows.in_order else settings.loop.seed,
        dropout_seed=settings.loop.seed if takes_keys else None,
        mixture=rows.mixture,
        prepare=bundle.prepare_batch,
        pinned=pinned,
    )
    if rows.eval is None:
        if settings.loop.eval_steps:
            say("held out", "no rows, so that nothing is evaluated")
        return batches, None

    eval_batches = eval_loader(
        rows.eval,
        run.layout.processes,
        run.layout.micro_batch,
        prepare=bundle.prepare_batch,
        pinned=pinned,
        parts=[*rows.held_out_sources.values()],
    )
    return batches, eval_batches
