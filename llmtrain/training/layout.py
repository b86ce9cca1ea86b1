"""How a global batch is computed: processes x micro-batches x rows of a micro-batch."""

from typing import NamedTuple

import torch
from accelerate import Accelerator

from llmtrain.console import pluralize
from llmtrain.data.config import BatchConfig
from llmtrain.errors import UserError
from llmtrain.json_types import JsonObject


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
                f"use {_nearest_multiples(rows, processes)}, or "
                f"--num_processes {_largest_divisor(rows, processes)}."
            )

        share = rows // processes
        micro_batch = min(data.per_device_train_batch_size, share)
        if not bitwise and not data.is_set("per_device_train_batch_size"):
            micro_batch = _largest_divisor(share, micro_batch)
        if share % micro_batch:
            raise UserError(
                f"--per_device_train_batch_size {micro_batch} does not divide the {share} rows of "
                f"each process ({rows} rows on {pluralize(processes, 'process')}); "
                f"use {_nearest_divisors(share, micro_batch)}."
            )

        if bitwise:
            # Gradients are added in a binary tree of processes and micro-batches.
            _check_power_of_two(processes, "processes")
            micro_batches = rows // micro_batch
            _check_power_of_two(micro_batches, f"micro-batches of {pluralize(micro_batch, 'row')}")
            if micro_batch != data.per_device_train_batch_size:
                raise UserError(
                    "--bitwise needs micro-batches of --per_device_train_batch_size "
                    f"{data.per_device_train_batch_size} rows, but each process has only "
                    f"{pluralize(micro_batch, 'row')}; set it to {micro_batch} or less."
                )
        return cls(processes, share // micro_batch, micro_batch)

    def __str__(self) -> str:
        processes = pluralize(self.processes, "process")
        micro_batches = pluralize(self.accumulation, "micro-batch")
        rows = pluralize(self.micro_batch, "row")
        total = pluralize(self.global_batch_size, "row")
        return f"{total} per step = {processes} x {micro_batches} x {rows}"


def _nearest_multiples(rows: int, processes: int) -> str:
    """Return the positive multiples of ``processes`` next to ``rows``, such as ``63 or 66``."""
    lower = rows // processes * processes
    multiples = [multiple for multiple in (lower, lower + processes) if multiple > 0]
    return _alternatives(multiples)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above ``limit``."""
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _nearest_divisors(number: int, target: int) -> str:
    """Return the three divisors of a number nearest to ``target``, such as ``4, 8 or 16``."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    nearest = sorted(divisors, key=lambda divisor: abs(divisor - target))[:3]
    return _alternatives(sorted(nearest))


def _alternatives(numbers: list[int]) -> str:
    """Return numbers in words, such as ``1, 2 or 4``."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _check_power_of_two(count: int, noun: str) -> None:
    """Raise :class:`UserError` if ``count`` is not a power of two."""
    if count & (count - 1):
        lower = 1 << (count.bit_length() - 1)
        raise UserError(
            f"--bitwise works with {lower} or {2 * lower} {noun}, not {count}: their number must "
            "be a power of two."
        )
