"""Tell a gain from noise: compare settings by the eval losses of runs with several seeds.

The runs are grouped by their settings. With the same seed, a run repeats to the last bit on a CPU,
or with --bitwise on a GPU, so the seed is the only noise. Runs of two settings are paired by their
seeds. Each setting is compared with the first: how far apart their mean eval losses are, with a
95 % confidence interval and a p-value (Student's paired t-test). The table begins with the lowest
mean loss.

With --verdict, it judges two settings, for scripts. The exit status is 0 if the second is better
than the first, 10 if it is worse, 11 if the two are not told apart, and 12 if they are not
comparable: the runs are not of two settings, one of them has diverged or is not finished, they have
fewer than two seeds in common, or their eval losses measure different things. As everywhere, 1 is a
failure of the command, and 2 is a mistake in its arguments.

If a search will make N comparisons, give each --looks N: with --level 0.01, a search in which
nothing helps then finds a difference in at most 1 of 100 cases. After each setting that was judged
better, the later comparisons may have one look less (Holm's method). To add seeds and compare again
is another look.
"""

import argparse
import math
import statistics
import string
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from llmtrain.console import labelled, pluralize, printable
from llmtrain.errors import UserError
from llmtrain.files import Json, JsonObject, json_text
from llmtrain.lab.differences import eval_measure, have_same_eval_loss
from llmtrain.lab.run_groups import code_of, find_runs, group_runs
from llmtrain.lab.significance import MeanDifference, paired_test
from llmtrain.record.history import History

EXAMPLES = (
    "llmtrain compare runs",
    "llmtrain compare runs/gpt-seed-0 runs/gpt-seed-1 runs/slow-seed-0 runs/slow-seed-1",
    "llmtrain compare runs/gpt-seed-* runs/slow-seed-* --verdict --looks 30 --json",
)

# The exit status of each verdict.
STATUS = {"better": 0, "worse": 10, "not told apart": 11, "not comparable": 12}


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
    level: float  # of the tests: see :func:`llmtrain.lab.significance.paired_test`
    looks: int  # likewise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a run folder, or a folder that holds runs; the settings of the first run are the "
        "baseline that all others are compared with",
    )
    parser.add_argument(
        "--verdict",
        action="store_true",
        help="judge the second of two settings, and exit with 0, 10, 11 or 12 (see above)",
    )
    parser.add_argument(
        "--level",
        type=float,
        metavar="X",
        help="with --verdict: the probability of a wrong better or worse, in all looks together, "
        "if the two settings are equally good (default: 0.01, which is 1 %%)",
    )
    parser.add_argument(
        "--looks",
        type=int,
        metavar="N",
        help="with --verdict: the number of comparisons that the level is for (default: 1)",
    )


def run(arguments: argparse.Namespace) -> None:
    level = arguments.level
    looks = arguments.looks
    if not arguments.verdict and (level, looks) != (None, None):
        raise UserError("--level and --looks need --verdict, which they are for.")
    if level is not None and not 0 < level < 1:
        raise UserError(f"--level {level:g}: it must be above 0 and below 1, such as 0.01.")
    if looks is not None and looks < 1:
        raise UserError(f"--looks {looks}: it must be at least 1.")
    default_level = 0.01 if arguments.verdict else 0.05

    comparison = compare_groups(
        find_runs(arguments.folders), level=level or default_level, looks=looks or 1
    )
    content = cast(JsonObject, as_json(comparison))
    lines = [*group_lines(comparison), *_difference_lines(comparison)]
    status = 0
    if arguments.verdict:
        judgement = judge(comparison)
        status = judgement["exit_status"]
        content = {**judgement, **content}
        text = "; ".join([judgement["verdict"], *judgement["reasons"]])
        if judgement["verdict"] == "not told apart":
            count = judgement["more_seeds"]
            more = "over 10,000 more seeds" if count is None else pluralize(count, "more seed")
            text += f"; about {more} of each would decide if the difference stays"
        lines.append(labelled("verdict", text))
    print(json_text(content, indent=1) if arguments.json else printable("\n".join(lines)))
    sys.exit(status)


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


def compare_groups(
    runs: Sequence[History], *, level: float = 0.05, looks: int = 1
) -> GroupComparison:
    """Group runs by their settings, and compare the eval losses of each group with the first.

    :func:`llmtrain.lab.significance.paired_test` explains the level and the looks.
    """
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
        differences=[
            _difference(groups[0], group, level=level, looks=looks) for group in groups[1:]
        ],
        remarks=remarks,
        level=level,
        looks=looks,
    )


def _fault(run: History) -> str | None:
    """Return why a run cannot be compared, or ``None`` if it can."""
    if run.state == "running":
        return f"is still running, at step {run.step}"
    if run.state != "finished":
        reason = str(run.status.get("reason") or "start its command again").partition("; ")[0]
        return f"is not finished: {run.state} at step {run.step}: {reason}"
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


def _difference(
    first: MeasuredGroup, second: MeasuredGroup, *, level: float, looks: int
) -> GroupDifference:
    """Compare two groups by the pairs of runs that have the same seed."""
    first_losses = {item.seed: item.loss for item in first.runs}
    second_losses = {item.seed: item.loss for item in second.runs}
    seeds = [seed for seed in first_losses if seed in second_losses]

    test = None
    verdict = f"cannot be compared: {second.letter} and {first.letter} need two seeds in common"
    measured = eval_measure(first.runs[0].run)
    other_measured = eval_measure(second.runs[0].run)
    differing = [name for name, value in measured.items() if value != other_measured[name]]
    if differing:
        verdict = f"cannot be compared: their eval losses have different {' and '.join(differing)}"
    elif len(seeds) > 1:
        differences = [second_losses[seed] - first_losses[seed] for seed in seeds]
        test = paired_test(differences, level=level, looks=looks)
        verdict = f"{second.letter} is {'lower' if test.difference < 0 else 'higher'}"
        if test.low == test.high == 0:
            verdict = "the same losses: the settings make no difference"
        elif not test.is_decided:
            verdict = "cannot be told from noise"
    return GroupDifference(letter=second.letter, seeds=seeds, loss=test, verdict=verdict)


# --- one verdict


def judge(comparison: GroupComparison) -> JsonObject:
    """Judge the second of two groups.

    Returns:
        The ``verdict``, a key of :data:`STATUS`; its ``exit_status``; the ``reasons`` if it is
        ``not comparable``; the ``seeds`` that both groups have; and the values of a
        :class:`~llmtrain.lab.significance.MeanDifference`, or ``None`` in place of each.
    """
    reasons = [text for label, text in comparison.remarks if label == "left out"]
    seeds: list[int] = []
    test = None
    if len(comparison.differences) == 1:
        [difference] = comparison.differences
        seeds = difference.seeds
        test = difference.loss
        if test is None:
            reasons.append(difference.verdict.removeprefix("cannot be compared: "))
    else:
        names = "; ".join(group.name for group in comparison.groups)
        text = f"a verdict is about two settings, and these are {len(comparison.groups)}: {names}"
        reasons.append(text.removesuffix(": "))

    if test is None or reasons:
        verdict = "not comparable"
    elif not test.is_decided:
        verdict = "not told apart"
    else:
        verdict = "better" if test.difference < 0 else "worse"
    return {
        "verdict": verdict,
        "exit_status": STATUS[verdict],
        "reasons": reasons,
        "seeds": seeds,
        **(dict.fromkeys(MeanDifference._fields) if test is None else test._asdict()),
    }


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


def _difference_lines(comparison: GroupComparison) -> list[str]:
    """Return a line for each comparison, and others that say what follows."""
    lines = []
    looks = comparison.looks
    confidence = 100 * (1 - comparison.level / looks)
    for difference in comparison.differences:
        text = difference.verdict
        test = difference.loss
        if test is not None:
            adjusted = f", {test.adjusted_p:.2g} in {looks} looks" if looks > 1 else ""
            text = (
                f"{_signed(test.difference)}, {confidence:.6g} % interval {_signed(test.low)} to "
                f"{_signed(test.high)}, p = {test.p:.2g}{adjusted} "
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
