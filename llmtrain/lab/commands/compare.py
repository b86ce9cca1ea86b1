"""Tell a gain from noise: compare settings by the eval losses of runs with several seeds.

The runs are grouped by their settings. With the same seed, a run repeats to the last bit on a CPU,
or with --bitwise on a GPU, so the seed is the only noise. Runs of two settings are paired by their
seeds. Each setting is compared with the first: how far apart their mean losses are, with a 95 %
confidence interval and a p-value (Student's paired t-test; Welch's t-test if the seeds do not pair
up), and how many more seeds would decide. The table begins with the lowest mean loss.
"""

import argparse
from typing import TYPE_CHECKING

from llmtrain.console import labelled, pluralize, printable
from llmtrain.files import json_text
from llmtrain.json_types import JsonObject
from llmtrain.lab.commands.seeds import SUGGESTED_SEEDS, repeat_command
from llmtrain.quantities import duration_text

if TYPE_CHECKING:
    from llmtrain.lab.compare import (
        GroupComparison,
        GroupDifference,
        MeasuredGroup,
    )
    from llmtrain.lab.significance import MeanDifference, Sample

EXAMPLES = (
    "llmtrain compare runs",
    "llmtrain compare runs/gpt-seed-0 runs/gpt-seed-1 runs/slow-seed-0 runs/slow-seed-1",
)

_ABSENT = "\N{EN DASH}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a run folder, or a folder that holds runs; the settings of the first run are the "
        "baseline that all others are compared with",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.compare import compare_groups
    from llmtrain.lab.run_groups import find_runs

    comparison = compare_groups(find_runs(arguments.folders))
    if arguments.json:
        print(json_text(comparison_as_json(comparison), indent=1))
        return

    lines = [labelled(remark.label, remark.text) for remark in comparison.remarks]
    lines += group_lines(comparison)
    lines += _difference_lines(comparison)
    lines += _verdict_lines(comparison)
    print(printable("\n".join(lines)))


# --- text


def group_lines(comparison: "GroupComparison") -> list[str]:
    """Return the lines that name each group, and a table with its losses, the best one first."""
    from llmtrain.lab.compare import rank

    groups = rank(comparison.groups)
    if not groups:
        return []

    lines = []
    for group in groups:
        name = f"{group.name}: " if group.name else ""
        lines.append(labelled(group.letter, f"{name}{_folders_text(group)}"))

    target = f"time to {comparison.target_loss:.4f}"
    heads = f"{'seeds':>5}{'final eval loss':>20}{'best eval loss':>20}{target:>20}"
    lines.append(labelled("", heads))
    for group in groups:
        columns = [
            loss_text(group.final),
            loss_text(group.best),
            _seconds_text(group.seconds_to_target),
        ]
        numbers = "".join(f"{column:>20}" for column in columns)
        lines.append(labelled(group.letter, f"{group.final.n:>5}{numbers}"))
    return lines


def loss_text(sample: "Sample") -> str:
    """Return a mean loss and its deviation, such as ``2.9134 ± 0.0123``."""
    if sample.deviation is None:
        return f"{sample.mean:.4f}"
    return f"{sample.mean:.4f} ± {sample.deviation:.4f}"


def _seconds_text(sample: "Sample | None") -> str:
    if sample is None:
        return _ABSENT
    if sample.deviation is None:
        return duration_text(sample.mean)
    return f"{duration_text(sample.mean)} ± {duration_text(sample.deviation)}"


def _folders_text(group: "MeasuredGroup") -> str:
    """Return the names of the run folders; of many, the first and the last."""
    folders = [str(item.run.folder) for item in group.measurements]
    if len(folders) <= 2:
        return ", ".join(folders)
    return f"{folders[0]} ... {folders[-1]}"


def _difference_lines(comparison: "GroupComparison") -> list[str]:
    lines = []
    for difference in comparison.differences:
        if difference.final is None:
            continue
        method = _method_text(difference)
        lines.append(_test_line(difference, "final eval loss", difference.final, method))
        if difference.best is not None and difference.has_other_best:
            lines.append(_test_line(difference, "best eval loss", difference.best, method))
    return lines


def _method_text(difference: "GroupDifference") -> str:
    if difference.paired_seeds:
        return f"paired t-test, {pluralize(len(difference.paired_seeds), 'seed')}"
    return "the seeds do not pair up: Welch's t-test"


def _test_line(
    difference: "GroupDifference", quantity: str, test: "MeanDifference", method: str
) -> str:
    label = f"{difference.second.letter} - {difference.first.letter}"
    interval = f"{_signed(test.low)} to {_signed(test.high)}"
    text = (
        f"{quantity} {_signed(test.difference)}, 95 % interval {interval}, "
        f"p = {test.p:.2g} ({method}); {_decision_text(test)}"
    )
    return labelled(label, text)


def _decision_text(test: "MeanDifference") -> str:
    if test.is_decided:
        return "decided"
    if test.more_seeds is None:
        return "1,000 seeds would not decide it"
    return f"about {pluralize(test.more_seeds, 'more seed')} of each would decide it"


def _signed(number: float) -> str:
    """Return a difference of losses with its sign, with four digits after the point or two."""
    if number == 0:
        return "0"
    return f"{number:+.4f}" if abs(number) >= 0.001 else f"{number:+.1e}"


def _verdict_lines(comparison: "GroupComparison") -> list[str]:
    """Return the lines that say what follows, those about a comparison last."""
    lines = []
    for group in comparison.groups:
        if group.final.n == 1:
            text = f"{group.letter}: one seed cannot tell a gain from noise"
            lines.append(labelled("one seed", text))
            command = repeat_command(group.measurements[0].run, SUGGESTED_SEEDS)
            if command is not None:
                lines.append(labelled("", command))

    decided = [item for item in comparison.differences if item.final and item.final.is_decided]
    if decided and len(comparison.differences) > 1:
        text = (
            "by chance, one comparison in 20 has p < 0.05, and these are "
            f"{len(comparison.differences)}: repeat the best setting with new seeds"
        )
        lines.append(labelled("note", text))
    lines += _best_lines(comparison)
    lines += [labelled("verdict", _verdict(difference)) for difference in comparison.differences]
    if not comparison.groups:
        lines.append(labelled("verdict", "no run can be compared"))
    elif not comparison.differences:
        text = "all runs have the same settings: there is nothing to compare"
        lines.append(labelled("verdict", text))
    return lines


def _best_lines(comparison: "GroupComparison") -> list[str]:
    """Return a line that names the best setting, and what a test says about the next one."""
    against_next = comparison.best_against_next
    if against_next is None:
        return []

    best = against_next.second
    text = f"{best.letter}: {best.name}, final eval loss {loss_text(best.final)}"
    following = against_next.first
    is_in_verdicts = comparison.groups[0].letter in (best.letter, following.letter)
    if not is_in_verdicts:
        text += f"; next {following.letter}: {_verdict(against_next)}"
    return [labelled("best", text)]


def _verdict(difference: "GroupDifference") -> str:
    a = difference.first.letter
    b = difference.second.letter
    test = difference.final
    if test is None:
        return f"{b} and {a} cannot be compared: each needs two seeds or more"
    if test.is_decided:
        direction = "lower" if test.difference < 0 else "higher"
        size = _signed(abs(test.difference)).removeprefix("+")
        return f"{b} is {direction} than {a} by {size} (p = {test.p:.2g})"
    if test.low == test.high == 0:
        return f"{b} and {a} have the same losses: the settings make no difference"
    return f"{b} - {a} cannot be told from noise: {_decision_text(test)}"


# --- JSON


def comparison_as_json(comparison: "GroupComparison") -> JsonObject:
    """Return a comparison as ``--json`` prints it."""
    return {
        "groups": [_group_as_json(group) for group in comparison.groups],
        "differences": [_difference_as_json(item) for item in comparison.differences],
        "best": _best_as_json(comparison.best_against_next),
        "target_loss": comparison.target_loss,
        "remarks": [f"{remark.label}: {remark.text}" for remark in comparison.remarks],
    }


def _best_as_json(against_next: "GroupDifference | None") -> JsonObject | None:
    if against_next is None:
        return None
    return {
        "letter": against_next.second.letter,
        "next": against_next.first.letter,
        "final_loss": _optional_as_json(against_next.final),
    }


def _group_as_json(group: "MeasuredGroup") -> JsonObject:
    return {
        "letter": group.letter,
        "name": group.name,
        "runs": [
            {
                "run": str(item.run.folder),
                "seed": item.seed,
                "final_loss": item.final_loss,
                "best_loss": item.best_loss,
            }
            for item in group.measurements
        ],
        "final_loss": group.final._asdict(),
        "best_loss": group.best._asdict(),
        "seconds_to_target": _optional_as_json(group.seconds_to_target),
    }


def _difference_as_json(difference: "GroupDifference") -> JsonObject:
    return {
        "first": difference.first.letter,
        "second": difference.second.letter,
        "paired_seeds": difference.paired_seeds,
        "final_loss": _optional_as_json(difference.final),
        "best_loss": _optional_as_json(difference.best),
        "verdict": _verdict(difference),
    }


def _optional_as_json(values: "Sample | MeanDifference | None") -> JsonObject | None:
    return None if values is None else values._asdict()
