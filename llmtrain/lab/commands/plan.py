"""Predict the memory and the time of a run, without training anything.

For each way to divide the model among the processes, this prints the memory of a process, the
largest micro-batch that fits, the seconds of a step, and the hours of the run. It needs no memory
for the weights."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmtrain.console import duration_text, labelled, pluralize, rate_text, size_text
from llmtrain.devices import USUAL_MFU
from llmtrain.files import json_text
from llmtrain.json_types import JsonObject
from llmtrain.recipe_arguments import add_recipe_arguments, separate_recipe_flags

if TYPE_CHECKING:
    from llmtrain.lab.plan.fit import Candidate, Fit
    from llmtrain.lab.plan.layouts import Plan, PlannedLayout

EXAMPLES = (
    "llmtrain plan recipes/gpt.py",
    "llmtrain plan recipes/finetune.py --from_config llama --tokenizer byte --processes 8 "
    "--device h100-80gb --gradient_checkpointing --sync_each_batch --config_overrides "
    "hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,"
    "intermediate_size=14336,vocab_size=128256    # a Llama with 8 billion parameters",
    "llmtrain plan recipes/gpt.py --processes 64 --device h100-80gb --link 400Gbit "
    "--global_batch_size 512",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes, one for each device (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device to plan for, such as h100-80gb, or cpu (default: this machine's)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="rate at which a process sends to another machine, such as 400Gbit",
    )
    parser.add_argument(
        "--per_machine",
        type=int,
        metavar="N",
        help="processes per machine (default: the usual number for this device)",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=USUAL_MFU,
        metavar="X",
        help="fraction of the device's peak that the run reaches (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the speed with a few real steps on this machine, instead of --mfu",
    )
    parser.add_argument(
        "--fit",
        metavar="SIZE",
        help="print the cheapest flags with which the run fits into so much memory per process, "
        "such as 80gb, instead of the tables",
    )


def run(arguments: argparse.Namespace) -> None:
    # All words after the recipe are in `arguments.flags` at first. This moves the options of this
    # command, such as --processes, from there to attributes of `arguments`. --json is among them:
    # `llmtrain.cli` adds it to every command.
    separate_recipe_flags(arguments)
    from llmtrain.lab.plan.fit import find_fit
    from llmtrain.lab.plan.hardware import PlanRequest
    from llmtrain.lab.plan.layouts import make_plan

    options = {
        name: value for name, value in vars(arguments).items() if name in PlanRequest._fields
    }
    request = PlanRequest(**options)
    if arguments.fit is not None:
        fit = find_fit(request, arguments.fit)
        if arguments.json:
            print(json_text(fit_as_json(fit), indent=1))
        else:
            _print_fit(fit, arguments.fit)
        return

    plan = make_plan(request)
    if arguments.json:
        print(json_text(as_json(plan), indent=1))
        return

    _print_head(arguments, plan)
    _print_tables(plan)
    for layout in plan.layouts:
        for note in notes(layout):
            print(f"note: {note}", file=sys.stderr)
        if plan.memory.decides_recomputation and layout.recompute_every:
            every = layout.recompute_every
            blocks = "every block" if every == 1 else f"one of {every} blocks"
            print(f"note: {layout.name}: {blocks} computes its activations again", file=sys.stderr)
    for reason in plan.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def as_json(plan: "Plan") -> JsonObject:
    """Return the layouts of a plan as a JSON object."""
    layouts = []
    for layout in plan.layouts:
        step = None
        if layout.step is not None:
            step = {**layout.step._asdict(), "total": layout.step.total}
        layouts.append({**layout._asdict(), "bytes": layout.bytes._asdict(), "step": step})
    return {
        "bytes_per_parameter": _bytes_per_parameter(plan),
        "layouts": layouts,
        "left_out": plan.left_out,
    }


def _bytes_per_parameter(plan: "Plan") -> dict[str, float]:
    """Return the bytes of a trained parameter by kind, in the mean of all parameters."""
    trained = [p for p in plan.memory.parameters if p.is_trained]
    numel = sum(p.numel() for p in trained) or 1
    weights = float(sum(p.numel() * p.element_bytes for p in trained)) / numel
    compensation = sum(p.state["compensation"].nbytes for p in trained if "compensation" in p.state)
    state = sum(p.state_bytes() for p in trained)
    return {
        "weights": weights,
        "gradients": weights,
        "moments": (state - compensation) / numel,
        "compensation": compensation / numel,
    }


def fit_as_json(fit: "Fit") -> JsonObject:
    """Return the flags with which a run fits as a JSON object."""
    return {
        "fits": fit.fits,
        "limit": fit.limit,
        "command": fit.command,
        "chosen": _candidate_as_json(fit.chosen),
        "changes": [change._asdict() for change in fit.changes],
        "too_large": None if fit.too_large is None else _candidate_as_json(fit.too_large),
        "would_fit": fit.would_fit,
    }


def _candidate_as_json(candidate: "Candidate") -> JsonObject:
    return {
        "layout": candidate.layout,
        "flags": candidate.flags,
        "rows": candidate.rows,
        "total": candidate.total,
        "seconds": candidate.seconds,
    }


def notes(layout: "PlannedLayout") -> list[str]:
    """Warn of micro-batches that do not fit although larger ones do, or if a flag would help.

    A smaller micro-batch means more of them in a step. With several, a process may keep the full
    gradient between them, which can take more memory than the smaller activations save.
    """
    if layout.fits_if_synced:
        return [
            f"{layout.name}: with --sync_each_batch micro-batches of 1 row fit, because gradients "
            "are reduced after each of them"
        ]
    if not layout.too_large:
        return []
    larger = [rows for rows in layout.fitting if rows > min(layout.too_large)]
    return [
        f"{layout.name}: micro-batches of {_listed(larger)} rows fit, but smaller ones of "
        f"{_listed(layout.too_large)} do not: a step with several micro-batches keeps gradients "
        "between them"
    ]


def _listed(numbers: list[int]) -> str:
    """Return numbers in words, such as ``1, 2 and 4``."""
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last


# --- flags with which a run fits


def _print_fit(fit: "Fit", size: str) -> None:
    needed = f"{size_text(fit.chosen.total)} of {size_text(fit.limit)} ({size})"
    if fit.fits:
        print(labelled("fits", f"{fit.chosen.layout}: {needed}{_step_text(fit.chosen)}"))
    else:
        print(
            labelled("too large", f"{fit.chosen.layout}: {needed}, with all flags that save memory")
        )
        answers = "; ".join(fit.would_fit) or "a smaller model, or shorter rows"
        print(labelled("would fit", answers))
    print(labelled("command", fit.command))

    if fit.changes:
        width = max(len(change.flag) for change in fit.changes) + 2
        print(f"\n{'flag':<{width}}{'step':>10}   numbers")
        for change in fit.changes:
            print(f"{change.flag:<{width}}{_cost_text(change.seconds):>10}   {change.promise}")

    if fit.too_large is not None:
        flags = " ".join(f"--{name} {value}".strip() for name, value in fit.too_large.flags.items())
        flags = flags or "no further flags"
        print(
            f"\nnext cheaper: {fit.too_large.layout} with {flags}: "
            f"{size_text(fit.too_large.total)}{_step_text(fit.too_large)}, which is too large"
        )


def _step_text(candidate: "Candidate") -> str:
    if candidate.seconds is None:
        return ""
    return f", {duration_text(candidate.seconds)} per step"


def _cost_text(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    sign = "-" if seconds < 0 else "+"
    return f"{sign}{duration_text(abs(seconds))}"


# --- the lines above the tables


def _print_head(arguments: argparse.Namespace, plan: "Plan") -> None:
    from llmtrain.lab.plan.hardware import device_name

    recipe = plan.memory.recipe
    parameters = [*recipe.model.parameters()]
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    model = f"{recipe.class_name}: {count:,} parameters"
    if trained < count:
        model += f", {trained:,} of them trained"
    if recipe.flops_per_token:
        flops = rate_text(recipe.flops_per_token, "FLOPs")
        model += f"; {flops} per token, forward and backward"
    print(labelled("model", model))

    settings = recipe.settings
    rows = f"{settings.data.global_batch_size:,} rows of {recipe.rows.positions:,} tokens"
    precision = "bf16" if plan.memory.bf16 else "float32"
    print(labelled("run", f"{settings.optim.max_steps:,} steps of {rows}, {precision}"))

    kinds = _bytes_per_parameter(plan)
    per_kind = ", ".join(f"{kind} {size:.4g}" for kind, size in kinds.items() if size)
    print(labelled("bytes", f"{sum(kinds.values()):.4g} per trained parameter: {per_kind}"))

    cluster = plan.cluster
    devices = f"{arguments.processes:,} x {device_name(arguments.device)}"
    inside = rate_text(cluster.inside.bandwidth, "B/s")
    between = rate_text(cluster.between.bandwidth, "B/s")
    links = f"{inside} inside a machine, {between} to another"
    print(labelled("devices", f"{devices}, {cluster.per_machine} per machine: {links}"))

    if plan.compute is None:
        return
    row_seconds = plan.compute.forward + plan.compute.backward
    source = f"at {arguments.mfu:.0%} of the peak (--mfu)"
    if arguments.calibrate:
        source = "measured on this machine"
    print(labelled("speed", f"{duration_text(row_seconds)} per row, {source}"))


# --- the tables


def _print_tables(plan: "Plan") -> None:
    from llmtrain.lab.plan.layouts import PROCESS_COUNTS

    # The last field is the total. It shares a column with the largest micro-batch.
    *kinds, total = plan.layouts[0].bytes._fields
    heads = [*kinds, f"{total:>13}{'largest':>10}"]
    _print_table(plan, "memory per process", heads, _size_cells)

    if plan.compute is None:
        print(
            "\nThe speed of this model is unknown, because the FLOPs of a mixture of experts, or "
            "of a model without flops_per_token(), are not counted. --calibrate measures it."
        )
        return

    heads = ["rows", "computing", "sending", "not hidden", "step", "tokens/s", "run"]
    _print_table(plan, "time per step", heads, _time_cells)
    counts = [f"{processes:,}" for processes in PROCESS_COUNTS]
    _print_table(plan, "efficiency at", counts, _efficiency_cells)


def _print_table(
    plan: "Plan", title: str, heads: list[str], cells: Callable[["PlannedLayout"], list[str]]
) -> None:
    """Print a table with a line for each layout.

    Args:
        plan: the plan.
        title: stands above the names of the layouts.
        heads: titles of the other columns.
        cells: returns the cells of a layout in these columns.
    """
    width = max(len("memory per process"), *(len(layout.name) for layout in plan.layouts)) + 2
    print(f"\n{title:<{width}}" + "".join(f"{head:>13}" for head in heads))
    for layout in plan.layouts:
        print(f"{layout.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells(layout)))


def _size_cells(layout: "PlannedLayout") -> list[str]:
    *kinds, total = [size_text(size) for size in layout.bytes]
    largest = pluralize(layout.largest, "row") if layout.largest > 0 else "too much"
    return [*kinds, f"{total:>13}{largest:>10}"]


def _time_cells(layout: "PlannedLayout") -> list[str]:
    assert layout.step is not None
    return [
        f"{layout.accumulation} x {layout.rows}",
        duration_text(layout.step.compute),
        duration_text(layout.step.communication),
        duration_text(layout.step.exposed),
        duration_text(layout.step.total),
        f"{layout.tokens_per_second:,.0f}",
        duration_text(3600 * layout.hours),
    ]


def _efficiency_cells(layout: "PlannedLayout") -> list[str]:
    from llmtrain.lab.plan.layouts import PROCESS_COUNTS

    cells = []
    for processes in PROCESS_COUNTS:
        efficiency = layout.efficiency.get(processes)
        cells.append(f"{efficiency:.1%}" if efficiency is not None else "")
    return cells
