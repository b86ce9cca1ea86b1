"""Check on this machine that a recipe is the same run on another layout, or when it is killed and goes on."""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from llmtrain.commands.trial import Asked, Trial, last_step
from llmtrain.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["layout", "resume"],
        help="layout: one process against others; resume: a run that is killed against one that is not",
    )
    parser.add_argument("recipe", help="the recipe's file; flags that follow are the recipe's")
    parser.add_argument(
        "--layouts",
        metavar="P[xAxM],...",
        help="layout: processes to compare with one that computes row by row; or processes x accumulation x "
        "micro-batch, all to compare with the first. resume: what is started, and started again after each kill "
        "(default: as many processes as the accelerate config says or there are GPUs, or 2)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="updates of each run (layout: 5, resume: 20)")
    parser.add_argument("--config_file", metavar="FILE", help="accelerate config that the layouts are launched with")
    parser.add_argument(
        "--float64", action="store_true", help="compute in float64, where rounding cannot hide a wrong factor"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        failures = {"layout": _layout, "resume": _resume}[arguments.what](arguments, Path(scratch))
    for fault in failures:
        print(fault)
    print("FAILED: not the same run" if failures else "passed: the same run")
    sys.exit(1 if failures else 0)


def _layout(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    steps = arguments.steps or 5
    trial = Trial(arguments, steps, save_steps=steps)
    layouts = trial.layouts
    if layouts[0].micro_batch is None:
        layouts = [Asked(1, None, 1), *layouts]  # other micro-batches too, or a mean of their means would look right
    if len(layouts) < 2:
        raise UserError(f"--layouts {layouts[0]}: name two of them or more; the others are compared with the first.")
    reference = trial.run(layouts[0], scratch / "0")
    if reference.bitwise and layouts[0].accumulation is None:  # which keeps the micro-batch
        reference = trial.run(Asked(1), scratch / "again")
    others, failures = [], reference.miscounted()
    for i, layout in enumerate(layouts[1:], start=1):
        try:
            others.append(trial.run(layout, scratch / f"{i}"))
        except UserError as error:  # it works on the first layout and not on this one
            failures.append(str(error))
    reference.print_headings()
    return failures + [fault for other in others for fault in reference.compare(other, reference.bitwise)]


def _resume(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    steps = arguments.steps or 20
    if steps < 4:
        raise UserError(f"--steps {steps} are too few to be killed among and go on; use 4 or more.")
    save_steps = max(1, steps // 5)
    trial = Trial(arguments, steps, save_steps)
    straight = trial.run(trial.layouts[0], scratch / "straight")
    starts = trial.layouts if len(trial.layouts) > 1 else trial.layouts * 2
    folder = scratch / "killed"
    draw, history = random.SystemRandom(), []
    for i, layout in enumerate(starts[:-1]):
        share = steps * (i + 1) // len(starts)  # each start has its share of the updates, and is killed within it
        # not before there is something to go on from
        first = max(save_steps + 1, share - steps // len(starts), last_step(folder) + 1)
        step = draw.randint(first, max(first, share - 1))
        killed_at = trial.kill_after(trial.begin(layout, folder), folder, step)
        history.append(f"{layout}, killed after update {killed_at}")
    resumed = trial.run(starts[-1], folder)._replace(name="killed, resumed")
    print("; ".join([*history, f"{starts[-1]} to the end, update {steps}"]))
    straight.print_headings()
    began = [start["step"] for start in json.loads((folder / "run.json").read_text())["starts"]]
    lost = [f"start {i + 1} began at step {step}" for i, step in enumerate(began) if i and not step]
    return lost + straight.compare(resumed, same_bits=straight.bitwise or len(set(starts)) == 1)
