"""Check that a recipe trains the same on another layout, or after it was killed.

The recipe runs several times on this machine, in real processes."""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from llmtrain.commands.finished_run import ComparedRun, FinishedRun, table
from llmtrain.commands.trial import RequestedLayout, Trial, last_step
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.recipe_arguments import add_recipe_arguments, separate_recipe_flags

EXAMPLES = (
    "llmtrain verify layout recipes/gpt.py",
    "llmtrain verify resume recipes/gpt.py",
)

_LAYOUT_STEPS = 5
_RESUME_STEPS = 20
_FEWEST_RESUME_STEPS = 4  # the run is killed between two of them, after a checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "check",
        choices=["layout", "resume"],
        help="layout: compare one process with other layouts; "
        "resume: compare a run that is killed and resumed with one that is not",
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--layouts",
        metavar="P[xAxM],...",
        help="layout: numbers of processes, to compare with one process that computes row by row; "
        "or processes x accumulation x micro-batch, to compare all with the first. "
        "resume: the layout of the first start, and that of the next start after each kill "
        "(default: the number of processes in the accelerate config, or of GPUs, at least 2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"steps of each run (default: {_LAYOUT_STEPS} for layout, {_RESUME_STEPS} for resume)",
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config that launches the recipe"
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compute in float64, so that rounding cannot hide a wrong factor",
    )


def run(arguments: argparse.Namespace) -> None:
    separate_recipe_flags(arguments)
    verify = _verify_layouts if arguments.check == "layout" else _verify_resume
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        result = verify(arguments, Path(scratch))

    failures = list(result.failures)
    for comparison in result.comparisons:
        failures += comparison.wrong

    if arguments.json:
        _print_json(result, failures)
    else:
        _print_text(result, failures)
    sys.exit(1 if failures else 0)


class _Result(NamedTuple):
    """The runs of a verification.

    Attributes:
        reference: the run that all others are compared with.
        comparisons: how the others differ from it.
        failures: faults that no comparison shows.
        history: lines about the starts and kills.
    """

    reference: FinishedRun
    comparisons: list[ComparedRun]
    failures: list[str]
    history: list[str]


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


def _verify_layouts(arguments: argparse.Namespace, scratch: Path) -> _Result:
    """Run the recipe on each layout, and compare the runs with the first."""
    steps = _LAYOUT_STEPS if arguments.steps is None else arguments.steps
    if steps < 1:
        raise UserError(f"--steps {steps}: a run needs at least one step.")

    trial = Trial(arguments, steps, save_steps=steps)
    layouts = trial.layouts
    if layouts[0].micro_batch is None:
        # The reference has other micro-batches than the layouts. With the same ones, a mean of the
        # ranks' means would look right.
        layouts = [RequestedLayout(processes=1, micro_batch=1), *layouts]
    first_layout, *other_layouts = layouts
    if not other_layouts:
        raise UserError(
            f"--layouts {first_layout}: name at least two layouts; all are compared with the first."
        )

    reference = trial.run(first_layout, scratch / "0")
    is_bitwise = reference.has("bitwise")
    if is_bitwise and first_layout.accumulation is None:
        # With --bitwise the results depend on the size of a micro-batch, so the reference keeps it.
        reference = trial.run(RequestedLayout(processes=1), scratch / "again")

    outcomes = []
    failures = reference.token_count_faults()
    for i, layout in enumerate(other_layouts, start=1):
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


def _verify_resume(arguments: argparse.Namespace, scratch: Path) -> _Result:
    """Compare a run that is killed and resumed with one that is not."""
    steps = _RESUME_STEPS if arguments.steps is None else arguments.steps
    if steps < _FEWEST_RESUME_STEPS:
        raise UserError(
            f"--steps {steps} leaves no time to kill and resume a run; "
            f"use at least {_FEWEST_RESUME_STEPS}."
        )

    save_steps = max(1, steps // 5)
    trial = Trial(arguments, steps, save_steps)
    uninterrupted = trial.run(trial.layouts[0], scratch / "straight")

    layouts = trial.layouts if len(trial.layouts) > 1 else trial.layouts * 2
    folder = scratch / "killed"
    kills = _run_and_kill(trial, layouts, folder, save_steps)
    resumed = trial.run(layouts[-1], folder, name="killed, resumed")
    history = ["; ".join([*kills, f"{layouts[-1]} to the end, step {steps}"])]

    failures = [
        f"start {number} began at step 0"
        for number, start in enumerate(resumed.record["starts"], start=1)
        if number > 1 and start["step"] == 0
    ]

    is_bitwise = uninterrupted.has("bitwise")
    is_repeatable = is_bitwise or uninterrupted.record["starts"][0]["device"] == "cpu"
    if not is_repeatable:
        history.append(
            "bits are not compared: on a GPU steps repeat to the last bit only with --bitwise"
        )
    has_one_layout = len(set(layouts)) == 1
    same_bits = is_bitwise or (is_repeatable and has_one_layout)
    return _Result(
        reference=uninterrupted,
        comparisons=[uninterrupted.compare(resumed, same_bits=same_bits)],
        failures=failures,
        history=history,
    )


def _run_and_kill(
    trial: Trial, layouts: list[RequestedLayout], folder: Path, save_steps: int
) -> list[str]:
    """Start the recipe on all layouts but the last, each time until a random step.

    Each start has an equal share of the steps, and is killed within it, but not before there is a
    checkpoint to resume from.

    Args:
        trial: starts the recipe.
        layouts: the layout of each start.
        folder: the folder of the run.
        save_steps: steps between two checkpoints.

    Returns:
        For each start, the step after which it was killed, in words.
    """
    random_numbers = random.SystemRandom()
    share = trial.steps // len(layouts)
    kills = []
    for i, layout in enumerate(layouts[:-1]):
        end_of_share = trial.steps * (i + 1) // len(layouts)
        earliest = max(save_steps + 1, end_of_share - share, last_step(folder) + 1)
        latest = max(earliest, end_of_share - 1)
        reached = trial.run_and_kill(layout, folder, random_numbers.randint(earliest, latest))
        kills.append(f"{layout}, killed after step {reached}")
    return kills
