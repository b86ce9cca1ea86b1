"""Check on this machine that a recipe is the same run on another layout, or when it is killed and goes on."""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from llmtrain.commands._recipe import own_and_recipes, take_recipe
from llmtrain.commands._trial import Asked, Comparison, Outcome, Trial, last_step, table
from llmtrain.errors import UserError
from llmtrain.files import json_text

_LAYOUT_STEPS = 5
_RESUME_STEPS = 20
_FEWEST_RESUME_STEPS = 4  # the run is killed between two of them, after a checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["layout", "resume"],
        help="layout: compare one process with other layouts; "
        "resume: compare a run that is killed and resumed with one that is not",
    )
    take_recipe(parser)
    parser.add_argument(
        "--layouts",
        metavar="P[xAxM],...",
        help="layout: numbers of processes to compare with one process that computes row by row; or processes x "
        "accumulation x micro-batch, all of them compared with the first. resume: the layout to start with, and the "
        "one to resume with after each kill (default: as many processes as the accelerate config says or there are "
        "GPUs, or 2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"steps of each run (layout: {_LAYOUT_STEPS}, resume: {_RESUME_STEPS})",
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config that the layouts are launched with"
    )
    parser.add_argument(
        "--float64", action="store_true", help="compute in float64, where no wrong factor can hide"
    )


def run(arguments: argparse.Namespace) -> None:
    own_and_recipes(arguments)
    verified = _layout if arguments.what == "layout" else _resume
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        result = verified(arguments, Path(scratch))

    failures = list(result.failures)
    for comparison in result.comparisons:
        failures += comparison.wrong

    if arguments.json:
        _print_json(result, failures)
    else:
        _print_text(result, failures)
    sys.exit(1 if failures else 0)


class _Result(NamedTuple):
    reference: Outcome
    comparisons: list[Comparison]
    failures: list[str]  # faults that no comparison shows
    history: list[str]  # what was started and killed


def _print_json(result: _Result, failures: list[str]) -> None:
    reference = result.reference
    content = {
        "same": not failures,
        "reference": {"layout": reference.name, "digest": reference.digest},
        "others": [comparison._asdict() for comparison in result.comparisons],
        "failures": failures,
        "history": result.history,
    }
    print(json_text(content, indent=1))


def _print_text(result: _Result, failures: list[str]) -> None:
    verdict = "FAILED: not the same run" if failures else "passed: the same run"
    lines = [
        *result.history,
        *table(result.reference, result.comparisons),
        *failures,
        verdict,
    ]
    print("\n".join(lines))


def _layout(arguments: argparse.Namespace, scratch: Path) -> _Result:
    """Run the recipe on each layout and compare the runs with the first."""
    steps = _LAYOUT_STEPS if arguments.steps is None else arguments.steps
    if steps < 1:
        raise UserError(f"--steps {steps}: a run takes at least one step.")

    trial = Trial(arguments, steps, save_steps=steps)
    layouts = trial.layouts
    if layouts[0].micro_batch is None:
        # The reference takes other micro-batches, too: otherwise a mean of the ranks' means would look right.
        layouts = [Asked(processes=1, micro_batch=1), *layouts]
    first, *others = layouts
    if not others:
        raise UserError(
            f"--layouts {first}: name two layouts or more; the others are compared with the first."
        )

    reference = trial.run(first, scratch / "0")
    is_bitwise = reference.has("bitwise")
    if is_bitwise and first.accumulation is None:
        # With --bitwise the size of a micro-batch belongs to the run, so the reference keeps it.
        reference = trial.run(Asked(processes=1), scratch / "again")

    outcomes = []
    failures = reference.miscounted()
    for i, layout in enumerate(others, start=1):
        try:
            outcomes.append(trial.run(layout, scratch / str(i)))
        except UserError as error:  # the recipe works on the first layout but not on this one
            failures.append(str(error))
    return _Result(
        reference=reference,
        comparisons=[reference.compare(outcome, same_bits=is_bitwise) for outcome in outcomes],
        failures=failures,
        history=[],
    )


def _resume(arguments: argparse.Namespace, scratch: Path) -> _Result:
    """Compare a run that is killed and resumed with one that is not."""
    steps = _RESUME_STEPS if arguments.steps is None else arguments.steps
    if steps < _FEWEST_RESUME_STEPS:
        raise UserError(
            f"--steps {steps} are too few to kill a run between them and resume it; "
            f"use {_FEWEST_RESUME_STEPS} or more."
        )

    save_steps = max(1, steps // 5)
    trial = Trial(arguments, steps, save_steps)
    straight = trial.run(trial.layouts[0], scratch / "straight")

    starts = trial.layouts if len(trial.layouts) > 1 else trial.layouts * 2
    folder = scratch / "killed"
    kills = _run_and_kill(trial, starts, folder, save_steps)
    resumed = trial.run(starts[-1], folder, name="killed, resumed")
    history = ["; ".join([*kills, f"{starts[-1]} to the end, step {steps}"])]

    failures = [
        f"start {number} began at step 0"
        for number, start in enumerate(resumed.record["starts"], start=1)
        if number > 1 and start["step"] == 0
    ]

    is_bitwise = straight.has("bitwise")
    repeats = is_bitwise or straight.record["starts"][0]["device"] == "cpu"
    if not repeats:
        history.append(
            "bits are not compared: on a GPU steps repeat to the last bit only with --bitwise"
        )
    has_one_layout = len(set(starts)) == 1
    same_bits = is_bitwise or (repeats and has_one_layout)
    return _Result(
        reference=straight,
        comparisons=[straight.compare(resumed, same_bits=same_bits)],
        failures=failures,
        history=history,
    )


def _run_and_kill(trial: Trial, starts: list[Asked], folder: Path, save_steps: int) -> list[str]:
    """Start the recipe on all layouts but the last, kill each start at a random step, and say at which.

    Each start has an equal share of the steps and is killed within it, but not before there is a checkpoint to resume
    from.
    """
    random_numbers = random.SystemRandom()
    share = trial.steps // len(starts)
    kills = []
    for i, layout in enumerate(starts[:-1]):
        end_of_share = trial.steps * (i + 1) // len(starts)
        earliest = max(save_steps + 1, end_of_share - share, last_step(folder) + 1)
        latest = max(earliest, end_of_share - 1)
        reached = trial.run_and_kill(layout, folder, random_numbers.randint(earliest, latest))
        kills.append(f"{layout}, killed after step {reached}")
    return kills
