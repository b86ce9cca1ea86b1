"""How a global batch is divided among processes, and how many steps a run has."""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from accelerate import Accelerator

from llmtrain.config.flags import configs_of, value_of
from llmtrain.console import pluralize
from llmtrain.data.config import BatchConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.training.settings import OptimConfig, Settings

# The share of a run that its warmup takes if the recipe's own warmup is too long for it.
_WARMUP_SHARE = 0.1


# --- the global batch


class Layout(NamedTuple):
    """The parallel layout of a run: who computes which part of a global batch.

    Attributes:
        processes: the ranks, among which the rows are divided.
        accumulation: micro-batches that each of them computes in a step.
        micro_batch: rows of a micro-batch.
    """

    processes: int
    accumulation: int
    micro_batch: int

    @property
    def global_batch_size(self) -> int:
        """Rows of a step, over all ranks."""
        return self.processes * self.accumulation * self.micro_batch

    def bitwise_fingerprint(self, accelerator: Accelerator) -> JsonObject:
        """Return all that determines the bits of a ``--bitwise`` run, besides its settings."""
        device = accelerator.device.type
        threads = torch.get_num_threads() if device == "cpu" else None
        return {
            "slot": self.micro_batch,
            "device": device,
            "threads": threads,
            "dtype": accelerator.mixed_precision,
        }

    @classmethod
    def of(cls, data: BatchConfig, processes: int, bitwise: bool = False) -> "Layout":
        """Derive the layout from the flags of the batch.

        ``--per_device_train_batch_size`` is an upper limit, to bound memory. If a rank has fewer
        rows than that in a step, they are its micro-batch. If the default does not divide the rows
        of a rank, the largest smaller number that does is taken.

        Args:
            data: the flags.
            processes: the number of ranks.
            bitwise: whether the run has ``--bitwise``.

        Raises:
            UserError: if the numbers do not divide. The message has values that do.
        """
        rows = data.global_batch_size
        if rows % processes:
            raise UserError(
                f"--global_batch_size {rows} cannot be divided among {processes} processes; "
                f"use {-(-rows // processes) * processes}, or "
                f"--num_processes {_largest_divisor(rows, processes)}."
            )

        share = rows // processes
        micro_batch = min(data.per_device_train_batch_size, share)
        divisor = _largest_divisor(share, micro_batch)
        if not bitwise and not data.is_set("per_device_train_batch_size"):
            micro_batch = divisor
        if micro_batch != divisor:
            raise UserError(
                f"--per_device_train_batch_size {micro_batch} does not divide the {share} rows of "
                f"each process ({rows} rows on {pluralize(processes, 'process')}); use {divisor}."
            )
        if bitwise and micro_batch != data.per_device_train_batch_size:
            raise UserError(
                "--bitwise needs micro-batches of --per_device_train_batch_size "
                f"{data.per_device_train_batch_size} rows, but each process has only "
                f"{pluralize(micro_batch, 'row')}; set it to {micro_batch} or less."
            )
        # Gradients are added in a binary tree of processes and micro-batches.
        micro_batches = rows // micro_batch
        are_powers_of_two = processes.bit_count() == 1 and micro_batches.bit_count() == 1
        if bitwise and not are_powers_of_two:
            raise UserError(
                "--bitwise needs powers of two, and a step has "
                f"{pluralize(processes, 'process')} and {pluralize(micro_batches, 'micro-batch')} "
                f"of {pluralize(micro_batch, 'row')}; change --num_processes, --global_batch_size "
                "or --per_device_train_batch_size."
            )
        return cls(processes, share // micro_batch, micro_batch)

    def __str__(self) -> str:
        processes = pluralize(self.processes, "process")
        micro_batches = pluralize(self.accumulation, "micro-batch")
        rows = pluralize(self.micro_batch, "row")
        total = pluralize(self.global_batch_size, "row")
        return f"{total} per step = {processes} x {micro_batches} x {rows}"


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above ``limit``."""
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


# --- the number of steps


def fit_to_rows(settings: Settings, rows: Tokenized) -> None:
    """Turn epochs, tokens and fractions of the run into steps, and choose the default micro-batch.

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
    rounds = value_of(settings, "rounds", default=0)
    if rounds:
        _check_rounds(optim, rows)
        prompts = value_of(settings, "prompts_per_round", default=0)
        steps = rounds * math.ceil(prompts / settings.data.global_batch_size)
        optim.max_steps = min(optim.max_steps, steps) if optim.is_set("max_steps") else steps
    elif optim.deciding_flag == "max_tokens":
        step_tokens = settings.data.global_batch_size * rows.positions
        optim.max_steps = _whole(optim.max_tokens, Fraction(1, step_tokens))
    elif optim.num_train_epochs is not None and optim.deciding_flag == "num_train_epochs":
        optim.max_steps = _whole(optim.num_train_epochs, steps_per_epoch(settings, rows))

    optim.check_warmup()
    most = optim.max_steps - 1
    if optim.warmup_steps < 1 or optim.warmup_steps <= most:
        optim.warmup_steps = min(_steps_of(optim.warmup_steps, optim.max_steps), most)
    else:  # the recipe's own warmup is too long
        steps = min(_steps_of(_WARMUP_SHARE, optim.max_steps), most)
        length = pluralize(optim.max_steps, "step")
        optim.set_default("warmup_steps", steps, f"the run has only {length}")

    settings.log.logging_steps = _steps_of(settings.log.logging_steps, optim.max_steps)
    settings.eval.eval_steps = _steps_of(settings.eval.eval_steps, optim.max_steps)
    settings.run.save_steps = _steps_of(settings.run.save_steps, optim.max_steps)


def _check_rounds(optim: OptimConfig, rows: Tokenized) -> None:
    """Raise :class:`UserError` if ``--rounds`` does not fit the other flags, or the rows."""
    for name in ("num_train_epochs", "max_tokens"):
        if optim.is_set(name):
            raise UserError(
                f"--{name} has no effect with --rounds and --prompts_per_round, which say how long "
                "the run is; leave it out."
            )
    units = {source.audit.unit for source in rows.sources.get("train", ())}
    if units != {"conversation"}:
        raise UserError(
            "--rounds needs prompts to answer, and not all of the data are conversations; name "
            "data sets that are."
        )


def steps_per_epoch(settings: Settings, rows: Tokenized) -> Fraction:
    """Return how many steps an epoch has.

    Usually every row is drawn once per epoch, and the last batch is filled up with empty slots, so
    the number is whole. With a mixture, each data set has epochs of its own. An epoch of the run is
    then as many rows as all data sets hold together, and may end inside a step.
    """
    steps = Fraction(len(rows.train), settings.data.global_batch_size)
    return steps if rows.mixture is not None else Fraction(math.ceil(steps))


def describe_steps(settings: Settings, rows: Tokenized) -> str:
    """Return the line of the start-up log about the length of the run."""
    optim = settings.optim
    epochs = float(optim.max_steps / steps_per_epoch(settings, rows))
    number = f"{epochs:.2g}" if epochs < 1 else f"{epochs:,.2f}".rstrip("0").rstrip(".")
    noun = "epoch" if number == "1" else "epochs"
    line = (
        f"{pluralize(optim.max_steps, 'step')} = {number} {noun} of "
        f"{pluralize(len(rows.train), 'row')}, "
        f"{pluralize(settings.data.global_batch_size, 'row')} per step"
    )
    if optim.deciding_flag == "max_tokens":
        line += f"; --max_tokens {optim.max_tokens:,} at {rows.positions:,} tokens per row"
    elif optim.num_train_epochs is not None and optim.deciding_flag == "max_steps":
        line += f"; --max_steps overrides --num_train_epochs {optim.num_train_epochs:g}"
    return line


def _steps_of(value: float, max_steps: int) -> int:
    """Return a number of steps, given that number or a fraction of the run."""
    return _whole(value, max_steps) if 0 < value < 1 else int(value)


def _whole(share: float, steps: Fraction | int) -> int:
    """Return a share of some steps, rounded up.

    The share counts as the decimal number that the user wrote: the float 0.07 is a little larger,
    and 7 % of 100 steps would become 8.
    """
    return math.ceil(Fraction(str(share)) * steps)
