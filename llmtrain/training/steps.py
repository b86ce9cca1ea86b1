"""Settle what depends on the rows: epochs and fractions become steps, and rows fit in memory."""

import math
from fractions import Fraction

from llmtrain.config.flags import configs_of
from llmtrain.console import pluralize
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.settings import OptimConfig, Settings

# The share of a run that its warmup takes if the recipe's own warmup is too long for it.
_WARMUP_SHARE = 0.1


def settle(settings: Settings, rows: Tokenized) -> None:
    """Settle what depends on the rows: the numbers of steps, and the default micro-batch.

    The settings get the values that :func:`llmtrain.tokenize` has chosen for the rows.
    After this, ``max_steps``, ``warmup_steps``, ``logging_steps``, ``eval_steps`` and
    ``save_steps`` are integers. Calling it again changes nothing.

    Args:
        settings: the settings of the recipe. They get new configs, because the defaults of a recipe
            may be shared by several runs.
        rows: the rows to train on.

    Raises:
        UserError: if the user asked for a warmup that is as long as the run, or if the rows are to
            be drawn both from a mixture and in their stored order.
    """
    if rows.mixture is not None and rows.in_order:
        raise UserError(
            "--mixture draws rows of its data sets at random, but the recipe keeps the stored "
            "order of the rows (in_order); leave one of them out."
        )

    for name, config in configs_of(settings).items():
        setattr(settings, name, config.with_values(rows.decided))
    optim = settings.optim

    settings.data.fit_micro_batch(rows.positions)
    if optim.num_train_epochs is not None and not optim.max_steps_decides:
        optim.max_steps = _whole(optim.num_train_epochs, steps_per_epoch(settings, rows))
    _settle_warmup(optim)
    settings.log.logging_steps = steps_of(settings.log.logging_steps, optim.max_steps)
    settings.eval.eval_steps = steps_of(settings.eval.eval_steps, optim.max_steps)
    settings.run.save_steps = steps_of(settings.run.save_steps, optim.max_steps)


def steps_per_epoch(settings: Settings, rows: Tokenized) -> Fraction:
    """Return how many steps an epoch has.

    Usually every row is drawn once per epoch, and the last batch is filled up with empty slots, so
    the number is whole. With a mixture, each data set has epochs of its own. An epoch of the run is
    then as many rows as all data sets hold together, and may end inside a step.
    """
    row_count = len(rows.train)
    global_batch_size = settings.data.global_batch_size
    if rows.mixture is not None:
        return Fraction(row_count, global_batch_size)
    return Fraction(-(-row_count // global_batch_size))


def describe_steps(settings: Settings, rows: Tokenized) -> str:
    """Return the line of the start-up log about the length of the run."""
    optim = settings.optim
    row_count = len(rows.train)
    epochs = float(optim.max_steps / steps_per_epoch(settings, rows))
    words = [
        f"{pluralize(optim.max_steps, 'step')} = {_plural_epochs(epochs)} of "
        f"{pluralize(row_count, 'row')}, "
        f"{pluralize(settings.data.global_batch_size, 'row')} per step",
        f"{_target_tokens(rows):,} target tokens per epoch",
    ]
    if optim.num_train_epochs is not None and optim.max_steps_decides:
        words.append(f"--max_steps overrides --num_train_epochs {optim.num_train_epochs:g}")
    return "; ".join(words)


def _settle_warmup(optim: OptimConfig) -> None:
    """Replace a fraction by steps, and check that the warmup is shorter than the run.

    Raises:
        UserError: if the user asked for a longer warmup.
    """
    optim.check_warmup()
    most = optim.max_steps - 1
    if optim.warmup_steps < 1:
        optim.warmup_steps = min(steps_of(optim.warmup_steps, optim.max_steps), most)
    elif optim.warmup_steps <= most:
        optim.warmup_steps = int(optim.warmup_steps)
    else:
        steps = min(steps_of(_WARMUP_SHARE, optim.max_steps), most)
        length = pluralize(optim.max_steps, "step")
        optim.set_default("warmup_steps", steps, f"the run has only {length}")


def steps_of(value: float, max_steps: int) -> int:
    """Return a number of steps, given that number or a fraction of the run."""
    return _whole(value, max_steps) if 0 < value < 1 else int(value)


def _whole(share: float, steps: Fraction | int) -> int:
    """Return a share of some steps, rounded up.

    The share counts as the decimal number that the user wrote: the float 0.07 is a little larger,
    and 7 % of 100 steps would become 8.
    """
    return math.ceil(Fraction(str(share)) * steps)


def _target_tokens(rows: Tokenized) -> int:
    """Return the target tokens of an epoch; with a mixture, how many there are on average."""
    metadata = rows.metadata
    if rows.mixture is None:
        return metadata.train_tokens

    tokens_per_period = 0.0
    drawn_rows = rows.mixture.counts
    for drawn, count, targets in zip(
        drawn_rows, metadata.source_rows, metadata.source_targets, strict=True
    ):
        tokens_per_period += drawn * targets / count
    return round(tokens_per_period * len(rows.train) / sum(drawn_rows))


def _plural_epochs(epochs: float) -> str:
    """Return a number of epochs in words, such as ``1 epoch`` or ``0.26 epochs``."""
    number = f"{epochs:.2g}" if epochs < 1 else f"{epochs:,.2f}".rstrip("0").rstrip(".")
    return f"{number} {'epoch' if number == '1' else 'epochs'}"
