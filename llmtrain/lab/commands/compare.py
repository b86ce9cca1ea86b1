"""Tell a gain from noise: compare settings by the eval losses of runs with several seeds.

The runs are grouped by their settings. With the same seed, a run repeats to the last bit on a CPU,
or with --bitwise on a GPU, so the seed is the only noise. Runs of two settings are paired by their
seeds. Each setting is compared with the first: how far apart their mean eval losses are, with a
95 % confidence interval and a p-value (Student's paired t-test). The table begins with the lowest
mean loss.
"""

import argparse
import math
import statistics
import string
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from llmtrain.console import labelled, pluralize, printable
from llmtrain.files import Json, json_text
from llmtrain.lab.differences import have_same_eval_loss
from llmtrain.lab.run_groups import code_of, find_runs, group_runs
from llmtrain.lab.significance import MeanDifference, paired_test
from llmtrain.record.history import History

EXAMPLES = (
    "llmtrain compare runs",
    "llmtrain compare runs/gpt-seed-0 runs/gpt-seed-1 runs/slow-seed-0 runs/slow-seed-1",
)


class Measurement(NamedTuple):
    """A finished run as one measurement of its settings."""

    run: History
    seed: int
    loss: float  # the last eval loss


class MeasuredGroup(NamedTuple):
    """The measurements of one setting, one for each seed."""

    letter: str  # A for the first group
    name: str  # the settings that set it apart; empty if there is only one group
    runs: list[Measurement]
    mean: float  # of the losses
    deviation: float | None  # likewise; None if there is one seed


class GroupDifference(NamedTuple):
    """The losses of a group minus those of the first one."""

    letter: str
    seeds: list[int]  # which both groups have
    loss: MeanDifference | None  # None if they are fewer than two
    verdict: str


class GroupComparison(NamedTuple):
    """The result of comparing settings."""

    groups: list[MeasuredGroup]  # in the order of their first runs
    differences: list[GroupDifference]  # of each group but the first to the first
    remarks: list[tuple[str, str]]  # a label, and a line about some runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a run folder, or a folder that holds runs; the settings of the first run are the "
        "baseline that all others are compared with",
    )


def run(arguments: argparse.Namespace) -> None:
    comparison = compare_groups(find_runs(arguments.folders))
    if arguments.json:
        print(json_text(as_json(comparison), indent=1))
    else:
        lines = [*group_lines(comparison), *_verdict_lines(comparison)]
        print(printable("\n".join(lines)))


def as_json(value: Any) -> Json:
    """Return a comparison, with all records in it, as ``--json`` prints it."""
    if isinstance(value, History):
        return str(value.folder)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: as_json(part) for name, part in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return cast(Json, value)


# --- the comparison


def compare_groups(runs: Sequence[History]) -> GroupComparison:
    """Group runs by their settings, and compare the eval losses of each group with the first."""
    remarks = []
    usable = []
    for run in runs:
        fault = _fault(run)
        if fault is None:
            usable.append(run)
        else:
            remarks.append(("left out", f"{run.folder} {fault}"))

    groups = []
    for number, (name, same_settings) in enumerate(group_runs(usable)):
        measured = _measurements(same_settings, remarks)
        losses = [item.loss for item in measured]
        rounds, place = divmod(number, 26)
        letter = string.ascii_uppercase[place]
        group = MeasuredGroup(
            letter=f"{letter}{rounds}" if rounds else letter,
            name=name,
            runs=measured,
            mean=statistics.fmean(losses),
            deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        )
        groups.append(group)

    measured_runs = [item.run for group in groups for item in group.runs]
    by_code = {code_of(run): str(run.folder) for run in reversed(measured_runs)}
    if len(by_code) > 1:
        folders = " and ".join([*reversed(by_code.values())][:2])
        remarks.append(("code", f"the runs were started with different code: {folders}"))

    return GroupComparison(
        groups=groups,
        differences=[_difference(groups[0], group) for group in groups[1:]],
        remarks=remarks,
    )


def _fault(run: History) -> str | None:
    """Return why a run cannot be compared, or ``None`` if it can."""
    if run.state == "running":
        return f"is still running, at step {run.step}"
    if run.state != "finished":
        return f"is not finished: {run.state} at step {run.step}; start its command again"
    if not isinstance(run.settings.get("seed"), int):
        return "has no seed in run.json"

    loss = run.latest("eval/loss")
    if loss is None:
        return "has no eval loss; set --eval_steps above 0, and keep eval rows"
    if not math.isfinite(loss):
        return "ended with an eval loss that is not a number: it has diverged"
    return None


def _measurements(runs: Iterable[History], remarks: list[tuple[str, str]]) -> list[Measurement]:
    """Return the first run of each seed in a group, and add remarks about the others."""
    by_seed: dict[int, Measurement] = {}
    for run in runs:
        loss = run.latest("eval/loss")
        assert loss is not None, "a run without an eval loss is left out"
        item = Measurement(run=run, seed=run.settings["seed"], loss=loss)
        first = by_seed.setdefault(item.seed, item)
        if first is item:
            continue

        names = f"{first.run.folder} and {item.run.folder}"
        if have_same_eval_loss(first.run, item.run):
            text = f"{names} are the same run, of seed {item.seed}: it counts as one"
            remarks.append(("same run", text))
        else:
            text = (
                f"{names} have the same settings and seed {item.seed}, but eval losses "
                f"{first.loss:.6g} and {item.loss:.6g}; only the first counts. To see "
                f"why: llmtrain diff {first.run.folder} {item.run.folder}"
            )
            remarks.append(("differs", text))
    return sorted(by_seed.values(), key=lambda item: item.seed)


def _difference(first: MeasuredGroup, second: MeasuredGroup) -> GroupDifference:
    """Compare two groups by the pairs of runs that have the same seed."""
    first_losses = {item.seed: item.loss for item in first.runs}
    second_losses = {item.seed: item.loss for item in second.runs}
    seeds = [seed for seed in first_losses if seed in second_losses]

    test = None
    verdict = f"cannot be compared: {second.letter} and {first.letter} need two seeds in common"
    if len(seeds) > 1:
        test = paired_test([second_losses[seed] - first_losses[seed] for seed in seeds])
        verdict = f"{second.letter} is {'lower' if test.difference < 0 else 'higher'}"
        if test.low == test.high == 0:
            verdict = "the same losses: the settings make no difference"
        elif not test.is_decided:
            verdict = "cannot be told from noise"
    return GroupDifference(letter=second.letter, seeds=seeds, loss=test, verdict=verdict)


# --- text


def group_lines(comparison: GroupComparison) -> list[str]:
    """Return the remarks, and a line and a row of a table for each group, the best one first."""
    lines = [labelled(label, text) for label, text in comparison.remarks]
    rows = [labelled("", f"{'seeds':>5}{'eval loss':>20}")]
    for group in sorted(comparison.groups, key=lambda group: group.mean):
        folders = [str(item.run.folder) for item in group.runs]
        shown = ", ".join(folders) if len(folders) <= 2 else f"{folders[0]} ... {folders[-1]}"
        lines.append(labelled(group.letter, f"{group.name}: {shown}".removeprefix(": ")))

        loss = f"{group.mean:.4f}"
        if group.deviation is not None:
            loss += f" ± {group.deviation:.4f}"
        rows.append(labelled(group.letter, f"{len(group.runs):>5}{loss:>20}"))
    return [*lines, *rows] if comparison.groups else lines


def _verdict_lines(comparison: GroupComparison) -> list[str]:
    """Return a line for each comparison, and others that say what follows."""
    lines = []
    for difference in comparison.differences:
        text = difference.verdict
        test = difference.loss
        if test is not None:
            text = (
                f"{_signed(test.difference)}, 95 % interval {_signed(test.low)} to "
                f"{_signed(test.high)}, p = {test.p:.2g} "
                f"({pluralize(len(difference.seeds), 'seed')}): {text}"
            )
        lines.append(labelled(f"{difference.letter} - A", text))

    decided = [test.loss for test in comparison.differences if test.loss and test.loss.is_decided]
    if decided and len(comparison.differences) > 1:
        text = (
            "by chance, one comparison in 20 has p < 0.05, and these are "
            f"{len(comparison.differences)}: repeat the best setting with new seeds"
        )
        lines.append(labelled("note", text))

    single = [group.letter for group in comparison.groups if group.deviation is None]
    if single:
        text = f"{', '.join(single)}: one seed cannot tell a gain from noise; use llmtrain repeat"
        lines.append(labelled("one seed", text))
    if not comparison.groups:
        lines.append(labelled("none", "no run can be compared"))
    elif not comparison.differences:
        text = "all runs have the same settings: there is nothing to compare"
        lines.append(labelled("same", text))
    return lines


def _signed(number: float) -> str:
    """Return a difference of losses with its sign, with four digits after the point or two."""
    if number == 0:
        return "0"
    return f"{number:+.4f}" if abs(number) >= 0.001 else f"{number:+.1e}"
