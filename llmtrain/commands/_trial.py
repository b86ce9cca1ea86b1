"""Short runs of a user's own recipe, in real processes, to compare with each other."""

import argparse
import itertools
import re
import time
from pathlib import Path
from typing import NamedTuple

from llmtrain.contract import Facts
from llmtrain.errors import UserError, require
from llmtrain.launching.children import (
    command_of,
    gpus,
    read_config,
    run_to_end,
    started,
    why_it_failed,
)
from llmtrain.record.history import History, read_lines
from llmtrain.shipped import shipped_config

_TOLERANCE = {  # for rounding in a few updates, relative to the value: loss, gradient norm, weights (L2)
    "float64": (1e-12, 1e-12, 1e-12),
    "float32": (1e-5, 1e-4, 1e-5),
    **dict.fromkeys(("bf16", "fp16"), (1e-2, 5e-2, 1e-2)),
}
_LOSSES = ("train/loss", "eval/loss", "eval/bits_per_byte")
_SERIES = ("tokens", "train/grad_norm", "train/learning_rate", "train/gradient_syncs", *_LOSSES)
_POLL_SECONDS = 0.005
_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)  # as if Python had started it
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Asked(NamedTuple):
    """A layout as it is written on the command line; ``None`` is left to the recipe."""

    processes: int
    accumulation: int | None = None
    micro_batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Asked":
        match = re.fullmatch(r"([1-9]\d*)(?:x(\d+)x(\d+))?", text.strip())
        if match is None:
            raise UserError(
                f"--layouts {text}: write processes, such as 2, or 2x1x4 (processes x accumulation x rows)."
            )
        return cls(*(int(number) if number else None for number in match.groups()))  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.accumulation is not None:
            return "x".join(map(str, self))
        alone = "1 process" if self.micro_batch is None else "1 row at a time"
        return alone if self.processes == 1 else f"{self.processes} processes"

    @property
    def rows(self) -> int | None:
        """Rows of the global batch, where they are said."""
        return (
            self.processes * self.accumulation * (self.micro_batch or 0)
            if self.accumulation is not None
            else None
        )


class Trial:
    """Starts the recipe as often as it takes, always with the same flags but for the layout and the folder."""

    def __init__(self, arguments: argparse.Namespace, steps: int, save_steps: int) -> None:
        self.arguments, self.steps = arguments, steps
        config = read_config(arguments.config_file) if arguments.config_file else {}
        layouts = arguments.layouts or str(max(2, config.get("num_processes", gpus())))
        self.layouts = [Asked.parse(layout) for layout in layouts.split(",")]
        if len({layout.rows for layout in self.layouts}) > 1:
            raise UserError(f"--layouts {layouts}: these are not layouts of one global batch.")
        most, kind = (
            max(layout.processes for layout in self.layouts),
            config.get("distributed_type"),
        )
        if most > 1 and kind in ("NO", "MULTI_CPU"):
            raise UserError(
                f"--config_file {arguments.config_file} starts one process, distributed_type being {kind}; use "
                f"{shipped_config('cpu_ddp')} or {shipped_config('multi_gpu')}."
            )
        self.on_cpu = not arguments.config_file and most > gpus()  # all layouts, where one needs it
        self.forced: Facts = {
            "max_steps": steps,
            "save_steps": save_steps,
            "logging_steps": 1,
            "log_rows": True,
        }
        self.forced |= {"report_to": "none", "resume_from_checkpoint": "auto"}

    def run(self, layout: Asked, folder: Path, name: str | None = None) -> "Outcome":
        """Start the recipe and wait for its end. Raises :class:`UserError` with what it said, where it failed."""
        try:
            run_to_end(self._command(layout, folder), self.on_cpu)
        except UserError as error:
            raise UserError(f"{layout}: {error}") from None
        return Outcome(name or str(layout), folder, self.arguments.float64)

    def run_and_kill(self, layout: Asked, folder: Path, step: int) -> int:
        """Start the recipe, and SIGKILL all its processes when it has made ``step`` updates.

        Returns how many it has made by then. Raises :class:`UserError` where it ends before.
        """
        import psutil  # noqa: F401 - here, so that the kill need not wait for it

        said = folder.parent / "killed.err"
        with (
            said.open("wb") as err,
            started(self._command(layout, folder), self.on_cpu, err) as process,
        ):
            while last_step(folder) < step:
                if process.poll() is not None:
                    raise UserError(why_it_failed(said))
                time.sleep(_POLL_SECONDS)
        made = last_step(folder)
        require(
            made < self.steps,
            f"the run ended before it could be killed; use more --steps than {self.steps}.",
        )
        return made

    def _command(self, layout: Asked, folder: Path) -> list[str]:
        recipe = [self.arguments.recipe, *self.arguments.flags]
        if self.arguments.float64:
            script = folder.parent / "in_float64.py"
            script.write_text(_IN_FLOAT64)
            recipe.insert(0, str(script))
        sizes = {
            "global_batch_size": layout.rows,
            "per_device_train_batch_size": layout.micro_batch,
        }
        forced = {name: size for name, size in sizes.items() if size is not None} | self.forced
        return command_of(
            recipe, forced | {"output_dir": folder}, layout.processes, self.arguments.config_file
        )


def last_step(folder: Path) -> int:
    """Return the step of the newest whole line of ``metrics.jsonl``; -1 where there is none."""
    return next((int(line["step"]) for line in reversed(read_lines(folder / "metrics.jsonl"))), -1)


class Outcome:
    """The files of a run that has ended, as they are compared."""

    def __init__(self, name: str, folder: Path, float64: bool) -> None:
        import torch

        from llmtrain.record.checkpoint import checkpoints, digest_of
        from llmtrain.record.tensors import read_tensors

        self.name = name
        history, ledger = History.of(folder), read_lines(folder / "rows.jsonl")
        self.record, self.settings = history.record, history.settings
        mixed = self.record["starts"][0]["mixed_precision"]
        self.precision: str = "float64" if float64 else {"no": "float32"}.get(mixed, mixed)
        self.rows: dict[int, list[int]] = {line["step"]: line["rows"] for line in ledger}
        counts = itertools.accumulate(sum(line["targets"]) for line in ledger)
        self.targets = dict(
            zip(self.rows, counts, strict=True)
        )  # trained tokens up to each step, by the data's count
        self.series: dict[
            str, dict[int, float | None]
        ] = {  # JSON has no word for a number that is not finite
            key: {line["step"]: line[key] for line in history.readings if key in line}
            for key in _SERIES
        }
        self.weights = {
            name: tensor.to(torch.float64) for name, tensor in read_tensors(folder / "model")
        }
        self.digest = digest_of(checkpoints(folder / "checkpoints")[-1])

    def has(self, setting: str) -> bool:
        """Return whether a switch was on; a recipe need not have it."""
        return bool(self.settings.get(setting))

    def miscounted(self) -> list[str]:
        """Say where the update counted other tokens than its rows hold; a wrong count is the same on every layout."""
        for step, tokens in self.series["tokens"].items():
            if tokens != (held := self.targets.get(step, tokens)):
                return [
                    f"{self.name}: {tokens} tokens are counted up to step {step}; its rows hold {held}"
                ]
        return []

    def compare(self, other: "Outcome", same_bits: bool) -> "Comparison":
        """Compare another run with this one."""
        loss_limit, norm_limit, weight_limit = _TOLERANCE[other.precision]
        deviations = {key: _deviation(self.series[key], other.series[key]) for key in _SERIES}
        syncs = max(
            (syncs or 0 for syncs in other.series["train/gradient_syncs"].values()), default=0
        )
        moved = sum(
            float((other.weights[name] - weight).square().sum())
            for name, weight in self.weights.items()
        )
        weights = (
            moved / sum(float(weight.square().sum()) for weight in self.weights.values())
        ) ** 0.5
        loss, norm = max(deviations[key] for key in _LOSSES), deviations["train/grad_norm"]
        wrong = []
        if self.rows != other.rows:
            step = min(step for step in self.rows if self.rows.get(step) != other.rows.get(step))
            wrong.append(f"other rows from step {step} on")
        limits = {"loss differs": (loss, loss_limit), "gradient norm differs": (norm, norm_limit)}
        limits |= {"weights differ": (weights, weight_limit)}
        limits |= {"learning rate differs": (deviations["train/learning_rate"], 0.0)}
        limits |= {"token counts differ": (deviations["tokens"], 0.0)}
        wrong += [
            f"{what} by {by:.1e}, more than {most:.0e}"
            for what, (by, most) in limits.items()
            if not by <= most
        ]
        if syncs > 1 and not other.has("sync_each_batch"):
            wrong.append(f"gradients are reduced {syncs} times an update, where once is enough")
        if same_bits and self.digest != other.digest:
            wrong.append("other bits of weights or optimizer")
        wrong = [f"{other.name}: {fault}" for fault in wrong]
        return Comparison(
            other.name, self.rows == other.rows, loss, norm, weights, other.digest, wrong
        )


class Comparison(NamedTuple):
    """A run beside the first: the largest relative deviations of any step."""

    layout: str
    same_rows: bool
    loss: float
    grad_norm: float
    weights: float
    digest: str
    wrong: list[str]


def table(reference: Outcome, others: list[Comparison]) -> list[str]:
    """Return the lines that show runs beside the first."""
    head = f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}"
    lines = [head, f"{reference.name:<18}{reference.digest[:7]:>49}"]
    for one in others:
        numbers = f"{one.loss:>11.1e}{one.grad_norm:>11.1e}{one.weights:>11.1e}"
        lines.append(
            f"{one.layout:<18}{'same' if one.same_rows else 'OTHER':>8}{numbers}{one.digest[:7]:>8}"
        )
    return lines


def _deviation(one: dict[int, float | None], other: dict[int, float | None]) -> float:
    """Return the largest relative difference; infinite where a step is missing on one side, or a finite value."""
    if one.keys() != other.keys():
        return float("inf")
    return max((_relative(value, other[step]) for step, value in one.items()), default=0.0)


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(other - one) / max(abs(one), 1e-30)
