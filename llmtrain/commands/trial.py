"""Starts short runs of the user's recipe in real processes, for ``verify``."""

import argparse
import re
import time
from pathlib import Path
from typing import NamedTuple

from llmtrain.commands.finished_run import FinishedRun
from llmtrain.errors import UserError
from llmtrain.json_types import JsonObject
from llmtrain.launching.children import (
    failure_message,
    gpu_count,
    has_too_few_gpus,
    read_accelerate_config,
    recipe_command,
    run_command,
    short_run_flags,
    start_command,
)
from llmtrain.record.history import read_lines
from llmtrain.shipped import shipped_config

_POLL_SECONDS = 0.005

_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
if not sys.flags.safe_path:  # as if Python had started it
    sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class RequestedLayout(NamedTuple):
    """A parallel layout as the user writes it.

    Attributes:
        processes: the number of processes.
        accumulation: micro-batches of a step; ``None`` leaves them to the recipe.
        micro_batch: rows of a micro-batch; ``None`` leaves them to the recipe.
    """

    processes: int
    accumulation: int | None = None
    micro_batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> "RequestedLayout":
        """Parse ``2`` or ``2x1x4``.

        Raises:
            UserError: if the text is neither.
        """
        match = re.fullmatch(r"([1-9]\d*)(?:x(\d+)x(\d+))?", text.strip())
        if match is None:
            raise UserError(
                f"--layouts {text}: write a number of processes, such as 2, or processes x "
                "accumulation x rows, such as 2x1x4."
            )

        processes, accumulation, micro_batch = match.groups()
        if accumulation is None:
            return cls(processes=int(processes))
        return cls(
            processes=int(processes),
            accumulation=int(accumulation),
            micro_batch=int(micro_batch),
        )

    def __str__(self) -> str:
        if self.accumulation is not None:
            return "x".join(str(number) for number in self)
        if self.processes > 1:
            return f"{self.processes} processes"
        return "1 process" if self.micro_batch is None else "1 row at a time"

    @property
    def global_batch(self) -> int | None:
        """Rows of the global batch, if the layout determines them."""
        if self.accumulation is None or self.micro_batch is None:
            return None
        return self.processes * self.accumulation * self.micro_batch


class Trial:
    """Starts the recipe several times with the same flags.

    Only the parallel layout and the folder of the run change.

    Args:
        arguments: of the command ``verify``.
        steps: steps of each run.
        save_steps: steps between two checkpoints.

    Raises:
        UserError: if the layouts do not fit together, or cannot be started.
    """

    def __init__(self, arguments: argparse.Namespace, steps: int, save_steps: int) -> None:
        self.arguments = arguments
        self.steps = steps
        config = read_accelerate_config(arguments.config_file) if arguments.config_file else {}

        layouts = arguments.layouts or str(max(2, config.get("num_processes", gpu_count())))
        self.layouts = [RequestedLayout.parse(layout) for layout in layouts.split(",")]
        if len({layout.global_batch for layout in self.layouts}) > 1:
            raise UserError(
                f"--layouts {layouts}: all layouts must have the same global batch; write only "
                "numbers of processes, or processes x accumulation x rows with equal products."
            )

        most_processes = max(layout.processes for layout in self.layouts)
        distributed_type = config.get("distributed_type")
        if most_processes > 1 and distributed_type in ("NO", "MULTI_CPU"):
            raise UserError(
                f"--config_file {arguments.config_file} starts one process (distributed_type: "
                f"{distributed_type}); use {shipped_config('cpu_ddp')} or "
                f"{shipped_config('multi_gpu')}."
            )

        # If one layout has more processes than there are GPUs, all of them run on the CPU.
        self.on_cpu = has_too_few_gpus(most_processes, arguments.config_file)
        self._forced_flags: JsonObject = short_run_flags(steps) | {
            "save_steps": save_steps,
            "logging_steps": 1,
            "log_rows": True,
            "resume_from_checkpoint": "auto",
        }

    def run(self, layout: RequestedLayout, folder: Path, name: str | None = None) -> FinishedRun:
        """Start the recipe, and wait until it ends.

        Args:
            layout: the layout to start it on.
            folder: the folder of the run.
            name: what to call the run in messages, if not by its layout.

        Raises:
            UserError: if the recipe failed, with its own message.
        """
        try:
            run_command(self._command(layout, folder), self.on_cpu)
        except UserError as error:
            raise UserError(f"{layout}: {error}") from None
        return FinishedRun(name or str(layout), folder, is_float64=self.arguments.float64)

    def run_and_kill(self, layout: RequestedLayout, folder: Path, step: int) -> int:
        """Start the recipe, and SIGKILL all its processes when it reaches a step.

        Args:
            layout: the layout to start it on.
            folder: the folder of the run.
            step: the step after which it is killed.

        Returns:
            The step that the run had reached by then.

        Raises:
            UserError: if the run ended before it could be killed.
        """
        import psutil  # noqa: F401 - loaded now, so that the kill need not wait for it

        command = self._command(layout, folder)
        stderr = folder.parent / "killed.err"
        with stderr.open("wb") as file, start_command(command, self.on_cpu, file) as process:
            while last_step(folder) < step:
                if process.poll() is not None:
                    raise UserError(failure_message(stderr))
                time.sleep(_POLL_SECONDS)

        reached = last_step(folder)
        if reached >= self.steps:
            raise UserError(
                f"the run ended before it could be killed; use more than --steps {self.steps}."
            )
        return reached

    def _command(self, layout: RequestedLayout, folder: Path) -> list[str]:
        """Return the command that starts the recipe on a layout."""
        recipe = [self.arguments.recipe, *self.arguments.flags]
        if self.arguments.float64:
            script = folder.parent / "in_float64.py"
            script.write_text(_IN_FLOAT64)
            recipe.insert(0, str(script))

        flags: JsonObject = {}
        if layout.global_batch is not None:
            flags["global_batch_size"] = layout.global_batch
        if layout.micro_batch is not None:
            flags["per_device_train_batch_size"] = layout.micro_batch
        flags |= self._forced_flags
        flags["output_dir"] = folder
        return recipe_command(recipe, flags, layout.processes, self.arguments.config_file)


def last_step(folder: Path) -> int:
    """Return the step of the last complete line of ``metrics.jsonl``, or -1."""
    entries = read_lines(folder / "metrics.jsonl")
    return int(entries[-1]["step"]) if entries else -1
