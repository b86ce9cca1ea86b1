"""Short runs of a user's own recipe, in real processes, to compare with each other."""

import argparse
import itertools
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.errors import UserError
from llmtrain.launch.children import gpus, kill, launcher_of, read_config, why_it_failed
from llmtrain.record.history import read_lines
from llmtrain.shipped import shipped_config

# What rounding may do in a few updates, relative to the value: loss, gradient norm, weights (L2).
_TOLERANCE = {
    "float64": (1e-12, 1e-12, 1e-12),
    "float32": (1e-5, 1e-4, 1e-5),
    "bf16": (1e-2, 5e-2, 1e-2),
    "fp16": (1e-2, 5e-2, 1e-2),
}
_TRAIN = ("loss", "grad_norm", "learning_rate", "gradient_syncs")
_POLL_SECONDS = 0.005
_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)  # as if Python had started it
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Asked(NamedTuple):
    """A layout as it is written on the command line; what is ``None`` is left to the recipe."""

    processes: int
    accumulation: int | None = None
    micro_batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Asked":
        match = re.fullmatch(r"(\d+)(?:x(\d+)x(\d+))?", text.strip())
        if match is None or int(match[1]) < 1:
            raise UserError(
                f"--layouts {text}: write processes, such as 2, or 2x1x4 (processes x accumulation x rows)."
            )
        return cls(int(match[1]), int(match[2]) if match[2] else None, int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        if self.accumulation is None:
            alone = "1 process" if self.micro_batch is None else "1 row at a time"
            return alone if self.processes == 1 else f"{self.processes} processes"
        return f"{self.processes}x{self.accumulation}x{self.micro_batch}"

    @property
    def rows(self) -> int | None:
        """Of the global batch, where it is said."""
        if self.micro_batch is None or self.accumulation is None:
            return None
        return self.processes * self.accumulation * self.micro_batch

    @property
    def flags(self) -> list[str]:
        sizes = {"global_batch_size": self.rows, "per_device_train_batch_size": self.micro_batch}
        return [word for name, size in sizes.items() if size is not None for word in (f"--{name}", str(size))]


class Trial:
    """Starts the recipe as often as it takes, always with the same flags but for the layout and the folder."""

    def __init__(self, arguments: argparse.Namespace, steps: int, save_steps: int) -> None:
        self.arguments, self.steps = arguments, steps
        self.config = read_config(arguments.config_file) if arguments.config_file else {}
        self.layouts = [Asked.parse(part) for part in (arguments.layouts or str(self._at_hand())).split(",")]
        if len({layout.rows for layout in self.layouts}) > 1:
            raise UserError(f"--layouts {arguments.layouts}: these are not layouts of one global batch.")
        most = max(layout.processes for layout in self.layouts)
        if most > 1 and self.config.get("distributed_type") in ("NO", "MULTI_CPU"):
            raise UserError(
                f"--config_file {arguments.config_file} starts one process, distributed_type being "
                f"{self.config['distributed_type']}; use {shipped_config('cpu_ddp')} or {shipped_config('multi_gpu')}."
            )
        self.on_cpu = not arguments.config_file and most > gpus()  # all layouts, where one needs it
        forced = {"max_steps": steps, "logging_steps": 1, "save_steps": save_steps, "report_to": "none"}
        forced["resume_from_checkpoint"] = "auto"
        self.flags = [word for name, value in forced.items() for word in (f"--{name}", str(value))] + ["--log_rows"]

    def _at_hand(self) -> int:
        return max(2, self.config.get("num_processes", gpus()))

    def begin(self, layout: Asked, folder: Path) -> subprocess.Popen:
        """The recipe's first process, which leads a process group of its own."""
        import psutil  # noqa: F401 - here, so that a kill need not wait for it

        launcher = launcher_of(layout.processes, self.arguments.config_file)
        recipe = [self.arguments.recipe]
        if self.arguments.float64:
            script = folder.parent / "in_float64.py"
            script.write_text(_IN_FLOAT64)
            recipe.insert(0, str(script))
        command = [*launcher, *recipe, *self.arguments.flags, *layout.flags, *self.flags, "--output_dir", str(folder)]
        env = dict(os.environ) | ({"ACCELERATE_USE_CPU": "true"} if self.on_cpu else {})
        with (folder.parent / f"{folder.name}.err").open("wb") as err:
            return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)

    def finish(self, process: subprocess.Popen, layout: Asked, folder: Path) -> "Outcome":
        """Wait for the end. Raises :class:`UserError` with what the recipe said, where it failed."""
        try:
            process.wait()
        finally:
            kill(process)
        if process.returncode:
            raise UserError(f"{layout}: {why_it_failed(folder.parent / f'{folder.name}.err')}")
        return Outcome.read(str(layout), folder, "float64" if self.arguments.float64 else None)

    def run(self, layout: Asked, folder: Path) -> "Outcome":
        return self.finish(self.begin(layout, folder), layout, folder)

    def kill_after(self, process: subprocess.Popen, folder: Path, step: int) -> int:
        """SIGKILL every process of a run that has made ``step`` updates; returns how many it has made by then. Raises
        :class:`UserError` where it ends before."""
        while last_step(folder) < step:
            if process.poll() is not None:
                raise UserError(why_it_failed(folder.parent / f"{folder.name}.err"))
            time.sleep(_POLL_SECONDS)
        kill(process)
        if last_step(folder) >= self.steps:
            raise UserError(f"the run ended before it could be killed; use more --steps than {self.steps}.")
        return last_step(folder)


def last_step(folder: Path) -> int:
    """Of the newest whole line of ``metrics.jsonl``; -1 where there is none."""
    lines = read_lines(folder / "metrics.jsonl")
    return lines[-1]["step"] if lines else -1


class Outcome(NamedTuple):
    """What a run left."""

    name: str
    precision: str
    bitwise: bool
    sync_each_batch: bool
    rows: dict[int, list[int]]
    targets: dict[int, int]  # trained tokens up to each step, by the data's own count
    series: dict[str, dict[int, float]]
    weights: dict[str, Any]
    digest: str

    @classmethod
    def read(cls, name: str, folder: Path, precision: str | None = None) -> "Outcome":
        import torch

        from llmtrain.record.checkpoint import checkpoints, digest_of
        from llmtrain.record.tensors import read_tensors

        lines = read_lines(folder / "metrics.jsonl")
        keys = ("tokens", *(f"train/{key}" for key in _TRAIN), "eval/loss", "eval/bits_per_byte")
        series = {key: {line["step"]: line[key] for line in lines if key in line} for key in keys}
        record = json.loads((folder / "run.json").read_text())
        mixed = record["starts"][0]["mixed_precision"]
        bitwise, each = (bool(record["settings"].get(key, {}).get("value")) for key in ("bitwise", "sync_each_batch"))
        weights = {name: tensor.to(torch.float64) for name, tensor in read_tensors(folder / "model")}
        ledger = read_lines(folder / "rows.jsonl")
        rows = {line["step"]: line["rows"] for line in ledger}
        targets = dict(zip(rows, itertools.accumulate(sum(line["targets"]) for line in ledger), strict=True))
        digest = digest_of(checkpoints(folder / "checkpoints")[-1])
        known = precision or {"no": "float32"}.get(mixed, mixed)
        return cls(name, known, bitwise, each, rows, targets, series, weights, digest)

    def miscounted(self) -> list[str]:
        """Whether the update counted the tokens that its rows hold; a wrong count is the same on every layout."""
        for step, tokens in self.series["tokens"].items():
            if step in self.targets and tokens != self.targets[step]:
                return [
                    f"{self.name}: {tokens} tokens are counted up to step {step}; its rows hold {self.targets[step]}"
                ]
        return []

    def compare(self, other: "Outcome", same_bits: bool) -> "Comparison":
        """What ``other`` has in common with this one, and what is wrong with it."""
        loss_limit, norm_limit, weight_limit = _TOLERANCE[other.precision]
        same_rows = self.rows == other.rows
        deviations = {key: _deviation(self.series[key], other.series[key]) for key in self.series}
        syncs = max(other.series["train/gradient_syncs"].values(), default=0)
        moved = sum(float((other.weights[name] - weight).square().sum()) for name, weight in self.weights.items())
        weights = (moved / sum(float(weight.square().sum()) for weight in self.weights.values())) ** 0.5
        loss = max(deviations[key] for key in ("train/loss", "eval/loss", "eval/bits_per_byte"))
        norm = deviations["train/grad_norm"]
        wrong = []
        if not same_rows:
            step = min(step for step in self.rows if self.rows.get(step) != other.rows.get(step))
            wrong.append(f"{other.name}: other rows from step {step} on")
        for what, value, limit in (
            ("loss differs", loss, loss_limit),
            ("gradient norm differs", norm, norm_limit),
            ("weights differ", weights, weight_limit),
            ("learning rate differs", deviations["train/learning_rate"], 0.0),
            ("token counts differ", deviations["tokens"], 0.0),
        ):
            if not value <= limit:
                wrong.append(f"{other.name}: {what} by {value:.1e}, more than {limit:.0e}")
        if syncs > 1 and not other.sync_each_batch:
            wrong.append(f"{other.name}: gradients are reduced {syncs} times an update, where once is enough")
        if same_bits and self.digest != other.digest:
            wrong.append(f"{other.name}: other bits of weights or optimizer")
        return Comparison(other.name, same_rows, loss, norm, weights, other.digest, wrong)


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
    lines = [
        f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}",
        f"{reference.name:<18}{'':>8}{'':>11}{'':>11}{'':>11}{reference.digest[:7]:>8}",
    ]
    for one in others:
        rows = "same" if one.same_rows else "OTHER"
        numbers = f"{one.loss:>11.1e}{one.grad_norm:>11.1e}{one.weights:>11.1e}"
        lines.append(f"{one.layout:<18}{rows:>8}{numbers}{one.digest[:7]:>8}")
    return lines


def _deviation(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference; infinite where a step is missing on one side."""
    if one.keys() != other.keys():
        return float("inf")
    return max((_relative(value, other[step]) for step, value in one.items()), default=0.0)


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None:  # not finite, for which JSON has no word
        return 0.0 if one is other else float("inf")
    return abs(other - one) / max(abs(one), 1e-30)
