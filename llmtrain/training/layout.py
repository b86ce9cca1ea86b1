"""How a global batch is computed: processes x micro-batches x rows of a micro-batch."""

from typing import NamedTuple

import torch
from accelerate import Accelerator

from llmtrain.data.config import BatchConfig
from llmtrain.errors import UserError
from llmtrain.launching.accelerator import counted
from llmtrain.types import Facts


class Layout(NamedTuple):
    """How a global batch is computed: ``processes`` x ``accumulation`` micro-batches x ``micro_batch`` rows."""

    processes: int
    accumulation: int
    micro_batch: int

    @property
    def global_batch_size(self) -> int:
        return self.processes * self.accumulation * self.micro_batch

    def bits(self, accelerator: Accelerator) -> Facts:
        """Return what the bits of a ``--bitwise`` run depend on, beside what every run depends on."""
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
        """Derive the accumulation. Raises :class:`UserError` with values that divide, where these do not.

        A micro-batch larger than a rank's share of the rows is that share: a limit of memory, not part of the run.
        """
        rows = data.global_batch_size
        if rows % processes:
            lower = rows // processes * processes
            fits = " or ".join(str(n) for n in (lower, lower + processes) if n)
            raise UserError(
                f"--global_batch_size {rows} does not divide among {processes} processes; {fits} would, "
                f"or --num_processes {max(n for n in range(1, processes + 1) if rows % n == 0)}."
            )
        share = rows // processes
        micro = min(data.per_device_train_batch_size, share)
        if share % micro:
            divisors = [m for m in range(1, share + 1) if share % m == 0]
            near = sorted(sorted(divisors, key=lambda m: abs(m - micro))[:3])
            raise UserError(
                f"--per_device_train_batch_size {micro} does not divide the {share} rows of each process "
                f"({rows} rows on {processes}); {', '.join(map(str, near))} would."
            )
        if bitwise:
            for what, count in (
                ("processes", processes),
                (f"slots of {micro} rows", rows // micro),
            ):
                if count & (count - 1):
                    raise UserError(
                        f"--bitwise adds gradients in a binary tree, for which {count} {what} are not a power of two; "
                        f"{1 << count.bit_length() - 1} or {1 << count.bit_length()} would be."
                    )
            if micro != data.per_device_train_batch_size:
                raise UserError(
                    f"--bitwise keeps the micro-batch on every layout, and {micro} rows a process are fewer than "
                    f"--per_device_train_batch_size {data.per_device_train_batch_size}; set it to {micro} or less."
                )
        return cls(processes, share // micro, micro)

    def __str__(self) -> str:
        processes, batches = (
            counted(self.processes, "process"),
            counted(self.accumulation, "micro-batch"),
        )
        return f"{self.global_batch_size} rows = {processes} x {batches} x {self.micro_batch}"
