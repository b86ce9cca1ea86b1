"""Tell a gain from noise: compare settings by the eval losses of runs with several seeds.

The runs are grouped by their settings. With the same seed, a run repeats to the last bit on a CPU,
or with --bitwise on a GPU, so the seed is the only noise. Runs of two settings are paired by their
seeds. Each setting is compared with the first: how far apart their mean losses are, with a 95 %
confidence interval and a p-value (Student's paired t-test; Welch's t-test if the seeds do not pair
up), and how many more seeds would decide. The table begins with the lowest mean loss.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from llmtrain.console import labelled, pluralize, printable
from llmtrain.files import json_text
from llmtrain.json_types import Json
from llmtrain.lab.identity import have_same_eval_loss
from llmtrain.lab.run_groups import code_of, find_runs, group_runs, repeat_command, seed_of
from llmtrain.lab.significance import MeanDifference, Sample, paired_test, unpaired_test
from llmtrain.quantities import duration_text
from llmtrain.record.history import History

EXAMPLES = (
    "llmtrain compare runs",
    "llmtrain compare runs/gpt-seed-0 runs/gpt-seed-1 runs/slow-seed-0 runs/slow-seed-1",
)

_EVAL_LOSS = "eval/loss"
_ABSENT = "\N{EN DASH}"
# The paired test finds a difference of twice its deviation in nine cases of ten.
_SUGGESTED_SEEDS = 5


class Measurement(NamedTuple):
    """A finished run as one measurement of its settings."""

    run: History
    seed: int
    final_loss: float  # the last eval loss
    best_loss: float  # the lowest eval loss


class MeasuredGroup(NamedTuple):
    """The measurements of one setting, one for each seed."""

    letter: str  # A for the first group
    name: str  # the settings that set it apart; empty if there is only one group
    runs: list[Measurement]
    final_loss: Sample
    best_loss: Sample
    # Seconds of training until the eval loss was as low as the worst final eval loss of all runs;
    # None if the times were not recorded.
    seconds_to_target: Sample | None


class GroupDifference(NamedTuple):
    """The losses of one group minus those of another, the first one."""

    first: str  # the letter of a group
    second: str
    paired_seeds: list[int]  # which both groups have; empty if no paired test was made
    final_loss: MeanDifference | None  # None if a group has a single seed
    best_loss: MeanDifference | None
    verdict: str


class GroupComparison(NamedTuple):
    """The result of comparing settings."""

    groups: list[MeasuredGroup]  # in the order of their first runs
    differences: list[GroupDifference]  # of each group but the first to the first
    best: GroupDifference | None  # of the group with the lowest mean final eval loss to the next
    target_loss: float | None  # the worst final eval loss, which all runs reached
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
        print(comparison_as_json(comparison))
        return

    lines = group_lines(comparison)
    for difference in comparison.differences:
        lines += _test_lines(difference)
    lines += _verdict_lines(comparison)
    print(printable("\n".join(lines)))


def comparison_as_json(comparison: GroupComparison) -> str:
    """Return a comparison as ``--json`` prints it."""
    return json_text(_plain(comparison), indent=1)


def _plain(value: Any) -> Json:
    """Return a record, with all records in it, as JSON."""
    if isinstance(value, History):
        return str(value.folder)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
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

    names = []
    measurements = []
    for name, indices in group_runs(usable):
        measured = [_measurement(usable[i]) for i in indices]
        names.append(name)
        measurements.append(_one_for_each_seed(measured, remarks))

    every_measurement = [item for group in measurements for item in group]
    by_code = {code_of(item.run): str(item.run.folder) for item in reversed(every_measurement)}
    if len(by_code) > 1:
        folders = " and ".join([*reversed(by_code.values())][:2])
        remarks.append(("code", f"the runs were started with different code: {folders}"))

    target = max((item.final_loss for item in every_measurement), default=None)
    groups = [
        MeasuredGroup(
            letter=_letter(i),
            name=name,
            runs=measured,
            final_loss=Sample.of([item.final_loss for item in measured]),
            best_loss=Sample.of([item.best_loss for item in measured]),
            seconds_to_target=_seconds_to(target, measured),
        )
        for i, (name, measured) in enumerate(zip(names, measurements, strict=True))
    ]
    best = None
    if len(groups) > 1:
        lowest, following = _ranked(groups)[:2]
        best = _difference(following, lowest)
    return GroupComparison(
        groups=groups,
        differences=[_difference(groups[0], group) for group in groups[1:]],
        best=best,
        target_loss=target,
        remarks=remarks,
    )


def _ranked(groups: Sequence[MeasuredGroup]) -> list[MeasuredGroup]:
    """Return groups by their mean final eval loss, the best one first."""
    return sorted(groups, key=lambda group: group.final_loss.mean)


def _fault(run: History) -> str | None:
    """Return why a run cannot be compared, or ``None`` if it can."""
    if run.state == "running":
        return f"is still running, at step {run.step}"
    if run.state != "finished":
        return f"is not finished: {run.state} at step {run.step}; start its command again"
    if seed_of(run) is None:
        return "has no seed in run.json"

    losses = [entry[_EVAL_LOSS] for entry in run.entries if _EVAL_LOSS in entry]
    if not losses:
        return "has no eval loss; set --eval_steps above 0, and keep eval rows"
    # JSON has no word for NaN and infinity, which are logged as null.
    if not isinstance(losses[-1], int | float) or not math.isfinite(losses[-1]):
        return "ended with an eval loss that is not a number: it has diverged"
    return None


def _measurement(run: History) -> Measurement:
    losses = [loss for loss in run.series(_EVAL_LOSS).values() if math.isfinite(loss)]
    seed = seed_of(run)
    assert seed is not None, "a run without a seed is left out"
    return Measurement(run=run, seed=seed, final_loss=losses[-1], best_loss=min(losses))


def _one_for_each_seed(
    measurements: Iterable[Measurement], remarks: list[tuple[str, str]]
) -> list[Measurement]:
    """Return the first measurement of each seed in a group, and add remarks about the others."""
    by_seed: dict[int, Measurement] = {}
    for item in measurements:
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
                f"{first.final_loss:.6g} and {item.final_loss:.6g}; only the first counts. To see "
                f"why: llmtrain diff {first.run.folder} {item.run.folder}"
            )
            remarks.append(("differs", text))
    return sorted(by_seed.values(), key=lambda item: item.seed)


def _letter(index: int) -> str:
    """Return the short name of a group: A to Z, then A1 to Z1, and so on."""
    rounds, place = divmod(index, 26)
    letter = chr(ord("A") + place)
    return f"{letter}{rounds}" if rounds else letter


def _seconds_to(target: float | None, measurements: Sequence[Measurement]) -> Sample | None:
    """Return the seconds of training until each run had evaluated to this loss or a lower one."""
    seconds = []
    for item in measurements:
        logged = zip(item.run.entries, item.run.training_hours(), strict=True)
        losses = ((entry.get(_EVAL_LOSS), hours) for entry, hours in logged)
        hours = next(hours for loss, hours in losses if loss is not None and loss <= target)
        if hours is not None:
            seconds.append(3600 * hours)
    return Sample.of(seconds) if len(seconds) == len(measurements) else None


def _difference(first: MeasuredGroup, second: MeasuredGroup) -> GroupDifference:
    """Compare two groups: by pairs of runs if all seeds of the smaller group have a partner."""
    first_by_seed = {item.seed: item for item in first.runs}
    second_by_seed = {item.seed: item for item in second.runs}
    paired_seeds = [seed for seed in first_by_seed if seed in second_by_seed]
    smaller_size = min(len(first_by_seed), len(second_by_seed))
    if smaller_size < 2 or len(paired_seeds) < smaller_size:
        paired_seeds = []

    def test(loss_of: Callable[[Measurement], float]) -> MeanDifference | None:
        if smaller_size < 2:
            return None
        if not paired_seeds:
            return unpaired_test(
                [loss_of(item) for item in first.runs], [loss_of(item) for item in second.runs]
            )
        return paired_test(
            [loss_of(second_by_seed[seed]) - loss_of(first_by_seed[seed]) for seed in paired_seeds]
        )

    final_loss = test(lambda item: item.final_loss)
    return GroupDifference(
        first=first.letter,
        second=second.letter,
        paired_seeds=paired_seeds,
        final_loss=final_loss,
        best_loss=test(lambda item: item.best_loss),
        verdict=_verdict(first.letter, second.letter, final_loss),
    )


def _verdict(first: str, second: str, test: MeanDifference | None) -> str:
    if test is None:
        return f"{second} and {first} cannot be compared: each needs two seeds or more"
    if test.is_decided:
        direction = "lower" if test.difference < 0 else "higher"
        size = _signed(abs(test.difference)).removeprefix("+")
        return f"{second} is {direction} than {first} by {size} (p = {test.p:.2g})"
    if test.low == test.high == 0:
        return f"{second} and {first} have the same losses: the settings make no difference"
    return f"{second} - {first} cannot be told from noise: {_decision_text(test)}"


# --- text


def group_lines(comparison: GroupComparison) -> list[str]:
    """Return the remarks, and a line and a row of a table for each group, the best one first."""
    lines = [labelled(label, text) for label, text in comparison.remarks]
    if not comparison.groups:
        return lines

    target = f"time to {comparison.target_loss:.4f}"
    rows = [labelled("", f"{'seeds':>5}{'final eval loss':>20}{'best eval loss':>20}{target:>20}")]
    for group in _ranked(comparison.groups):
        folders = [str(item.run.folder) for item in group.runs]
        shown = ", ".join(folders) if len(folders) <= 2 else f"{folders[0]} ... {folders[-1]}"
        lines.append(labelled(group.letter, f"{group.name}: {shown}".removeprefix(": ")))

        columns = [
            _spread(group.final_loss, "{:.4f}".format),
            _spread(group.best_loss, "{:.4f}".format),
            _spread(group.seconds_to_target, duration_text),
        ]
        numbers = "".join(f"{column:>20}" for column in columns)
        rows.append(labelled(group.letter, f"{group.final_loss.n:>5}{numbers}"))
    return lines + rows


def _spread(sample: Sample | None, as_text: Callable[[float], str]) -> str:
    """Return a mean and its deviation, such as ``2.9134 ± 0.0123``."""
    if sample is None:
        return _ABSENT
    if sample.deviation is None:
        return as_text(sample.mean)
    return f"{as_text(sample.mean)} ± {as_text(sample.deviation)}"


def _test_lines(difference: GroupDifference) -> list[str]:
    """Return a line about the final eval loss, and one about the best if that is another."""
    method = "the seeds do not pair up: Welch's t-test"
    if difference.paired_seeds:
        method = f"paired t-test, {pluralize(len(difference.paired_seeds), 'seed')}"
    tests = {"final eval loss": difference.final_loss}
    if difference.best_loss != difference.final_loss:
        tests["best eval loss"] = difference.best_loss

    lines = []
    for quantity, test in tests.items():
        if test is not None:
            text = (
                f"{quantity} {_signed(test.difference)}, 95 % interval {_signed(test.low)} to "
                f"{_signed(test.high)}, p = {test.p:.2g} ({method}); {_decision_text(test)}"
            )
            lines.append(labelled(f"{difference.second} - {difference.first}", text))
    return lines


def _decision_text(test: MeanDifference) -> str:
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


def _verdict_lines(comparison: GroupComparison) -> list[str]:
    """Return the lines that say what follows, those about a comparison last."""
    lines = []
    for group in comparison.groups:
        if group.final_loss.n == 1:
            text = f"{group.letter}: one seed cannot tell a gain from noise"
            lines.append(labelled("one seed", text))
            command = repeat_command(group.runs[0].run, _SUGGESTED_SEEDS)
            if command is not None:
                lines.append(labelled("", command))

    tests = [difference.final_loss for difference in comparison.differences]
    if len(tests) > 1 and any(test is not None and test.is_decided for test in tests):
        text = (
            f"by chance, one comparison in 20 has p < 0.05, and these are {len(tests)}: "
            "repeat the best setting with new seeds"
        )
        lines.append(labelled("note", text))

    best = comparison.best
    if best is not None:
        group = _ranked(comparison.groups)[0]
        text = f"{group.letter}: {group.name}, final eval loss "
        text += _spread(group.final_loss, "{:.4f}".format)
        is_in_verdicts = comparison.groups[0].letter in (best.first, best.second)
        if not is_in_verdicts:
            text += f"; next {best.first}: {best.verdict}"
        lines.append(labelled("best", text))

    verdicts = [difference.verdict for difference in comparison.differences]
    if not comparison.groups:
        verdicts = ["no run can be compared"]
    elif not verdicts:
        verdicts = ["all runs have the same settings: there is nothing to compare"]
    return lines + [labelled("verdict", verdict) for verdict in verdicts]
