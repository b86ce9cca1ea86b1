"""Check on this machine that a recipe is the same run on another layout, or when it is killed and goes on."""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from llmtrain.commands._recipe import own_and_recipes, take_recipe
from llmtrain.commands._trial import Asked, Comparison, Outcome, Trial, last_step, table
from llmtrain.errors import UserError, require
from llmtrain.files import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        "layout: one process against others; resume: a run that is killed against one that is not"
    )
    parser.add_argument("what", choices=["layout", "resume"], help=what)
    take_recipe(parser)
    parser.add_argument(
        "--layouts",
        metavar="P[xAxM],...",
        help="layout: processes to compare with one that computes row by row; or processes x accumulation x "
        "micro-batch, all to compare with the first. resume: what is started, and started again after each kill "
        "(default: as many processes as the accelerate config says or there are GPUs, or 2)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="updates of each run (layout: 5, resume: 20)"
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config that the layouts are launched with"
    )
    parser.add_argument(
        "--float64", action="store_true", help="compute in float64, where no wrong factor can hide"
    )


def run(arguments: argparse.Namespace) -> None:
    own_and_recipes(arguments)
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        found = {"layout": _layout, "resume": _resume}[arguments.what](arguments, Path(scratch))
    failures = found.failed + [fault for other in found.others for fault in other.wrong]
    if arguments.json:
        first = {"layout": found.reference.name, "digest": found.reference.digest}
        others = [other._asdict() for other in found.others]
        facts = {"same": not failures, "reference": first, "others": others, "failures": failures}
        print(json_text({**facts, "history": found.history}, indent=1))
    else:
        result = "FAILED: not the same run" if failures else "passed: the same run"
        print("\n".join([*found.history, *table(found.reference, found.others), *failures, result]))
    sys.exit(1 if failures else 0)


class _Found(NamedTuple):
    reference: Outcome
    others: list[Comparison]
    failed: list[str]  # what is wrong beside what a comparison shows
    history: list[str]


def _layout(arguments: argparse.Namespace, scratch: Path) -> _Found:
    steps = arguments.steps or 5
    trial = Trial(arguments, steps, save_steps=steps)
    layouts = trial.layouts
    if layouts[0].micro_batch is None:
        layouts = [
            Asked(1, None, 1),
            *layouts,
        ]  # other micro-batches too, or a mean of their means would look right
    first, *rest = layouts
    require(
        rest,
        f"--layouts {first}: name two of them or more; the others are compared with the first.",
    )
    reference = trial.run(first, scratch / "0")
    if reference.has("bitwise") and first.accumulation is None:  # which keeps the micro-batch
        reference = trial.run(Asked(1), scratch / "again")
    others, failures = [], reference.miscounted()
    for i, layout in enumerate(rest, start=1):
        try:
            others.append(trial.run(layout, scratch / f"{i}"))
        except UserError as error:  # it works on the first layout and not on this one
            failures.append(str(error))
    return _Found(
        reference,
        [reference.compare(other, reference.has("bitwise")) for other in others],
        failures,
        [],
    )


def _resume(arguments: argparse.Namespace, scratch: Path) -> _Found:
    steps = arguments.steps or 20
    require(steps >= 4, f"--steps {steps} are too few to be killed among and go on; use 4 or more.")
    save_steps = max(1, steps // 5)
    trial = Trial(arguments, steps, save_steps)
    straight = trial.run(trial.layouts[0], scratch / "straight")
    starts = trial.layouts if len(trial.layouts) > 1 else trial.layouts * 2
    folder = scratch / "killed"
    draw, history = random.SystemRandom(), []
    for i, layout in enumerate(starts[:-1]):
        share = (
            steps * (i + 1) // len(starts)
        )  # each start has its share of the updates, and is killed within it
        # not before there is something to go on from
        first = max(save_steps + 1, share - steps // len(starts), last_step(folder) + 1)
        made = trial.run_and_kill(layout, folder, draw.randint(first, max(first, share - 1)))
        history.append(f"{layout}, killed after update {made}")
    resumed = trial.run(starts[-1], folder, name="killed, resumed")
    history = ["; ".join([*history, f"{starts[-1]} to the end, update {steps}"])]
    began = [start["step"] for start in resumed.record["starts"]]
    lost = [f"start {i + 1} began at step {step}" for i, step in enumerate(began) if i and not step]
    repeats = straight.has("bitwise") or straight.record["starts"][0]["device"] == "cpu"
    if not repeats:
        history.append(
            "bits are not compared: on a GPU updates repeat to the last bit with --bitwise alone"
        )
    same_bits = straight.has("bitwise") or (repeats and len(set(starts)) == 1)
    return _Found(straight, [straight.compare(resumed, same_bits)], lost, history)
