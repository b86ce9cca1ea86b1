"""Say what a run would need before it is paid for.

These are bytes a process, the largest micro-batch, seconds an update and hours, for each way to spread the model over
the processes. Nothing is trained, and no weight is in memory."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmtrain.commands._recipe import own_and_recipes, take_recipe
from llmtrain.devices import USUAL_MFU
from llmtrain.files import json_text
from llmtrain.types import Facts

if TYPE_CHECKING:
    from llmtrain.plan.ways import Plan, Way

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    take_recipe(parser)
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="one a device (default: %(default)s)"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="such as h100-80gb, or cpu (default: what is here)"
    )
    parser.add_argument(
        "--link", metavar="RATE", help="what a process sends to another machine, such as 400Gbit"
    )
    parser.add_argument(
        "--per_machine", type=int, metavar="N", help="processes of a machine (default: the usual)"
    )
    parser.add_argument(
        "--tensor",
        type=int,
        metavar="N",
        help="processes that share matrices (default: a machine's)",
    )
    parser.add_argument(
        "--stages",
        type=int,
        metavar="N",
        help="of a pipeline (default: as many, where layers allow)",
    )
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16"], help="(default: bf16 on a GPU)"
    )
    help_mfu = "share of the device's arithmetic (default: %(default)s)"
    parser.add_argument("--mfu", type=float, default=USUAL_MFU, metavar="X", help=help_mfu)
    parser.add_argument(
        "--calibrate", action="store_true", help="take some real steps here, instead of --mfu"
    )


def run(arguments: argparse.Namespace) -> None:
    own_and_recipes(arguments)
    from llmtrain.plan.ways import Asked, plan

    options = {name: value for name, value in vars(arguments).items() if name in Asked._fields}
    result = plan(Asked(**options))
    if arguments.json:
        print(json_text(plain(result), indent=1))
        return

    _print_head(arguments, result)
    _print_tables(result)
    for way in result.ways:
        for note in notes(way):
            print(f"note: {note}", file=sys.stderr)
    for reason in result.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def plain(plan: "Plan") -> Facts:
    """Return a plan for programs."""
    ways = []
    for way in plan.ways:
        step = None
        if way.step is not None:
            step = {**way.step._asdict(), "total": way.step.total}
        ways.append({**way._asdict(), "bytes": way.bytes._asdict(), "step": step})
    return {"ways": ways, "left_out": plan.left_out}


def notes(way: "Way") -> list[str]:
    """Return what the tables do not say about a way: that smaller micro-batches than the largest may not fit."""
    if not way.too_large:
        return []
    larger = [rows for rows in way.fitting if rows > min(way.too_large)]
    return [
        f"{way.name}: micro-batches of {_listed(larger)} rows fit, but smaller ones of {_listed(way.too_large)} "
        "do not: a step with several micro-batches keeps gradients between them"
    ]


def _listed(numbers: list[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last


def _print_head(arguments: argparse.Namespace, plan: "Plan") -> None:
    from llmtrain.plan.ways import device_name

    subject = plan.memory.subject
    parameters = [*subject.model.parameters()]
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = "" if trained == count else f", {trained:,} of them trained"
    gflops = subject.flops_per_token / 1e9
    print(
        f"model     {subject.kind}: {count:,} parameters{share}; {gflops:.2f} GFLOP a token, forward and backward"
    )

    settings = subject.settings
    rows = f"{settings.data.global_batch_size:,} rows of {subject.positions:,} tokens"
    precision = "bf16" if plan.memory.bf16 else "float32"
    print(f"run       {settings.optim.max_steps:,} steps of {rows}, {precision}")

    cluster = plan.cluster
    name = device_name(arguments.device)
    inside = f"{cluster.inside.bandwidth / 1e9:.4g} GB/s inside"
    between = f"{cluster.between.bandwidth / 1e9:.4g} GB/s to another"
    print(
        f"devices   {arguments.processes:,} x {name}, {cluster.per_machine} a machine: {inside}, {between}"
    )
    if plan.compute is None:
        return

    source = f"of {arguments.mfu:.0%} of the peak (--mfu)"
    if arguments.calibrate:
        source = "measured here"
    print(f"speed     {plan.compute.forward + plan.compute.backward:.4g} s a row, {source}")


def _print_tables(plan: "Plan") -> None:
    from llmtrain.plan.ways import SCALES

    parts = plan.ways[0].bytes._fields[:-1]
    _print_table(plan, "GiB a process", [*parts, f"{'total':>13}{'largest':>10}"], _sizes)
    if plan.compute is None:
        print(
            "\nnot every token meets every weight of this model, so its speed is unknown: --calibrate measures it"
        )
        return

    heads = ["rows", "computing", "sending", "not hidden", "step", "tokens/s", "hours"]
    _print_table(plan, "seconds", heads, _seconds)
    _print_table(plan, "efficiency at", [f"{scale:,}" for scale in SCALES], _efficiencies)


def _print_table(
    plan: "Plan", title: str, heads: list[str], cells: Callable[["Way"], list[str]]
) -> None:
    width = max(len("GiB a process"), *(len(way.name) for way in plan.ways)) + 2
    print(f"\n{title:<{width}}" + "".join(f"{head:>13}" for head in heads))
    for way in plan.ways:
        print(f"{way.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells(way)))


def _sizes(way: "Way") -> list[str]:
    *parts, total = [f"{size / _GIB:>13.3f}" for size in way.bytes]
    largest = f"{way.largest} rows" if way.largest > 0 else "too much"
    return [*parts, f"{total}{largest:>10}"]


def _seconds(way: "Way") -> list[str]:
    assert way.step is not None
    numbers = [f"{number:.4g}" for number in (*way.step, way.step.total)]
    return [
        f"{way.accumulation} x {way.rows}",
        *numbers,
        f"{way.tokens_per_second:,.0f}",
        f"{way.hours:.4g}",
    ]


def _efficiencies(way: "Way") -> list[str]:
    from llmtrain.plan.ways import SCALES

    return [f"{way.efficiency[scale]:.1%}" if scale in way.efficiency else "" for scale in SCALES]
