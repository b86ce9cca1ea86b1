"""Predict the memory and the time of a run, without training anything.

For each way to spread the model over the processes, this prints the memory of a process, the
largest micro-batch that fits, the seconds of a step, and the hours of the run. It needs no memory
for the weights."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmtrain.console import pluralize
from llmtrain.devices import USUAL_MFU
from llmtrain.files import json_text
from llmtrain.quantities import duration_text, rate_text, size_text
from llmtrain.recipe_arguments import add_recipe_arguments, separate_recipe_flags
from llmtrain.types import JsonObject

if TYPE_CHECKING:
    from llmtrain.plan.ways import Plan, Way

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
        "--mixed_precision",
        choices=["no", "bf16"],
        help="mixed precision (default: bf16 on a GPU, no on a CPU)",
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


def run(arguments: argparse.Namespace) -> None:
    # All words after the recipe are in `arguments.flags` at first. This moves the options of this
    # command, such as --processes, from there to attributes of `arguments`. --json is among them:
    # `llmtrain.cli` adds it to every command.
    separate_recipe_flags(arguments)
    from llmtrain.plan.ways import PlanRequest, make_plan

    options = {
        name: value for name, value in vars(arguments).items() if name in PlanRequest._fields
    }
    plan = make_plan(PlanRequest(**options))
    if arguments.json:
        print(json_text(as_json(plan), indent=1))
        return

    _print_head(arguments, plan)
    _print_tables(plan)
    for way in plan.ways:
        for note in notes(way):
            print(f"note: {note}", file=sys.stderr)
    for reason in plan.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def as_json(plan: "Plan") -> JsonObject:
    """Return the ways of a plan as a JSON object."""
    ways = []
    for way in plan.ways:
        step = None
        if way.step is not None:
            step = {**way.step._asdict(), "total": way.step.total}
        ways.append({**way._asdict(), "bytes": way.bytes._asdict(), "step": step})
    return {"ways": ways, "left_out": plan.left_out}


def notes(way: "Way") -> list[str]:
    """Warn of micro-batches that do not fit although larger ones do, or if a flag would help.

    A smaller micro-batch means more of them in a step. With several, a process may keep the full
    gradient between them, which can take more memory than the smaller activations save.
    """
    if way.fits_if_synced:
        return [
            f"{way.name}: with --sync_each_batch micro-batches of 1 row fit, because gradients are "
            "reduced after each of them"
        ]
    if not way.too_large:
        return []
    larger = [rows for rows in way.fitting if rows > min(way.too_large)]
    return [
        f"{way.name}: micro-batches of {_listed(larger)} rows fit, but smaller ones of "
        f"{_listed(way.too_large)} do not: a step with several micro-batches keeps gradients "
        "between them"
    ]


def _listed(numbers: list[int]) -> str:
    """Return numbers in words, such as ``1, 2 and 4``."""
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last


# --- the lines above the tables


def _print_head(arguments: argparse.Namespace, plan: "Plan") -> None:
    from llmtrain.plan.ways import device_name

    subject = plan.memory.subject
    parameters = [*subject.model.parameters()]
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    model = f"{subject.class_name}: {count:,} parameters"
    if trained < count:
        model += f", {trained:,} of them trained"
    if subject.flops_per_token:
        flops = rate_text(subject.flops_per_token, "FLOPs")
        model += f"; {flops} per token, forward and backward"
    print(f"model     {model}")

    settings = subject.settings
    rows = f"{settings.data.global_batch_size:,} rows of {subject.positions:,} tokens"
    precision = "bf16" if plan.memory.bf16 else "float32"
    print(f"run       {settings.optim.max_steps:,} steps of {rows}, {precision}")

    cluster = plan.cluster
    devices = f"{arguments.processes:,} x {device_name(arguments.device)}"
    inside = rate_text(cluster.inside.bandwidth, "B/s")
    between = rate_text(cluster.between.bandwidth, "B/s")
    links = f"{inside} inside a machine, {between} to another"
    print(f"devices   {devices}, {cluster.per_machine} per machine: {links}")

    if plan.compute is None:
        return
    row_seconds = plan.compute.forward + plan.compute.backward
    source = f"at {arguments.mfu:.0%} of the peak (--mfu)"
    if arguments.calibrate:
        source = "measured on this machine"
    print(f"speed     {duration_text(row_seconds)} per row, {source}")


# --- the tables


def _print_tables(plan: "Plan") -> None:
    from llmtrain.plan.ways import PROCESS_COUNTS

    # The last field is the total. It shares a column with the largest micro-batch.
    *kinds, total = plan.ways[0].bytes._fields
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
    plan: "Plan", title: str, heads: list[str], cells: Callable[["Way"], list[str]]
) -> None:
    """Print a table with a line for each way.

    Args:
        plan: the plan.
        title: stands above the names of the ways.
        heads: titles of the other columns.
        cells: returns the cells of a way in these columns.
    """
    width = max(len("memory per process"), *(len(way.name) for way in plan.ways)) + 2
    print(f"\n{title:<{width}}" + "".join(f"{head:>13}" for head in heads))
    for way in plan.ways:
        print(f"{way.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells(way)))


def _size_cells(way: "Way") -> list[str]:
    *kinds, total = [size_text(size) for size in way.bytes]
    largest = pluralize(way.largest, "row") if way.largest > 0 else "too much"
    return [*kinds, f"{total:>13}{largest:>10}"]


def _time_cells(way: "Way") -> list[str]:
    assert way.step is not None
    return [
        f"{way.accumulation} x {way.rows}",
        duration_text(way.step.compute),
        duration_text(way.step.communication),
        duration_text(way.step.exposed),
        duration_text(way.step.total),
        f"{way.tokens_per_second:,.0f}",
        duration_text(3600 * way.hours),
    ]


def _efficiency_cells(way: "Way") -> list[str]:
    from llmtrain.plan.ways import PROCESS_COUNTS

    cells = []
    for processes in PROCESS_COUNTS:
        efficiency = way.efficiency.get(processes)
        cells.append(f"{efficiency:.1%}" if efficiency is not None else "")
    return cells
