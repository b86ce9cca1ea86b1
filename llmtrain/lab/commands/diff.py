"""Compare two runs: their final losses, the first step at which they differ, and the cause.

The comparison covers rows, tokens, labels, losses, gradients and weights. The exit status is 0 if
the runs are the same, or differ only by rounding errors on different parallel layouts. It is 1
otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import labelled, printable
from llmtrain.errors import UserError
from llmtrain.files import Json, JsonObject, json_text
from llmtrain.lab.identity import (
    METADATA,
    effects_between,
    flat_record,
    shorten_hash,
    tolerance_between,
)
from llmtrain.record.history import History
from llmtrain.record.tolerances import QUANTITIES, Tolerance, step_differences

EXAMPLES = ("llmtrain diff runs/gpt runs/gpt-2",)


class Link(NamedTuple):
    """A quantity of a step, and how to explain that it differs if all quantities before are equal.

    Attributes:
        groups: the groups of settings that influence this quantity.
        default_cause: the cause to report if none of these settings differs.
        needs_same_data: on different data, this quantity differs even if nothing is wrong.
    """

    groups: tuple[str, ...]
    default_cause: str
    needs_same_data: bool = False


class Divergence(NamedTuple):
    """The first step at which two runs differ in one quantity."""

    link: str  # a key of CHAIN
    step: int  # 0 is before the first step
    value_a: Json
    value_b: Json
    # The relative difference at the log entry before, if rounding errors may have grown from it.
    grown_from: float | None = None


class RunDifference(NamedTuple):
    """The result of comparing two runs."""

    final_losses: list[JsonObject]  # of those that both runs have logged: the last of each
    first: Divergence | None  # the earliest; of several at the same step, the first in the chain
    divergences: list[Divergence]  # in the order of the chain
    causes: list[str]  # what may have caused the first divergence
    other_differences: list[str]  # settings and versions that differ, but cannot have caused it
    largest_loss_difference: float  # relative, of a train loss
    common_entries: int  # train losses that both runs have logged at the same step


class MetadataDifference(NamedTuple):
    """A setting, or another part of the runs' records, that differs."""

    groups: tuple[str, ...]  # which parts of a step it influences, as in Link.groups
    text: str  # its name and both values


_LABELS = "labels are masked or shifted differently"
_MODEL = (
    "the model or the loss is computed differently: attention, dropout or precision differ, or "
    f"{_LABELS}"
)

# A step is a chain of the quantities in record/tolerances.py: each depends on those before it. The
# first that differs points to the settings, or the code, that influence it.
CHAIN = {
    "initial_weights": Link(
        groups=("model", "seed"),
        default_cause="the weights are initialised or loaded differently",
    ),
    "rows": Link(
        groups=("data", "seed"),
        default_cause="rows are shuffled, or distributed over the processes, differently",
    ),
    "input_tokens": Link(
        groups=("data", "seed"),
        default_cause="the text is tokenised differently: the file differs, or a special token is "
        "added twice or is missing; or the rows are in a different order (--log_rows logs it)",
    ),
    "labels": Link(groups=("data",), default_cause=_LABELS),
    "target_tokens": Link(groups=("data",), default_cause=f"{_LABELS}, or counted differently"),
    "learning_rate": Link(
        groups=("update",),
        default_cause="the learning rate schedule is computed differently",
    ),
    "initial_loss": Link(groups=("model", "pass"), default_cause=_MODEL, needs_same_data=True),
    "loss": Link(groups=("model", "pass"), default_cause=_MODEL),
    "grad_norm": Link(
        groups=("gradient", "pass", "model"),
        default_cause="the gradient is accumulated differently: a mean of micro-batches' means "
        "instead of one mean over all tokens, a missing gradient sync, or a factor of the number "
        "of processes",
    ),
    "weight_norm": Link(
        groups=("update", "gradient"),
        default_cause="the optimizer or gradient clipping computes differently",
    ),
    "eval_loss": Link(
        groups=("data", "pass"),
        default_cause="the eval loss is computed differently",
        needs_same_data=True,
    ),
    "eval_bits_per_byte": Link(
        groups=("data", "pass"),
        default_cause="the bytes of the eval text are counted differently",
        needs_same_data=True,
    ),
}
assert [*CHAIN] == [*QUANTITIES]

# From one log entry to the next, rounding errors grow by less than this factor.
_LARGEST_GROWTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "llmtrain diff RUN_A RUN_B [--json]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one of two run folders")


def run(arguments: argparse.Namespace) -> None:
    if len(arguments.runs) != 2:
        raise UserError(
            "diff compares two runs: llmtrain diff RUN_A RUN_B. For more of them, use llmtrain "
            "runs, llmtrain report or llmtrain compare."
        )
    name_a, name_b = arguments.runs
    difference = diff_runs(History.of_run(Path(name_a)), History.of_run(Path(name_b)))
    if arguments.json:
        print(json_text(_as_json(difference), indent=1))
    else:
        print(printable("\n".join(diff_lines(difference, name_a, name_b))))

    are_same = difference.first is None and difference.common_entries > 0
    sys.exit(0 if are_same else 1)


def _as_json(difference: RunDifference) -> JsonObject:
    first = difference.first
    return {
        "final_losses": difference.final_losses,
        "first": None if first is None else first._asdict(),
        "all": [divergence._asdict() for divergence in difference.divergences],
        "causes": difference.causes,
        "other_differences": difference.other_differences,
        "largest_loss_difference": difference.largest_loss_difference,
        "common_entries": difference.common_entries,
    }


# --- the comparison


def diff_runs(run_a: History, run_b: History) -> RunDifference:
    """Compare two runs. They may have been interrupted, and may have different parallel layouts."""
    tolerance = tolerance_between(run_a, run_b)
    has_same_data = run_a.record.get("data_sha256") == run_b.record.get("data_sha256")
    candidates = [
        _divergence(key, run_a, run_b, tolerance=tolerance)
        for key, link in CHAIN.items()
        if has_same_data or not link.needs_same_data
    ]
    divergences = [candidate for candidate in candidates if candidate is not None]
    first = min(divergences, key=lambda divergence: divergence.step, default=None)

    losses = step_differences(QUANTITIES["loss"], run_a, run_b)
    causes, other_differences = _split_by_cause(
        first,
        metadata_differences(run_a, run_b),
        logged_steps=[loss.step for loss in losses],
    )
    return RunDifference(
        final_losses=_final_losses(run_a, run_b),
        first=first,
        divergences=divergences,
        causes=causes,
        other_differences=other_differences,
        largest_loss_difference=max((loss.relative for loss in losses), default=0.0),
        common_entries=len(losses),
    )


def _final_losses(run_a: History, run_b: History) -> list[JsonObject]:
    final_losses = []
    for name, key in (("loss", "train/loss"), ("eval loss", "eval/loss")):
        last_a = run_a.last(key)
        last_b = run_b.last(key)
        if last_a and last_b:
            steps = {"step_a": last_a[0], "step_b": last_b[0]}
            values = {"value_a": last_a[1], "value_b": last_b[1]}
            final_losses.append({"name": name, **steps, **values})
    return final_losses


def _divergence(
    key: str, run_a: History, run_b: History, tolerance: Tolerance
) -> Divergence | None:
    """Return the first step at which a quantity differs by more than the tolerance."""
    quantity = QUANTITIES[key]
    limit = quantity.limit(tolerance)
    previous = 0.0
    for difference in step_differences(quantity, run_a, run_b):
        if difference.relative <= limit:
            previous = difference.relative
            continue

        has_grown_slowly = previous > 0 and difference.relative < _LARGEST_GROWTH * previous
        return Divergence(
            link=key,
            step=difference.step,
            value_a=difference.first,
            value_b=difference.second,
            grown_from=previous if has_grown_slowly else None,
        )
    return None


def _split_by_cause(
    first: Divergence | None,
    metadata: Sequence[MetadataDifference],
    logged_steps: Sequence[int],
) -> tuple[list[str], list[str]]:
    """Split the metadata that differ into possible causes of the first divergence, and others.

    Args:
        first: the divergence to explain.
        metadata: what :func:`metadata_differences` returned.
        logged_steps: the steps at which both runs have logged a loss.
    """
    if first is None:
        return [], [difference.text for difference in metadata]

    groups = {"any", *CHAIN[first.link].groups}
    if _may_begin_earlier(first, logged_steps):
        groups |= {"model", "pass", "gradient", "update"}
    if first.grown_from is not None:
        groups.add("layout")

    causes = [item.text for item in metadata if not groups.isdisjoint(item.groups)]
    others = [item.text for item in metadata if groups.isdisjoint(item.groups)]
    if first.grown_from is not None:
        causes.append(
            f"rounding errors may have grown: at the log entry before, the runs agree within "
            f"{first.grown_from:.0e}"
        )
    if causes:
        return causes, others

    code = [difference.text for difference in metadata if "code" in difference.groups]
    causes = [CHAIN[first.link].default_cause, *code]
    return causes, [text for text in others if text not in code]


def _may_begin_earlier(first: Divergence, logged_steps: Sequence[int]) -> bool:
    """Return whether an earlier step may have differed in a quantity that was not logged.

    A loss also shows what the previous step did to the weights. So a difference in the loss is
    certain to begin in its own step only if that is the first step of the run.
    """
    if first.link not in ("loss", "grad_norm", "weight_norm"):
        return False

    last_equal_step = max((step for step in logged_steps if step < first.step), default=0)
    has_unlogged_steps = first.step - last_equal_step > 1
    return has_unlogged_steps or (first.link == "loss" and last_equal_step > 0)


def metadata_differences(run_a: History, run_b: History) -> list[MetadataDifference]:
    """Return the settings, versions, hashes and layouts that differ between two runs."""
    different = []
    effects = effects_between(run_a, run_b)
    for name in dict.fromkeys([*run_a.settings, *run_b.settings]):
        a = run_a.settings.get(name)
        b = run_b.settings.get(name)
        if a != b and effects[name] != {"nowhere"}:
            text = f"--{name} {shorten_hash(a)} and {shorten_hash(b)}"
            different.append(MetadataDifference(tuple(sorted(effects[name])), text))

    metadata_a = flat_record(run_a)
    metadata_b = flat_record(run_b)
    for key, (group, name) in METADATA.items():
        a = metadata_a.get(key)
        b = metadata_b.get(key)
        # None is a value, as for a model that is not sharded.
        if a != b and key in metadata_a and key in metadata_b:
            text = f"{name}: {shorten_hash(a)} and {shorten_hash(b)}"
            different.append(MetadataDifference((group,), text))
    return different


# --- text


def diff_lines(difference: RunDifference, name_a: str, name_b: str) -> list[str]:
    """Return the difference of two runs, which have these names, as lines of text."""
    lines = [_final_loss_line(loss, name_a, name_b) for loss in difference.final_losses]
    others = [labelled("also", text) for text in difference.other_differences]
    first = difference.first
    if first is not None:
        when = f"at step {first.step}" if first.step > 0 else "before the first step"
        value_a = _format_value(first.value_a)
        value_b = _format_value(first.value_b)
        values = f"{value_a} in {name_a}, {value_b} in {name_b}"
        lines.append(labelled("differs", f"{when}: {QUANTITIES[first.link].name}: {values}"))

        later = [item for item in difference.divergences if item != first]
        later.sort(key=lambda divergence: divergence.step)
        names = [f"{QUANTITIES[item.link].name} at step {item.step}" for item in later]
        if names:
            lines.append(labelled("then", ", ".join(names)))
        lines += [labelled("cause", cause) for cause in difference.causes]
        return lines + others

    if difference.common_entries == 0:
        text = "the runs have no logged step in common: nothing can be compared"
        return [*lines, labelled("unknown", text)]

    agreement = "to the last bit"
    if difference.largest_loss_difference > 0:
        agreement = f"within {difference.largest_loss_difference:.0e}, which rounding explains"
    quantities = f"rows, losses, norms and weights of {difference.common_entries} log entries"
    return [*lines, labelled("same", f"{quantities}, {agreement}"), *others]


def _final_loss_line(loss: JsonObject, name_a: str, name_b: str) -> str:
    value_a = loss["value_a"]
    value_b = loss["value_b"]
    step_b = f" at step {loss['step_b']}" if loss["step_b"] != loss["step_a"] else ""
    change = round(value_b - value_a, 4) + 0.0  # no negative zero
    text = (
        f"{value_a:.4f} in {name_a} at step {loss['step_a']}, {value_b:.4f} in {name_b}{step_b}: "
        f"{change:+.4f}"
    )
    return labelled(loss["name"], text)


def _format_value(value: Json) -> str:
    if isinstance(value, list):
        ellipsis = ", ..." if len(value) > 4 else ""
        return ", ".join(str(item) for item in value[:4]) + ellipsis
    return f"{value:.8g}" if isinstance(value, float) else str(value)
