"""Short runs of the user's recipe, in real processes, and how ``verify`` compares them with each other."""

import argparse
import itertools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError
from llmtrain.launching.children import (
    command_of,
    gpus,
    read_config,
    run_to_end,
    started,
    why_it_failed,
)
from llmtrain.record.history import History, read_lines
from llmtrain.report.comparison import (
    QUANTITIES,
    Deviation,
    deviation,
    tolerance_of,
    weight_difference,
)
from llmtrain.shipped import shipped_config
from llmtrain.types import Facts

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.005

# The weights themselves are compared, and a sharded run computes their norm in float32 even if it trains in float64.
_NOT_COMPARED = ("initial_weights", "weight_norm")

_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)  # as if Python had started it
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Asked(NamedTuple):
    """A parallel layout as it is written on the command line; ``None`` is left to the recipe."""

    processes: int
    accumulation: int | None = None
    micro_batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Asked":
        """Parse ``2`` or ``2x1x4``. Raises :class:`UserError` for anything else."""
        match = re.fullmatch(r"([1-9]\d*)(?:x(\d+)x(\d+))?", text.strip())
        if match is None:
            raise UserError(
                f"--layouts {text}: write processes, such as 2, or 2x1x4 (processes x accumulation x rows)."
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
    def rows(self) -> int | None:
        """Rows of the global batch, if the layout determines them."""
        if self.accumulation is None or self.micro_batch is None:
            return None
        return self.processes * self.accumulation * self.micro_batch


class Trial:
    """Starts the recipe several times with the same flags, except for the parallel layout and the run folder."""

    def __init__(self, arguments: argparse.Namespace, steps: int, save_steps: int) -> None:
        self.arguments = arguments
        self.steps = steps
        config = read_config(arguments.config_file) if arguments.config_file else {}

        layouts = arguments.layouts or str(max(2, config.get("num_processes", gpus())))
        self.layouts = [Asked.parse(layout) for layout in layouts.split(",")]
        if len({layout.rows for layout in self.layouts}) > 1:
            raise UserError(f"--layouts {layouts}: these are not layouts of one global batch.")

        most_processes = max(layout.processes for layout in self.layouts)
        distributed_type = config.get("distributed_type")
        if most_processes > 1 and distributed_type in ("NO", "MULTI_CPU"):
            raise UserError(
                f"--config_file {arguments.config_file} starts one process, distributed_type being {distributed_type}; "
                f"use {shipped_config('cpu_ddp')} or {shipped_config('multi_gpu')}."
            )

        # If one layout has more processes than there are GPUs, all of them run on the CPU.
        self.on_cpu = not arguments.config_file and most_processes > gpus()
        self.forced: Facts = {
            "max_steps": steps,
            "save_steps": save_steps,
            "logging_steps": 1,
            "log_rows": True,
            "report_to": "none",
            "resume_from_checkpoint": "auto",
        }

    def run(self, layout: Asked, folder: Path, name: str | None = None) -> "Outcome":
        """Start the recipe and wait until it ends. Raises :class:`UserError` with its error message if it fails."""
        try:
            run_to_end(self._command(layout, folder), self.on_cpu)
        except UserError as error:
            raise UserError(f"{layout}: {error}") from None
        return Outcome(name or str(layout), folder, is_float64=self.arguments.float64)

    def run_and_kill(self, layout: Asked, folder: Path, step: int) -> int:
        """Start the recipe, and SIGKILL all its processes when it has reached ``step``.

        Returns the step that it had reached by then. Raises :class:`UserError` if it ends before.
        """
        import psutil  # noqa: F401 - loaded now, so that the kill need not wait for it

        stderr = folder.parent / "killed.err"
        with (
            stderr.open("wb") as file,
            started(self._command(layout, folder), self.on_cpu, file) as process,
        ):
            while last_step(folder) < step:
                if process.poll() is not None:
                    raise UserError(why_it_failed(stderr))
                time.sleep(_POLL_SECONDS)

        reached = last_step(folder)
        if reached >= self.steps:
            raise UserError(
                f"the run ended before it could be killed; use more --steps than {self.steps}."
            )
        return reached

    def _command(self, layout: Asked, folder: Path) -> list[str]:
        recipe = [self.arguments.recipe, *self.arguments.flags]
        if self.arguments.float64:
            script = folder.parent / "in_float64.py"
            script.write_text(_IN_FLOAT64)
            recipe.insert(0, str(script))

        flags: Facts = {}
        if layout.rows is not None:
            flags["global_batch_size"] = layout.rows
        if layout.micro_batch is not None:
            flags["per_device_train_batch_size"] = layout.micro_batch
        flags |= self.forced
        flags["output_dir"] = folder
        return command_of(recipe, flags, layout.processes, self.arguments.config_file)


def last_step(folder: Path) -> int:
    """Return the step of the newest complete line of ``metrics.jsonl``; -1 if there is none."""
    entries = read_lines(folder / "metrics.jsonl")
    return int(entries[-1]["step"]) if entries else -1


class Outcome:
    """A run that has ended: its log, its weights, and a digest of its last checkpoint."""

    def __init__(self, name: str, folder: Path, *, is_float64: bool) -> None:
        self.name = name
        self.history = History.of(folder)
        self.record = self.history.record
        self.precision = "float64" if is_float64 else self.record["starts"][0]["mixed_precision"]
        self.target_tokens = _target_tokens(folder)
        self.weights = _read_weights(folder)
        self.digest = _digest(folder)

    def has(self, setting: str) -> bool:
        """Return whether a switch was on. Not every recipe has every switch."""
        return bool(self.history.settings.get(setting))

    def miscounted(self) -> list[str]:
        """Say at which step the run counted other target tokens than its rows hold.

        A wrong count is the same on every layout, so comparing layouts cannot show it.
        """
        counted = QUANTITIES["target_tokens"].read(self.history)
        for step, tokens in counted.items():
            in_rows = self.target_tokens.get(step, tokens)
            if tokens != in_rows:
                return [
                    f"{self.name}: {tokens} tokens are counted up to step {step}; its rows hold {in_rows}"
                ]
        return []

    def compare(self, other: "Outcome", same_bits: bool) -> "Comparison":
        """Compare another run with this one.

        Args:
            other: The other run, whose precision says what rounding explains.
            same_bits: Whether weights and optimizer must agree to the last bit.
        """
        deviations = {
            key: deviation(quantity, self.history, other.history)
            for key, quantity in QUANTITIES.items()
            if key not in _NOT_COMPARED
        }
        weights = weight_difference(self.weights, other.weights)

        tolerance = tolerance_of(other.precision)
        faults = []
        for key, deviated in deviations.items():
            limit = QUANTITIES[key].limit(tolerance)
            if limit == 0 and deviated.first_step is not None:
                faults.append(
                    f"different {QUANTITIES[key].name} from step {deviated.first_step} on"
                )
            elif deviated.largest > limit:
                faults.append(_above(f"{QUANTITIES[key].name} differs", deviated.largest, limit))
        if not weights <= tolerance.weights:
            faults.append(_above("weights differ", weights, tolerance.weights))
        syncs = other.most_gradient_syncs()
        if syncs > 1 and not other.has("sync_each_batch"):
            faults.append(f"gradients are reduced {syncs} times in a step; once is enough")
        if same_bits and self.digest != other.digest:
            faults.append("other bits of weights or optimizer")

        return Comparison(
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
        return max(
            (entry.get("train/gradient_syncs") or 0 for entry in self.history.readings), default=0
        )


class Comparison(NamedTuple):
    """A run beside the reference: the largest relative differences at any step."""

    layout: str
    same_rows: bool
    loss: float
    grad_norm: float
    weights: float
    digest: str
    wrong: list[str]


def table(reference: Outcome, others: list[Comparison]) -> list[str]:
    """Return the lines of a table that shows runs beside the reference."""
    head = f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}"
    lines = [head, f"{reference.name:<18}{reference.digest[:7]:>49}"]
    for other in others:
        rows = "same" if other.same_rows else "OTHER"
        numbers = f"{other.loss:>11.1e}{other.grad_norm:>11.1e}{other.weights:>11.1e}"
        lines.append(f"{other.layout:<18}{rows:>8}{numbers}{other.digest[:7]:>8}")
    return lines


def _target_tokens(folder: Path) -> dict[int, int]:
    """Return the target tokens up to each step, counted in the rows of ``rows.jsonl``."""
    ledger = {entry["step"]: sum(entry["targets"]) for entry in read_lines(folder / "rows.jsonl")}
    return dict(zip(ledger, itertools.accumulate(ledger.values()), strict=True))


def _read_weights(folder: Path) -> dict[str, "torch.Tensor"]:
    """Return the weights of a run's finished model in float64."""
    import torch

    from llmtrain.record.tensors import read_tensors

    return {name: tensor.to(torch.float64) for name, tensor in read_tensors(folder / "model")}


def _digest(folder: Path) -> str:
    """Return a hash of the weights and the optimizer in a run's last checkpoint."""
    from llmtrain.record.checkpoint import checkpoints, digest_of

    return digest_of(checkpoints(folder / "checkpoints")[-1])


def _largest_loss_deviation(deviations: dict[str, Deviation]) -> float:
    """Return the largest relative difference of a loss: training, eval, or eval bits per byte."""
    return max(
        deviated.largest
        for key, deviated in deviations.items()
        if QUANTITIES[key].rounds_like == "loss"
    )


def _above(text: str, largest: float, limit: float) -> str:
    return f"{text} by {largest:.1e}, more than {limit:.0e}"
