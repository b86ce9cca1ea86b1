"""Check that a recipe trains the same on another layout, or after it was killed.

The recipe runs several times on this machine, in real processes."""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from llmtrain.commands.trial import ComparedRun, FinishedRun, Trial
from llmtrain.console import pluralize
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe

EXAMPLES = (
    "llmtrain verify layout recipes/gpt.py",
    "llmtrain verify resume recipes/gpt.py",
)

_STEPS = {"layout": 5, "resume": 20}
# A run is killed between two steps, after a checkpoint.
_FEWEST_STEPS = {"layout": 1, "resume": 4}


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
        metavar="P,...",
        help="layout: numbers of processes, to compare with one process that computes row by row. "
        "resume: the processes of the first start, and those of the next start after each kill "
        "(default: the number of processes in the accelerate config, or of GPUs, at least 2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of each run (default: 5 for layout, 20 for resume)",
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
    check_recipe(arguments.recipe)
    check = arguments.check
    steps = _STEPS[check] if arguments.steps is None else arguments.steps
    if steps < _FEWEST_STEPS[check]:
        raise UserError(f"--steps {steps}: verify {check} needs at least {_FEWEST_STEPS[check]}.")

    save_steps = steps if check == "layout" else max(1, steps // 5)
    with tempfile.TemporaryDirectory(prefix="llmtrain-verify-") as scratch:
        trial = Trial(arguments, Path(scratch), steps=steps, save_steps=save_steps)
        result = _verify_layouts(trial) if check == "layout" else _verify_resume(trial, save_steps)

    failures = list(result.failures)
    for comparison in result.comparisons:
        failures += comparison.wrong

    reference = result.reference
    if arguments.json:
        content = {
            "same": not failures,
            "reference": {"layout": reference.name, "digest": reference.digest},
            "others": [comparison._asdict() for comparison in result.comparisons],
            "failures": failures,
            "history": result.history,
        }
        print(json_text(content, indent=1))
    else:
        print("\n".join([*result.history, *_table(result), *failures]))
        print("FAILED: not the same run" if failures else "passed: the same run")
    sys.exit(1 if failures else 0)


class _Result(NamedTuple):
    """The runs of a verification."""

    reference: FinishedRun  # all others are compared with it
    comparisons: list[ComparedRun]
    failures: list[str]  # faults that no comparison shows
    history: list[str]  # lines about the starts and kills


def _table(result: _Result) -> list[str]:
    """Return the lines of a table with the reference and the runs compared with it."""
    head = f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}"
    lines = [head, f"{result.reference.name:<18}{result.reference.digest[:7]:>49}"]
    for run in result.comparisons:
        rows = "same" if run.same_rows else "differ"
        numbers = f"{run.loss:>11.1e}{run.grad_norm:>11.1e}{run.weights:>11.1e}"
        lines.append(f"{run.layout:<18}{rows:>8}{numbers}{run.digest[:7]:>8}")
    return lines


def _verify_layouts(trial: Trial) -> _Result:
    """Run the recipe on each layout, and compare the runs with the reference."""
    outcomes = []
    failures = []
    for i, processes in enumerate(trial.layouts, start=1):
        try:
            outcomes.append(trial.run(processes, str(i)))
        except UserError as error:  # raised below if the reference fails, too
            failures.append(str(error))

    # The reference has other micro-batches than the layouts. With the same ones, a mean of the
    # ranks' means would look right. But with --bitwise, results depend on the micro-batch.
    is_bitwise = any(outcome.has("bitwise") for outcome in outcomes)
    if is_bitwise:
        reference = trial.run(1, "0")
    else:
        reference = trial.run(1, "0", name="1 row at a time", per_device_train_batch_size=1)
    return _Result(
        reference=reference,
        comparisons=[reference.compare(outcome, same_bits=is_bitwise) for outcome in outcomes],
        failures=reference.token_count_faults() + failures,
        history=[],
    )


def _verify_resume(trial: Trial, save_steps: int) -> _Result:
    """Compare a run that is killed and resumed with one that is not."""
    uninterrupted = trial.run(trial.layouts[0], "straight")

    # Each start but the last has an equal share of the steps, and is killed within it, at random,
    # but not before there is a checkpoint to resume from.
    layouts = trial.layouts if len(trial.layouts) > 1 else trial.layouts * 2
    starts = []
    share = trial.steps // len(layouts)
    for i, processes in enumerate(layouts[:-1]):
        end_of_share = trial.steps * (i + 1) // len(layouts)
        earliest = max(save_steps + 1, end_of_share - share, trial.last_step("killed") + 1)
        step = random.SystemRandom().randint(earliest, max(earliest, end_of_share - 1))
        reached = trial.run_and_kill(processes, "killed", step)
        starts.append(f"{pluralize(processes, 'process')}, killed after step {reached}")
    resumed = trial.run(layouts[-1], "killed", name="killed, resumed")
    starts.append(f"{pluralize(layouts[-1], 'process')} to the end, step {trial.steps}")
    history = ["; ".join(starts)]

    failures = [
        f"start {number} began at step 0"
        for number, start in enumerate(resumed.starts, start=1)
        if number > 1 and start["step"] == 0
    ]
    is_bitwise = uninterrupted.has("bitwise")
    is_repeatable = is_bitwise or uninterrupted.starts[0]["device"] == "cpu"
    if not is_repeatable:
        history.append(
            "bits are not compared: on a GPU steps repeat to the last bit only with --bitwise"
        )
    same_bits = is_bitwise or (is_repeatable and len(set(layouts)) == 1)
    return _Result(
        reference=uninterrupted,
        comparisons=[uninterrupted.compare(resumed, same_bits=same_bits)],
        failures=failures,
        history=history,
    )
