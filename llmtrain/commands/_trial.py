"""Short runs of the user's recipe in real processes, which ``verify`` compares."""

import argparse
import itertools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError
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
from llmtrain.record.tolerances import (
    QUANTITIES,
    Deviation,
    deviation,
    tolerance_of,
    weight_difference,
)
from llmtrain.shipped import shipped_config
from llmtrain.types import JsonObject

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.005

# The weights themselves are compared. A sharded run computes their norm in float32 even if it
# trains in float64.
_NOT_COMPARED = ("initial_weights", "weight_norm")

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

    def run(self, layout: RequestedLayout, folder: Path, name: str | None = None) -> "FinishedRun":
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


class FinishedRun:
    """A run that has ended.

    Attributes:
        name: what messages call it.
        history: everything that it has logged.
        record: its ``run.json``.
        precision: the precision in which it computed.
        target_tokens: the target tokens up to each step, as its rows have them.
        weights: the weights of the finished model, in float64.
        digest: a hash of the weights and the optimizer in its last checkpoint.
    """

    def __init__(self, name: str, folder: Path, *, is_float64: bool) -> None:
        self.name = name
        self.history = History.of_run(folder)
        self.record = self.history.record
        self.precision = "float64" if is_float64 else self.record["starts"][0]["mixed_precision"]
        self.target_tokens = _target_tokens(folder)
        self.weights = _read_weights(folder)
        self.digest = _digest(folder)

    def has(self, setting: str) -> bool:
        """Return whether a setting was switched on. Not every recipe has every setting."""
        return bool(self.history.settings.get(setting))

    def token_count_faults(self) -> list[str]:
        """Return the faults of the logged target tokens: one if they are not those of the rows.

        A wrong count is the same on every layout, so comparing layouts cannot show it.
        """
        logged_tokens = QUANTITIES["target_tokens"].read(self.history)
        for step, logged in logged_tokens.items():
            in_rows = self.target_tokens.get(step, logged)
            if logged != in_rows:
                return [
                    f"{self.name}: {logged} target tokens were counted up to step {step}, "
                    f"but its rows have {in_rows}"
                ]
        return []

    def compare(self, other: "FinishedRun", same_bits: bool) -> "ComparedRun":
        """Compare another run with this one.

        Args:
            other: the other run. Its precision determines what rounding can explain.
            same_bits: whether weights, optimizer and eval losses must be the same to the last bit.
        """
        deviations = {
            key: deviation(quantity, self.history, other.history)
            for key, quantity in QUANTITIES.items()
            if key not in _NOT_COMPARED
        }
        weights = weight_difference(self.weights, other.weights)

        faults = _faults(deviations, weights, other.precision)
        syncs = other.most_gradient_syncs()
        if syncs > 1 and not other.has("sync_each_batch"):
            faults.append(f"gradients are reduced {syncs} times in a step; once is enough")
        if same_bits and self.digest != other.digest:
            faults.append("weights or optimizer differ in some bits")
        if same_bits and deviations["eval_loss"].first_step is not None:
            faults.append("eval losses differ in some bits")

        return ComparedRun(
            layout=other.name,
            same_rows=deviations["rows"].first_step is None,
            loss=_largest_loss_deviation(deviations),
            grad_norm=deviations["grad_norm"].largest,
            weights=weights,
            digest=other.digest,
            wrong=[f"{other.name}: {fault}" for fault in faults],
        )

    def most_gradient_syncs(self) -> int:
        """Return how often gradients were reduced in a step, at most."""
        entries = self.history.entries
        return max((entry.get("train/gradient_syncs") or 0 for entry in entries), default=0)


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


def table(reference: FinishedRun, comparisons: list[ComparedRun]) -> list[str]:
    """Return the lines of a table with the reference and the runs compared with it."""
    head = f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}"
    lines = [head, f"{reference.name:<18}{reference.digest[:7]:>49}"]
    for run in comparisons:
        rows = "same" if run.same_rows else "differ"
        numbers = f"{run.loss:>11.1e}{run.grad_norm:>11.1e}{run.weights:>11.1e}"
        lines.append(f"{run.layout:<18}{rows:>8}{numbers}{run.digest[:7]:>8}")
    return lines


def _target_tokens(folder: Path) -> dict[int, int]:
    """Return the target tokens up to each step, counted in the rows of ``rows.jsonl``."""
    ledger = {entry["step"]: sum(entry["targets"]) for entry in read_lines(folder / "rows.jsonl")}
    return dict(zip(ledger, itertools.accumulate(ledger.values()), strict=True))


def _read_weights(folder: Path) -> dict[str, "torch.Tensor"]:
    """Return the weights of a run's finished model in float64."""
    import torch

    from llmtrain.record.tensor_files import read_tensors

    return {name: tensor.to(torch.float64) for name, tensor in read_tensors(folder / "model")}


def _digest(folder: Path) -> str:
    """Return a hash of the weights and the optimizer in a run's last checkpoint."""
    from llmtrain.record.checkpoint import checkpoints, tensors_digest

    return tensors_digest(checkpoints(folder / "checkpoints")[-1])


def _faults(deviations: dict[str, Deviation], weights: float, precision: str) -> list[str]:
    """Return the differences that rounding cannot explain.

    Args:
        deviations: how far the logged quantities are apart.
        weights: the relative difference of the final weights.
        precision: the precision in which the run computed.
    """
    tolerance = tolerance_of(precision)
    faults = []
    for key, deviated in deviations.items():
        name = QUANTITIES[key].name
        limit = QUANTITIES[key].limit(tolerance)
        if limit == 0 and deviated.first_step is not None:
            faults.append(f"different {name} from step {deviated.first_step} on")
        elif deviated.largest > limit:
            faults.append(_above(f"{name} differs", deviated.largest, limit))

    if not weights <= tolerance.weights:  # NaN is a fault, too
        faults.append(_above("weights differ", weights, tolerance.weights))
    return faults


def _largest_loss_deviation(deviations: dict[str, Deviation]) -> float:
    """Return the largest relative difference of a loss: train, eval or bits per byte."""
    return max(
        deviated.largest
        for key, deviated in deviations.items()
        if QUANTITIES[key].rounds_like == "loss"
    )


def _above(text: str, largest: float, limit: float) -> str:
    return f"{text} by {largest:.1e}, more than {limit:.0e}"
