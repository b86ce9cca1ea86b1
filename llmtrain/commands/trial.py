"""The runs of a recipe that ``verify`` starts, and how they differ from one another."""

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, digest
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
from llmtrain.record.history import History, read_lines
from llmtrain.record.tolerances import QUANTITIES, Quantity, step_differences, tolerance_of

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.005

_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
if not sys.flags.safe_path:  # as if Python had started it
    sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# The weights themselves are compared. A sharded run computes their norm in float32 even if it
# trains in float64.
_NOT_COMPARED = ("initial_weights", "weight_norm")


class ComparedRun(NamedTuple):
    """A run, and how it differs from the reference.

    Attributes:
        layout: the name of the run.
        same_rows: whether every step had the same rows.
        loss: the largest relative difference of a loss, at any step.
        grad_norm: the largest relative difference of the gradient norm, at any step.
        weights: the relative difference of the final weights.
        digest: the hash of the run's last checkpoint.
        wrong: the faults, each with the name of the run.
    """

    layout: str
    same_rows: bool
    loss: float
    grad_norm: float
    weights: float
    digest: str
    wrong: list[str]


class Deviation(NamedTuple):
    """How much one quantity differs between two runs.

    Attributes:
        largest: the largest relative difference. Infinite if only one run has logged some step.
        first_step: the first step with a difference, or ``None`` if there is none.
    """

    largest: float
    first_step: int | None


def deviation(quantity: Quantity, first: History, second: History) -> Deviation:
    """Compare two runs that must have logged the same steps."""
    unmatched_steps = quantity.read(first).keys() ^ quantity.read(second).keys()
    compared = step_differences(quantity, first, second)
    steps = [difference.step for difference in compared if difference.relative > 0]
    largest = max((difference.relative for difference in compared), default=0.0)
    return Deviation(
        largest=math.inf if unmatched_steps else largest,
        first_step=min([*unmatched_steps, *steps], default=None),
    )


def weight_difference(
    first: Mapping[str, "torch.Tensor"], second: Mapping[str, "torch.Tensor"]
) -> float:
    """Return the L2 norm of the difference between two models' weights, as a relative number.

    Args:
        first: the first model's weights by name. The difference is relative to their norm.
        second: the second model's weights by name.

    Returns:
        The relative difference; infinite if the names are not the same.
    """
    if first.keys() != second.keys():
        return math.inf

    squared_difference = sum(
        float((second[name] - weight).square().sum()) for name, weight in first.items()
    )
    squared_norm = sum(float(weight.square().sum()) for weight in first.values())
    return float((squared_difference / squared_norm) ** 0.5)


class FinishedRun:
    """A run that has ended.

    Attributes:
        name: what messages call it.
        history: everything that it has logged.
        starts: the starts in its ``run.json``.
        precision: the precision in which it computed.
        weights: the weights of its last checkpoint, in float64. Those of the finished model may be
            rounded to another dtype.
        state_hashes: a hash of each file in its last checkpoint that has weights or a state.
    """

    def __init__(self, name: str, folder: Path, *, is_float64: bool) -> None:
        from llmtrain.record.checkpoint import checkpoints, state_hashes
        from llmtrain.record.tensor_files import read_tensors

        checkpoint = checkpoints(folder / "checkpoints")[-1]
        self.name = name
        self.history = History.of_run(folder)
        self.starts = self.history.record["starts"]
        self.precision = "float64" if is_float64 else self.starts[0]["mixed_precision"]
        self.weights = {name: value.double() for name, value in read_tensors(checkpoint / "model")}
        self.state_hashes = state_hashes(checkpoint)

    @property
    def digest(self) -> str:
        """A hash of the weights and of all states in the last checkpoint."""
        return digest(self.state_hashes)

    def has(self, setting: str) -> bool:
        """Return whether a setting was switched on. Not every recipe has every setting."""
        return bool(self.history.settings.get(setting))

    def token_count_faults(self) -> list[str]:
        """Return the faults of the logged target tokens: one if they are not those of the rows.

        A wrong count is the same on every layout, so comparing layouts cannot show it.
        """
        rows = read_lines(self.history.folder / "rows.jsonl")
        targets = {entry["step"]: sum(entry["targets"]) for entry in rows}
        in_rows = dict(zip(targets, itertools.accumulate(targets.values()), strict=True))
        for step, logged in QUANTITIES["target_tokens"].read(self.history).items():
            if logged != in_rows.get(step, logged):
                return [
                    f"{self.name}: {logged} target tokens were counted up to step {step}, "
                    f"but its rows have {in_rows[step]}"
                ]
        return []

    def compare(self, other: "FinishedRun", same_bits: bool) -> ComparedRun:
        """Compare another run with this one.

        Args:
            other: the other run. Its precision determines what rounding can explain.
            same_bits: whether weights, optimizer, the state of parts and eval losses must be the
                same to the last bit.
        """
        tolerance = tolerance_of(other.precision, other.history.settings)
        deviations = {}
        faults = []
        for key, quantity in QUANTITIES.items():
            if key in _NOT_COMPARED:
                continue
            deviated = deviation(quantity, self.history, other.history)
            deviations[key] = deviated
            limit = quantity.limit(tolerance)
            if limit == 0 and deviated.first_step is not None:
                faults.append(f"different {quantity.name} from step {deviated.first_step} on")
            elif deviated.largest > limit:
                faults.append(
                    f"{quantity.name} differs by {deviated.largest:.1e}, more than {limit:.0e}"
                )

        weights = weight_difference(self.weights, other.weights)
        if not weights <= tolerance.weights:  # NaN is a fault, too
            faults.append(f"weights differ by {weights:.1e}, more than {tolerance.weights:.0e}")
        entries = other.history.entries
        syncs = max((entry.get("train/gradient_syncs") or 0 for entry in entries), default=0)
        if syncs > 1 and not other.has("sync_each_batch"):
            faults.append(f"gradients are reduced {syncs} times in a step; once is enough")
        files = {*self.state_hashes.items()} ^ {*other.state_hashes.items()}
        if same_bits and files:
            names = ", ".join(sorted({name for name, _ in files}))
            faults.append(f"some bits of the last checkpoint differ, in {names}")
        if same_bits and deviations["eval_loss"].first_step is not None:
            faults.append("eval losses differ in some bits")

        losses = [key for key in deviations if QUANTITIES[key].rounds_like == "loss"]
        return ComparedRun(
            layout=other.name,
            same_rows=deviations["rows"].first_step is None,
            loss=max(deviations[key].largest for key in losses),
            grad_norm=deviations["grad_norm"].largest,
            weights=weights,
            digest=other.digest,
            wrong=[f"{other.name}: {fault}" for fault in faults],
        )


class Trial:
    """Starts the recipe several times with the same flags.

    Only the parallel layout and the folder of the run change.

    Args:
        arguments: of the command.
        scratch: a folder for the folders of the runs.
        steps: steps of each run.
        save_steps: steps between two checkpoints.

    Attributes:
        layouts: the numbers of processes that the user names.

    Raises:
        UserError: if they are no numbers.
    """

    def __init__(
        self, arguments: argparse.Namespace, scratch: Path, *, steps: int, save_steps: int
    ) -> None:
        self.arguments = arguments
        self.scratch = scratch
        self.steps = steps
        config = read_accelerate_config(arguments.config_file) if arguments.config_file else {}

        layouts = arguments.layouts or str(max(2, config.get("num_processes", gpu_count())))
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", layouts):
            raise UserError(f"--layouts {layouts}: write numbers of processes, such as 2,4.")
        self.layouts = [int(processes) for processes in layouts.split(",")]

        # If one layout has more processes than there are GPUs, all of them run on the CPU.
        self.on_cpu = has_too_few_gpus(max(self.layouts), arguments.config_file)
        self._forced_flags: JsonObject = short_run_flags(steps, arguments.flags) | {
            "save_steps": save_steps,
            "logging_steps": 1,
            "log_rows": True,
            "resume_from_checkpoint": "auto",
        }

    def run(
        self, processes: int, folder: str, name: str | None = None, **flags: int
    ) -> FinishedRun:
        """Start the recipe on a layout, and wait until it ends.

        Args:
            processes: the number of processes.
            folder: the name of the folder of the run.
            name: what to call the run in messages, if not by its processes.
            flags: further flags of the recipe.

        Raises:
            UserError: if the recipe failed, with its own message.
        """
        name = name or pluralize(processes, "process")
        say("run", f"{name}: {self.steps} steps", sys.stderr)
        try:
            run_command(self._command(processes, folder, **flags), self.on_cpu)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        return FinishedRun(name, self.scratch / folder, is_float64=self.arguments.float64)

    def run_and_kill(self, processes: int, folder: str, step: int) -> int:
        """Start the recipe on a layout, and SIGKILL all its processes when it reaches a step.

        Returns:
            The step that the run had reached by then.

        Raises:
            UserError: if the run ended before it could be killed.
        """
        import psutil  # noqa: F401 - loaded now, so that the kill need not wait for it

        say("run", f"{pluralize(processes, 'process')}: killed after step {step}", sys.stderr)
        command = self._command(processes, folder)
        stderr = self.scratch / "killed.err"
        with stderr.open("wb") as file, start_command(command, self.on_cpu, file) as process:
            while self.last_step(folder) < step:
                if process.poll() is not None:
                    raise UserError(failure_message(stderr))
                time.sleep(_POLL_SECONDS)

        reached = self.last_step(folder)
        if reached >= self.steps:
            raise UserError(f"the run ended before its kill; use more than --steps {self.steps}.")
        return reached

    def last_step(self, folder: str) -> int:
        """Return the step of the last complete line of ``metrics.jsonl``, or -1."""
        entries = read_lines(self.scratch / folder / "metrics.jsonl")
        return int(entries[-1]["step"]) if entries else -1

    def _command(self, processes: int, folder: str, **flags: int) -> list[str]:
        recipe = [self.arguments.recipe, *self.arguments.flags]
        if self.arguments.float64:
            script = self.scratch / "in_float64.py"
            script.write_text(_IN_FLOAT64)
            recipe.insert(0, str(script))

        all_flags = self._forced_flags | {"output_dir": self.scratch / folder} | flags
        return recipe_command(recipe, all_flags, processes, self.arguments.config_file)
