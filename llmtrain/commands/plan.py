"""Say what a run would need before it is paid for.

These are bytes a process, the largest micro-batch, seconds an update and hours, for each way to spread the model over
the processes. Nothing is trained, and no weight is in memory."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llmtrain.commands._recipe import own_and_recipes, take_recipe
from llmtrain.contract import Facts
from llmtrain.devices import USUAL_MFU
from llmtrain.files import json_text

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

    found = plan(
        Asked(**{name: value for name, value in vars(arguments).items() if name in Asked._fields})
    )
    if arguments.json:
        print(json_text(plain(found), indent=1))
        return
    _print_head(arguments, found)
    _print_tables(found)
    for reason in found.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def plain(found: "Plan") -> Facts:
    """Return a plan for programs."""
    steps = [way.step and way.step._asdict() | {"total": way.step.total} for way in found.ways]
    both = zip(found.ways, steps, strict=True)
    ways = [way._asdict() | {"bytes": way.bytes._asdict(), "step": step} for way, step in both]
    return {"ways": ways, "left_out": found.left_out}


def _print_head(arguments: argparse.Namespace, found: "Plan") -> None:
    from llmtrain.plan.ways import device_name

    subject, cluster, compute = found.memory.subject, found.cluster, found.compute
    parameters, settings = [*subject.model.parameters()], subject.settings
    every, trained = (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
    )
    share = "" if trained == every else f", {trained:,} of them trained"
    flops = f"{subject.flops_per_token / 1e9:.2f} GFLOP a token, forward and backward"
    print(f"model     {subject.kind}: {every:,} parameters{share}; {flops}")
    rows = f"{settings.data.global_batch_size:,} rows of {subject.positions:,} tokens"
    print(
        f"run       {settings.optim.max_steps:,} updates of {rows}, {'bf16' if found.memory.bf16 else 'float32'}"
    )
    links = f"{cluster.inside.bandwidth / 1e9:.4g} GB/s inside, {cluster.between.bandwidth / 1e9:.4g} GB/s to another"
    name = device_name(arguments.device)
    print(f"devices   {arguments.processes:,} x {name}, {cluster.per_machine} a machine: {links}")
    if compute is not None:
        said = (
            "measured here"
            if arguments.calibrate
            else f"of {arguments.mfu:.0%} of the peak (--mfu)"
        )
        print(f"speed     {compute.forward + compute.backward:.4g} s a row, {said}")


def _print_tables(found: "Plan") -> None:
    from llmtrain.plan.ways import SCALES

    width = max(len("GiB a process"), *(len(way.name) for way in found.ways)) + 2

    def table(title: str, heads: Iterable[str], cells: Callable[["Way"], Iterable[str]]) -> None:
        print(f"\n{title:<{width}}" + "".join(f"{head:>13}" for head in heads))
        for way in found.ways:
            print(f"{way.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells(way)))

    def sizes(way: "Way") -> list[str]:
        *parts, total = (f"{size / _GIB:>13.3f}" for size in way.bytes)
        return [*parts, f"{total}{f'{way.largest} rows' if way.largest else 'too much':>10}"]

    def seconds(way: "Way") -> list[str]:
        assert way.step is not None
        numbers = [f"{number:.4g}" for number in (*way.step, way.step.total)]
        return [
            f"{way.accumulation} x {way.rows}",
            *numbers,
            f"{way.tokens_per_second:,.0f}",
            f"{way.hours:.4g}",
        ]

    def shares(way: "Way") -> list[str]:
        return [
            f"{way.efficiency[scale]:.1%}" if scale in way.efficiency else "" for scale in SCALES
        ]

    table(
        "GiB a process", [*found.ways[0].bytes._fields[:-1], f"{'total':>13}{'largest':>10}"], sizes
    )
    if found.compute is None:
        print(
            "\nnot every token meets every weight of this model, so its speed is unknown: --calibrate measures it"
        )
        return
    table(
        "seconds",
        ("rows", "computing", "sending", "not hidden", "update", "tokens/s", "hours"),
        seconds,
    )
    table("efficiency at", (f"{scale:,}" for scale in SCALES), shares)
