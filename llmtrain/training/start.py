"""Functions that recipes call to start a run: make the Accelerator, the model and the loaders."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from llmtrain.console import check_interrupt, say
from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError, first_line, short_repr
from llmtrain.interfaces.callback import Callback
from llmtrain.interfaces.model import ModelBundle
from llmtrain.interfaces.objective import Objective
from llmtrain.interfaces.part import Metric, MetricFunction, Schedule, ScheduleFunction
from llmtrain.launching.accelerator import start_accelerator, start_planned_accelerator
from llmtrain.models.export import MODULE_CLASS, ModuleFiles
from llmtrain.models.hub_models import cast_weights
from llmtrain.models.trainable import make_trainable
from llmtrain.observe.replicas import check_built_weights
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import ranks_of
from llmtrain.planning import current_plan
from llmtrain.seeds import seed_of
from llmtrain.training.layout import Layout, describe_steps, fit_to_rows
from llmtrain.training.opening import open_run
from llmtrain.training.optim import make_optimizer
from llmtrain.training.recipe_model import PlannedModel, RecipeModel
from llmtrain.training.recomputation import choose_recomputation
from llmtrain.training.run import Run
from llmtrain.training.settings import Settings
from llmtrain.training.train import train

S = TypeVar("S", bound=Settings)
# Builds a model, given the settings, the rows and the mixed precision.
Build: TypeAlias = Callable[[S, Tokenized, str], ModelBundle | nn.Module]
# Makes an optimizer of the parameters of a model, which has been moved to its device.
OptimizerFunction: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]


def start(settings: Settings) -> Accelerator:
    """Join the process group and make the Accelerator of a run.

    Raises:
        UserError: if the launched processes do not fit the settings.
    """
    plan = current_plan()
    if plan is not None:
        planned = {"auto": plan.precision, "fp16": "bf16"}  # which takes the same memory
        requested = settings.parallel.mixed_precision
        if requested == "fp16" and plan.precision == "no":
            raise UserError("--mixed_precision fp16 needs a GPU; plan one with --device.")
        return start_planned_accelerator(planned.get(requested, requested))
    return start_accelerator(settings.parallel)


def place(
    accelerator: Accelerator,
    build: Build[S],
    settings: S,
    rows: Tokenized,
    *,
    objective: Objective | None = None,
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
        objective: the loss to minimise, instead of that of the bundle.

    Raises:
        UserError: if the global batch cannot be divided among the ranks; if the rows hold several
            documents each, and the model's ``forward`` takes no position ids, by which it could
            keep them apart; if the warmup is as long as the run; or if an argument, or what
            ``build`` returns, has the wrong type.
    """
    if not isinstance(rows, Tokenized):
        raise UserError(
            f"rows: {short_repr(rows)} is no llmtrain.Tokenized; make the rows with "
            "llmtrain.tokenize or llmtrain.Tokenized.of."
        )
    check_interrupt()
    fit_to_rows(settings, rows)
    precision = accelerator.mixed_precision
    if current_plan() is not None:
        try:
            with torch.device("meta"):
                bundle = _build_bundle(build, settings, rows, precision, objective)
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"the recipe builds its model from values of weights, and a plan has none: "
                f"{first_line(error)}"
            ) from error
        raise PlannedModel(RecipeModel.of(bundle, settings, precision, rows))

    ranks = ranks_of(accelerator)
    layout = Layout.of(settings.data, ranks.world_size, bitwise=settings.parallel.bitwise)
    batch = str(layout)
    if settings.data.is_set("per_device_train_batch_size"):
        batch += "; --per_device_train_batch_size limits memory only, not the rows of a step"
    say("batch", batch)
    say("steps", describe_steps(settings, rows))
    torch.manual_seed(seed_of(settings.optim.seed, "model"))
    bundle = _build_bundle(build, settings, rows, precision, objective)
    check_built_weights(ranks, bundle.model)
    choose_recomputation(ranks, bundle, settings, layout, rows)
    return move_to_devices(ranks, bundle)


def _build_bundle(
    build: Build[S],
    settings: S,
    rows: Tokenized,
    precision: str,
    objective: Objective | None,
) -> ModelBundle:
    """Build a recipe's model, and complete its bundle; see :func:`place`."""
    if isinstance(build, nn.Module) or not callable(build):
        raise UserError(
            f"build: {short_repr(build)} is not a function; pass a function of the settings, the "
            "rows and the precision that returns the model."
        )
    bundle = build(settings, rows, precision)
    if isinstance(bundle, nn.Module):
        bundle = ModelBundle(model=bundle)
    if not isinstance(bundle, ModelBundle):
        raise UserError(
            f"build returned {short_repr(bundle)}; return a torch module or an "
            "llmtrain.ModelBundle."
        )
    if objective is not None:
        bundle.objective = objective
    if not isinstance(bundle.objective, Objective):
        raise UserError(
            f"objective: {short_repr(bundle.objective)} is no llmtrain.Objective; make it a "
            "subclass, and pass an instance."
        )
    if bundle.files is None:
        config = {MODULE_CLASS: type(bundle.model).__name__}
        bundle.files = ModuleFiles(config, rows.tokenizer, rows.metadata.dataset)
    make_trainable(bundle.model)
    for frozen in bundle.frozen.values():
        frozen.model.requires_grad_(False)
        make_trainable(frozen.model)
        if precision == "bf16":
            cast_weights(frozen.model, torch.bfloat16, with_frozen=True)
    if rows.is_packed and not bundle.model.takes_position_ids:
        raise UserError(
            f"{type(bundle.model).__name__}.forward takes no position_ids, which keep the "
            "documents of a row apart; take them, or leave --isolate_documents out."
        )

    if settings.optim.trained_dtype == "bfloat16":
        if precision == "fp16":
            raise UserError(
                "--dtype bfloat16 does not work with --mixed_precision fp16; add "
                "--mixed_precision bf16 or no."
            )
        # Without autocast, a product takes no inputs of two dtypes, so frozen weights change, too.
        cast_weights(bundle.model, torch.bfloat16, with_frozen=precision == "no")
        bundle.files = bundle.files.trained_in(torch.bfloat16)
    return bundle


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
        window=rows.window,
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

    ``recipes/gpt.py`` makes the same calls one by one; :func:`llmtrain.place` and
    :func:`llmtrain.open_run` document the arguments in detail.

    Args:
        settings: the settings of the recipe.
        rows: the rows to train and evaluate on, made before the process group exists.
        build: a function of the settings, the rows and the mixed precision that builds the model.
        objective: the loss to minimise, instead of that of the bundle.
        optimizer: a function of the model that makes the optimizer, such as ``lambda model:
            torch.optim.SGD(model.parameters(), lr=0.1)``, instead of that of ``--optim``.
        schedule: the learning rates, instead of the warmup and ``--lr_scheduler_type``.
        callbacks: are called around each step.
        metrics: are computed in every evaluation.

    Returns:
        The run, which has ended.

    Raises:
        UserError: if an argument has the wrong type, or if the run cannot be started.
    """
    is_function = callable(optimizer) and not isinstance(optimizer, type)
    if optimizer is not None and not is_function:
        raise UserError(
            f"optimizer: {short_repr(optimizer)} is not a function of the model, which exists only "
            "after it is placed; pass one, such as lambda model: torch.optim.SGD("
            "model.parameters(), lr=0.1)."
        )
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
