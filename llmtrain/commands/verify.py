"""Check on this machine that a recipe is the same run on another layout."""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.errors import UserError, first_line

# What rounding may do in a few updates, relative to the value: loss, gradient norm, weights (L2).
_TOLERANCE = {
    "float64": (1e-12, 1e-12, 1e-12),
    "float32": (1e-5, 1e-4, 1e-5),
    "bf16": (1e-2, 5e-2, 1e-2),
    "fp16": (1e-2, 5e-2, 1e-2),
}

_TRAIN = ("loss", "grad_norm", "learning_rate", "gradient_syncs")

_IN_FLOAT64 = """
import pathlib, runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)  # as if Python had started it
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["layout"], help="layout: one process against others")
    parser.add_argument("recipe", help="the recipe's file; flags that follow are the recipe's")
    parser.add_argument(
        "--layouts",
        metavar="P[xAxM],...",
        help="processes to compare with one that computes row by row; or processes x accumulation x micro-batch, all "
        "to compare with the first (default: as many processes as the accelerate config says or there are GPUs, or 2)",
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="updates of each run (%(default)s)")
    parser.add_argument("--config_file", metavar="FILE", help="accelerate config that the layouts are launched with")
    parser.add_argument(
        "--float64", action="store_true", help="compute in float64, where rounding cannot hide a wrong factor"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    config = _read_config(arguments.config_file) if arguments.config_file else {}
    text = arguments.layouts or str(_processes_at_hand(config))
    layouts = [_Layout.parse(part) for part in text.split(",")]
    if layouts[0].micro_batch is None:
        layouts.insert(0, _Layout(1, None, 1))  # other micro-batches too, or a mean of their means would look right
    if len({layout.rows for layout in layouts}) > 1:
        raise UserError(f"--layouts {text}: these are not layouts of one global batch.")
    if not Path(arguments.recipe).is_file():
        raise UserError(f"{arguments.recipe} is not a file; name a recipe, such as recipes/gpt.py.")
    if len(layouts) < 2:
        raise UserError(f"--layouts {text}: name two of them or more; the others are compared with the first.")
    most = max(layout.processes for layout in layouts)
    if most > 1 and config.get("distributed_type") in ("NO", "MULTI_CPU"):
        raise UserError(
            f"--config_file {arguments.config_file} starts one process, distributed_type being "
            f"{config['distributed_type']}; use accelerate_configs/cpu_ddp.yaml or multi_gpu.yaml."
        )
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        reference = _run(layouts[0], arguments, Path(scratch) / "0", most)
        if reference.bitwise and layouts[0].accumulation is None:  # which keeps the micro-batch
            reference = _run(_Layout(1, None, None), arguments, Path(scratch) / "again", most)
        others, failures = [], []
        for i, layout in enumerate(layouts[1:], start=1):
            try:
                others.append(_run(layout, arguments, Path(scratch) / f"{i}", most))
            except UserError as error:  # it works on the first layout and not on this one
                failures.append(str(error))
        print(f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}")
        print(f"{reference.name:<18}{'':>8}{'':>11}{'':>11}{'':>11}{reference.digest[:7]:>8}")
        failures += _miscounted(reference)
        failures += [fault for other in others for fault in _compare(reference, other)]
    for fault in failures:
        print(fault)
    print("FAILED: not the same run" if failures else f"passed: {len(others)} of {len(others)} are the same run")
    sys.exit(1 if failures else 0)


def _read_config(config_file: str) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(Path(config_file).read_text())
        return config | {"num_processes": int(config["num_processes"])}
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"--config_file {config_file} is no accelerate config: {first_line(error)}") from None


def _processes_at_hand(config: dict[str, Any]) -> int:
    import torch

    return max(2, config.get("num_processes", torch.cuda.device_count()))


class _Layout(NamedTuple):
    processes: int
    accumulation: int | None
    micro_batch: int | None

    @classmethod
    def parse(cls, text: str) -> "_Layout":
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


class _Outcome(NamedTuple):
    name: str
    precision: str
    bitwise: bool
    rows: dict[int, list[int]]
    targets: dict[int, int]  # trained tokens up to each step, by the data's own count
    series: dict[str, dict[int, float]]
    weights: dict[str, Any]
    digest: str


def _run(layout: _Layout, arguments: argparse.Namespace, folder: Path, most: int) -> _Outcome:
    """Start the recipe on ``layout`` and read what it left. All layouts compute on the CPU where one of them has more
    processes (``most``) than there are GPUs."""
    import torch
    from safetensors.torch import load_file

    from llmtrain.record.checkpoint import digest_of

    python = [sys.executable]
    if arguments.config_file:
        launcher = [
            *python,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            arguments.config_file,
        ]
        launcher += ["--num_processes", str(layout.processes)]
    elif layout.processes > 1:
        launcher = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.processes)]
    else:
        launcher = python
    recipe = [arguments.recipe]
    if arguments.float64:
        script = folder.parent / "in_float64.py"
        script.write_text(_IN_FLOAT64)
        recipe.insert(0, str(script))
    forced = {"max_steps": arguments.steps, "output_dir": folder, "logging_steps": 1, "save_steps": arguments.steps}
    flags = [word for name, value in forced.items() for word in (f"--{name}", str(value))]
    flags += ["--report_to", "none", "--resume_from_checkpoint", "never", "--log_rows"]
    command = [*launcher, *recipe, *arguments.flags, *layout.flags, *flags]
    env = dict(os.environ)
    if not arguments.config_file and most > torch.cuda.device_count():
        env["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.findall(r"error: (.*)", done.stderr)
        raise UserError(f"{layout}: {said[0] if said else done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    series = {
        key: {line["step"]: line[key] for line in lines if key in line}
        for key in ("tokens", *(f"train/{k}" for k in _TRAIN), "eval/loss", "eval/bits_per_byte")
    }
    record = json.loads((folder / "run.json").read_text())
    mixed = record["starts"][0]["mixed_precision"]
    precision = "float64" if arguments.float64 else {"no": "float32"}.get(mixed, mixed)
    bitwise = bool(record["settings"].get("bitwise", {}).get("value"))
    weights = {name: tensor.to(torch.float64) for name, tensor in load_file(folder / "model/model.safetensors").items()}
    ledger = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    checkpoint = folder / "checkpoints" / f"step-{arguments.steps:08d}"
    rows = {line["step"]: line["rows"] for line in ledger}
    totals = itertools.accumulate(sum(line["targets"]) for line in ledger)
    targets = dict(zip(rows, totals, strict=True))
    return _Outcome(str(layout), precision, bitwise, rows, targets, series, weights, digest_of(checkpoint))


def _miscounted(run: _Outcome) -> list[str]:
    """Whether the update counted the tokens that its rows hold; a wrong count is the same on every layout."""
    for step, tokens in run.series["tokens"].items():
        if step in run.targets and tokens != run.targets[step]:
            return [f"{run.name}: {tokens:.0f} tokens are counted up to step {step}; its rows hold {run.targets[step]}"]
    return []


def _compare(one: _Outcome, other: _Outcome) -> list[str]:
    """Print a line of the table; return what is wrong with it."""
    loss_limit, norm_limit, weight_limit = _TOLERANCE[other.precision]
    same_rows = one.rows == other.rows
    deviations = {key: _deviation(one.series[key], other.series[key]) for key in one.series}
    syncs = max(other.series["train/gradient_syncs"].values(), default=0)
    moved = sum(float((other.weights[name] - weight).square().sum()) for name, weight in one.weights.items())
    weights = (moved / sum(float(weight.square().sum()) for weight in one.weights.values())) ** 0.5
    loss = max(deviations[key] for key in ("train/loss", "eval/loss", "eval/bits_per_byte"))
    norm = deviations["train/grad_norm"]
    print(
        f"{other.name:<18}{'same' if same_rows else 'OTHER':>8}{loss:>11.1e}{norm:>11.1e}{weights:>11.1e}"
        f"{other.digest[:7]:>8}"
    )
    wrong = []
    if not same_rows:
        step = min(step for step in one.rows if one.rows.get(step) != other.rows.get(step))
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
    if syncs > 1:
        wrong.append(f"{other.name}: gradients are reduced {syncs} times an update, where once is enough")
    if one.bitwise and one.digest != other.digest:
        wrong.append(f"{other.name}: other bits of weights or optimizer")
    return wrong


def _deviation(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference; infinite where a step is missing on one side."""
    if one.keys() != other.keys():
        return float("inf")
    return max((_relative(value, other[step]) for step, value in one.items()), default=0.0)


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None:  # not finite, for which JSON has no word
        return 0.0 if one is other else float("inf")
    return abs(other - one) / max(abs(one), 1e-30)
