"""Compare two runs: their final losses, the first step at which they differ, and the cause.

The comparison covers rows, tokens, labels, losses, gradients and weights. The exit status is 0 if
the runs are the same, or differ only by rounding errors on different parallel layouts. It is 1
otherwise.
"""

import argparse
import math
import sys
from typing import NamedTuple

from llmtrain.console import labelled, printable
from llmtrain.errors import UserError
from llmtrain.files import Json, JsonObject, json_text
from llmtrain.lab.differences import Difference, differences, tolerance_between
from llmtrain.record.history import History
from llmtrain.record.tolerances import QUANTITIES, StepDifference, step_differences

EXAMPLES = ("llmtrain diff runs/gpt runs/gpt-2",)


class Divergence(NamedTuple):
    """The first step at which two runs differ in one quantity."""

    quantity: str  # a key of QUANTITIES
    step: int  # 0 is before the first step
    value_a: Json
    value_b: Json
    # The relative difference at the log entry before, if rounding errors may have grown from it.
    grown_from: float | None = None


class RunDifference(NamedTuple):
    """The result of comparing two runs."""

    final_losses: list[JsonObject]  # of those that both runs have logged: the last of each
    first: Divergence | None  # the earliest; of several at the same step, the first in QUANTITIES
    divergences: list[Divergence]  # in the order of QUANTITIES
    suspects: list[Difference]  # what may have caused the first divergence
    hint: str  # where to look if there is no suspect
    others: list[Difference]  # what differs, too, but cannot have caused it
    largest_difference: float  # relative, of all values that are compared
    common_entries: int  # train losses that both runs have logged at the same step


_LABELS = "labels are masked or shifted differently"
_MODEL = (
    "the model or the loss is computed differently: attention, dropout or precision differ, or "
    f"{_LABELS}"
)
# Why a quantity may differ if all that come before it in record/tolerances.py are equal, and so are
# all settings.
_HINTS = {
    "initial_weights": "the weights are initialised or loaded differently",
    "rows": "rows are shuffled, or distributed over the processes, differently",
    "input_tokens": "the text is tokenised differently: the file differs, or a special token is "
    "added twice or is missing; or the rows are in a different order (--log_rows logs it)",
    "labels": _LABELS,
    "target_tokens": f"{_LABELS}, or counted differently",
    "learning_rate": "the learning rate schedule is computed differently",
    "initial_loss": _MODEL,
    "loss": _MODEL,
    "grad_norm": "the gradient is accumulated differently: a mean of micro-batches' means instead "
    "of one mean over all tokens, a missing gradient sync, or a factor of the number of processes",
    "weight_norm": "the optimizer or gradient clipping computes differently",
    "eval_loss": "the eval loss is computed differently",
    "eval_bits_per_byte": "the bytes of the eval text are counted differently",
}
assert [*_HINTS] == [*QUANTITIES]
# Only what affects the data can change these.
_OF_DATA = ("rows", "input_tokens", "labels", "target_tokens")
# They explain nothing if the data are the same.
_NAMES_OF_DATA = ("--dataset", "--eval_dataset", "--tokenizer")
# On different data, these differ even if nothing is wrong.
_NEED_SAME_DATA = ("initial_loss", "eval_loss", "eval_bits_per_byte")

# From one log entry to the next, rounding errors grow by less than this factor.
_LARGEST_GROWTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "llmtrain diff RUN_A RUN_B [--json]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run: a folder or an address")


def run(arguments: argparse.Namespace) -> None:
    if len(arguments.runs) != 2:
        raise UserError(
            "diff compares two runs: llmtrain diff RUN_A RUN_B. For more of them, use llmtrain "
            "runs, llmtrain report or llmtrain compare."
        )
    name_a, name_b = arguments.runs
    difference = diff_runs(History.at(name_a), History.at(name_b))
    first = difference.first
    if arguments.json:
        content = difference._asdict() | {
            "first": None if first is None else first._asdict(),
            "divergences": [divergence._asdict() for divergence in difference.divergences],
            "suspects": list(map(str, difference.suspects)),
            "others": list(map(str, difference.others)),
        }
        print(json_text(content, indent=1))
    else:
        print(printable("\n".join(diff_lines(difference, name_a, name_b))))

    sys.exit(0 if first is None and difference.common_entries > 0 else 1)


# --- the comparison


def diff_runs(run_a: History, run_b: History) -> RunDifference:
    """Compare two runs. They may have been interrupted, and may have different parallel layouts."""
    has_same_data = all(
        run_a.record.get(key) == run_b.record.get(key)
        for key in ("data_sha256", "tokenizer_sha256")
    )
    tolerance = tolerance_between(run_a, run_b)
    compared = {}
    divergences = []
    for key, quantity in QUANTITIES.items():
        if key in _NEED_SAME_DATA and not has_same_data:
            continue
        compared[key] = step_differences(quantity, run_a, run_b)
        divergence = _divergence(key, compared[key], limit=quantity.limit(tolerance))
        if divergence is not None:
            divergences.append(divergence)

    final_losses = []
    for name, key in (("loss", "train/loss"), ("eval loss", "eval/loss")):
        last_a = run_a.last(key)
        last_b = run_b.last(key)
        if last_a and last_b:
            steps = {"step_a": last_a[0], "step_b": last_b[0]}
            values = {"value_a": last_a[1], "value_b": last_b[1]}
            final_losses.append({"name": name, **steps, **values})

    first = min(divergences, key=lambda divergence: divergence.step, default=None)
    listed = differences([run_a, run_b])
    suspects = [] if first is None else _suspects(first, listed, has_same_data)
    relative_differences = [
        step.relative
        for key, steps in compared.items()
        if QUANTITIES[key].rounds_like != "exact"
        for step in steps
    ]
    return RunDifference(
        final_losses=final_losses,
        first=first,
        divergences=divergences,
        suspects=suspects,
        hint="" if first is None else _hint(first, suspects),
        others=[difference for difference in listed if difference not in suspects],
        largest_difference=max(relative_differences, default=0.0),
        common_entries=len(compared["loss"]),
    )


def _divergence(key: str, steps: list[StepDifference], limit: float) -> Divergence | None:
    """Return the first step at which a quantity differs by more than rounding explains."""
    previous = 0.0
    for difference in steps:
        if difference.relative <= limit:
            previous = difference.relative
            continue

        has_grown_slowly = previous > 0 and difference.relative < _LARGEST_GROWTH * previous
        return Divergence(
            quantity=key,
            step=difference.step,
            value_a=difference.first,
            value_b=difference.second,
            grown_from=previous if has_grown_slowly else None,
        )
    return None


def _suspects(first: Divergence, listed: list[Difference], has_same_data: bool) -> list[Difference]:
    """Return the differences that may have caused the first divergence.

    Args:
        first: the first divergence.
        listed: all that is not the same in the two runs.
        has_same_data: whether the data are the same, whatever they are called.
    """
    affecting = ("data",) if first.quantity in _OF_DATA else ("data", "numbers")
    explaining_nothing = _NAMES_OF_DATA if has_same_data else ()
    return [
        difference
        for difference in listed
        if difference.affects in affecting and difference.name not in explaining_nothing
    ]


def _hint(first: Divergence, suspects: list[Difference]) -> str:
    """Return where to look for the cause; empty if there are suspects."""
    if first.grown_from is not None:
        return (
            "rounding errors may have grown: at the log entry before, the runs agree within "
            f"{first.grown_from:.0e}"
        )
    # The code differs between most runs, so that alone explains little.
    is_unexplained = all(suspect.is_code for suspect in suspects)
    return _HINTS[first.quantity] if is_unexplained else ""


# --- text


def diff_lines(difference: RunDifference, name_a: str, name_b: str) -> list[str]:
    """Return the difference of two runs, which have these names, as lines of text."""
    lines = []
    for loss in difference.final_losses:
        change = loss["value_b"] - loss["value_a"]
        step_b = f" at step {loss['step_b']}" if loss["step_b"] != loss["step_a"] else ""
        text = (
            f"{loss['value_a']:.4f} in {name_a} at step {loss['step_a']}, "
            f"{loss['value_b']:.4f} in {name_b}{step_b}"
        )
        if not math.isnan(change):
            text += f": {round(change, 4) + 0.0:+.4f}"  # no negative zero
        lines.append(labelled(loss["name"], text))

    others = [labelled("also", str(other)) for other in difference.others]
    first = difference.first
    if first is not None:
        when = f"at step {first.step}" if first.step > 0 else "before the first step"
        value_a = _format_value(first.value_a)
        value_b = _format_value(first.value_b)
        values = f"{value_a} in {name_a}, {value_b} in {name_b}"
        lines.append(labelled("differs", f"{when}: {QUANTITIES[first.quantity].name}: {values}"))

        later = [item for item in difference.divergences if item != first]
        later.sort(key=lambda divergence: divergence.step)
        names = [f"{QUANTITIES[item.quantity].name} at step {item.step}" for item in later]
        if names:
            lines.append(labelled("then", ", ".join(names)))
        # A single suspect is the cause; with several, we cannot tell.
        label = "cause" if len(difference.suspects) == 1 and not difference.hint else "perhaps"
        lines += [labelled(label, str(suspect)) for suspect in difference.suspects]
        if difference.hint:
            lines.append(labelled("perhaps", difference.hint))
        return lines + others

    if difference.common_entries == 0:
        text = "the runs have no logged step in common: nothing can be compared"
        return [*lines, labelled("unknown", text)]

    agreement = "to the last bit"
    if difference.largest_difference > 0:
        agreement = f"within {difference.largest_difference:.0e}, which rounding explains"
    quantities = f"rows, losses, norms and weights of {difference.common_entries} log entries"
    return [*lines, labelled("same", f"{quantities}, {agreement}"), *others]


def _format_value(value: Json) -> str:
    if isinstance(value, list):
        ellipsis = ", ..." if len(value) > 4 else ""
        return ", ".join(str(item) for item in value[:4]) + ellipsis
    return f"{value:.8g}" if isinstance(value, float) else str(value)
