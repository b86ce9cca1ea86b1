"""A whole run in one call, for recipes that need no loop of their own."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError, short_repr
from llmtrain.interfaces.callback import Callback
from llmtrain.interfaces.metric import Metric, MetricFunction
from llmtrain.interfaces.objective import Objective
from llmtrain.interfaces.schedule import Schedule, ScheduleFunction
from llmtrain.training.opening import open_run
from llmtrain.training.optim import make_optimizer
from llmtrain.training.run import Run
from llmtrain.training.start import Build, S, loaders, place, start
from llmtrain.training.train import train

# Makes an optimizer of the parameters of a model, which has been moved to its device.
OptimizerFunction: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]


def fit(
    settings: S,
    rows: Tokenized,
    build: Build[S],
    *,
    objective: Objective | None = None,
    optimizer: OptimizerFunction | None = None,
    schedule: Schedule | ScheduleFunction | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Sequence[Metric | MetricFunction] = (),
) -> Run:
    """Train a model on rows: all that a recipe does after it has made the rows.

    ``recipes/gpt.py`` makes the same calls one by one.

    Args:
        settings: the settings of the recipe.
        rows: the rows to train and evaluate on. They are made before, because they must exist
            before the process group does.
        build: called with the settings, the rows and the mixed precision. It returns a model or a
            ModelBundle; see :func:`llmtrain.place`.
        objective: the loss to minimise, instead of that of the bundle.
        optimizer: a function of the model that makes the optimizer, such as ``lambda model:
            torch.optim.SGD(model.parameters(), lr=0.1)``. By default, it is the one that
            ``--optim`` names.
        schedule: replaces the warmup and ``--lr_scheduler_type``. It is a
            :class:`llmtrain.Schedule`, or a function like its ``share``.
        callbacks: are called around each step.
        metrics: are computed in every evaluation. Each is a :class:`llmtrain.Metric`, or a function
            like its ``compute``.

    Returns:
        The run, which has ended.

    Raises:
        UserError: if an argument has the wrong type, or if the run cannot be started.
    """
    if optimizer is not None:
        _check_function(optimizer)
    accelerator = start(settings)
    # The model is sharded over the processes if the accelerate config asks for it.
    bundle = place(accelerator, build, settings, rows, objective=objective)
    if optimizer is None:
        model_optimizer = make_optimizer(accelerator, bundle.model, settings.optim)
    else:
        model_optimizer = optimizer(bundle.model)

    # This opens the run folder, and chooses the checkpoint to resume from.
    with open_run(
        accelerator,
        settings,
        rows,
        bundle,
        model_optimizer,
        schedule=schedule,
        callbacks=callbacks,
        metrics=metrics,
    ) as run:
        train_batches, eval_batches = loaders(run)
        train(
            run,
            *accelerator.prepare(bundle.model, model_optimizer, train_batches, eval_batches),
        )
    return run


def _check_function(optimizer: object) -> None:
    """Raise :class:`UserError` unless this is a function that makes an optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: this {type(optimizer).__name__} was made too early, because the model "
            "exists only after it is placed; pass a function of the model instead, such as lambda "
            "model: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, type) or not callable(optimizer):
        raise UserError(
            f"optimizer: {short_repr(optimizer)} is no function of the model; pass one, such as "
            "lambda model: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
