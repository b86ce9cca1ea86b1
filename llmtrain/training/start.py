"""Functions that recipes call before training: make the Accelerator, the model and the loaders."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from llmtrain.console import pluralize, say
from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.export import ModuleFiles
from llmtrain.models.trainable import make_trainable
from llmtrain.observe.replicas import check_built_weights
from llmtrain.parallel import placement
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.layout import Layout
from llmtrain.training.run import Run
from llmtrain.training.settings import Settings
from llmtrain.training.steps import describe_steps, settle

S = TypeVar("S", bound=Settings)


def start(settings: Settings) -> Accelerator:
    """Join the process group and make the Accelerator of a run.

    Raises:
        UserError: if the launched processes do not fit the settings.
    """
    return start_accelerator(settings.parallel)


def place(
    accelerator: Accelerator,
    build: Callable[[S, Tokenized, str], ModelBundle | nn.Module],
    settings: S,
    rows: Tokenized,
) -> ModelBundle:
    """Build a recipe's model and move it to its device.

    The model is sharded over the ranks if the accelerate config asks for it. Otherwise every rank
    holds the full model.

    Args:
        accelerator: the Accelerator that :func:`start` made.
        build: called with the settings, the rows and the mixed precision (``no``, ``fp16`` or
            ``bf16``), after torch's generator was seeded. It returns a model or a ModelBundle.
        settings: the settings of the recipe.
        rows: the rows to train on.

    Raises:
        UserError: if the global batch cannot be divided among the ranks; if the rows hold several
            documents each, and the model's ``forward`` takes no position ids, by which it could
            keep them apart; or if the warmup is as long as the run.
    """
    settle(settings, rows)
    layout = Layout.of(
        settings.data,
        Ranks(accelerator).world_size,
        bitwise=settings.parallel.bitwise,
    )
    say("batch", _describe_layout(layout, settings))
    say("steps", describe_steps(settings, rows))
    torch.manual_seed(settings.optim.seed)
    bundle = build(settings, rows, accelerator.mixed_precision)
    if isinstance(bundle, nn.Module):
        bundle = ModelBundle(model=bundle)
    if bundle.files is None:
        bundle.files = ModuleFiles.of(bundle.model, rows.tokenizer, rows.metadata.dataset)
    make_trainable(bundle.model)
    if rows.is_packed and not bundle.model.takes_position_ids:
        raise UserError(
            f"{type(bundle.model).__name__}.forward takes no position_ids, which keep the "
            "documents of a row apart; take them, or leave --isolate_documents out."
        )
    check_built_weights(Ranks(accelerator), bundle.model)
    return placement.place(accelerator, bundle)


def _describe_layout(layout: Layout, settings: Settings) -> str:
    """Return the line of the start-up log about the global batch."""
    line = str(layout)
    if settings.data.is_set("per_device_train_batch_size"):
        total = pluralize(layout.global_batch_size, "row")
        line += (
            "; --per_device_train_batch_size limits memory only: the global batch is "
            f"{total} (--global_batch_size)"
        )
    return line


def loaders(run: Run) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Make the loaders of training and eval batches, for ``accelerator.prepare``.

    The training loader starts at the run's step. The eval loader is ``None`` without eval rows.
    """
    settings = run.settings
    rows = run.rows
    bundle = run.bundle
    pin_memory = run.accelerator.device.type == "cuda"
    takes_dropout_keys = "dropout_keys" in bundle.columns

    batches = train_loader(
        rows.train,
        global_batch_size=settings.data.global_batch_size,
        micro_batch=run.layout.micro_batch,
        steps=range(run.step, settings.optim.max_steps),
        seed=None if rows.in_order else settings.optim.seed,
        dropout_seed=settings.optim.seed if takes_dropout_keys else None,
        mixture=rows.mixture,
        prepare=bundle.prepare_batch,
        pinned=pin_memory,
    )
    if rows.eval is None:
        if settings.eval.eval_steps:
            say("eval", "no eval rows, so the run makes no evaluations")
        return batches, None

    eval_batches = eval_loader(
        rows.eval,
        run.layout.processes,
        run.layout.micro_batch,
        prepare=bundle.prepare_batch,
        pinned=pin_memory,
        source_rows=[*rows.eval_sources.values()],
        bitwise=settings.parallel.bitwise,
    )
    return batches, eval_batches
