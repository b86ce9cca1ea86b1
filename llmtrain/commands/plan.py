"""Say what a run would need before it is paid for: bytes a process, the largest micro-batch, seconds an update and
hours, for each way to spread the model over the processes. Nothing is trained, and no weight is in memory."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from llmtrain.commands.recipe import own_and_recipes, take_recipe
from llmtrain.devices import USUAL_MFU
from llmtrain.files import json_text

if TYPE_CHECKING:
    from llmtrain.plan.ways import Plan

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    take_recipe(parser, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="one a device (default: %(default)s)")
    parser.add_argument("--device", metavar="NAME", help="such as h100-80gb, or cpu (default: what is here)")
    parser.add_argument("--link", metavar="RATE", help="what a process sends to another machine, such as 400Gbit")
    parser.add_argument("--per_machine", type=int, metavar="N", help="processes of a machine (default: the usual)")
    parser.add_argument("--tensor", type=int, metavar="N", help="processes that cut matrices (default: a machine's)")
    parser.add_argument("--stages", type=int, metavar="N", help="of a pipeline (default: as many, where layers allow)")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], help="(default: bf16 on a GPU)")
    help_mfu = "share of the device's arithmetic (default: %(default)s)"
    parser.add_argument("--mfu", type=float, default=USUAL_MFU, metavar="X", help=help_mfu)
    parser.add_argument("--calibrate", action="store_true", help="take some real steps here, instead of --mfu")
    parser.add_argument("--json", action="store_true", help="print it for a program")


def run(arguments: argparse.Namespace) -> None:
    own_and_recipes(arguments)
    from llmtrain.plan.ways import Asked, plan

    asked = Asked(**{name: value for name, value in vars(arguments).items() if name in Asked._fields})
    found = plan(asked)
    if arguments.json:
        print(json_text(plain(found), indent=1))
    else:
        _print(arguments, found)


def plain(found: "Plan") -> dict[str, Any]:
    """For programs."""
    ways = []
    for way in found.ways:
        step = None if way.step is None else {**way.step._asdict(), "total": way.step.total}
        ways.append(way._asdict() | {"bytes": way.bytes._asdict(), "step": step})
    return {"ways": ways, "left_out": found.left_out}


def _print(arguments: argparse.Namespace, found: "Plan") -> None:
    from llmtrain.plan.ways import SCALES

    memory, hardware, compute, ways, left_out = found
    subject, settings, cluster = memory.subject, memory.subject.settings, hardware.cluster
    every = sum(p.numel() for p in subject.model.parameters())
    trained = sum(p.numel() for p in subject.model.parameters() if p.requires_grad)
    flops = subject.flops_per_token
    kind = getattr(subject.model, "own_class", type(subject.model)).__name__
    share = "" if trained == every else f", {trained:,} of them trained"
    print(f"model     {kind}: {every:,} parameters{share}; {flops / 1e9:.2f} GFLOP a token, forward and backward")
    rows = f"{settings.global_batch_size:,} rows of {subject.positions:,} tokens"
    print(f"run       {settings.max_steps:,} updates of {rows}, {'bf16' if memory.bf16 else 'float32'}")
    links = f"{cluster.inside.bandwidth / 1e9:.4g} GB/s inside, {cluster.between.bandwidth / 1e9:.4g} GB/s to another"
    print(f"devices   {arguments.processes:,} x {hardware.name}, {cluster.per_machine} a machine: {links}")
    if compute is not None:
        said = "measured here" if arguments.calibrate else f"of {arguments.mfu:.0%} of the peak (--mfu)"
        print(f"speed     {compute.forward + compute.backward:.4g} s a row, {said}")
    width = max(len("GiB a process"), *(len(way.name) for way in ways)) + 2
    parts = ways[0].bytes._fields
    print(f"\n{'GiB a process':<{width}}" + "".join(f"{part:>13}" for part in parts) + f"{'largest':>10}")
    for way in ways:
        fits = f"{way.largest} rows" if way.largest else "too much"
        sizes = "".join(f"{size / _GIB:>13.3f}" for size in way.bytes)
        print(f"{way.name:<{width}}{sizes}{fits:>10}")
    if compute is not None:
        heads = ("rows", "computing", "sending", "not hidden", "update", "tokens/s", "hours")
        print(f"\n{'seconds':<{width}}" + "".join(f"{head:>13}" for head in heads))
        for way in ways:
            assert way.step is not None
            numbers = (way.step.compute, way.step.communication, way.step.exposed, way.step.total)
            seconds = "".join(f"{number:>13.4g}" for number in numbers)
            layout = f"{way.accumulation} x {way.rows}"
            print(f"{way.name:<{width}}{layout:>13}{seconds}{way.tokens_per_second:>13,.0f}{way.hours:>13.4g}")
        print(f"\n{'efficiency at':<{width}}" + "".join(f"{scale:>13,}" for scale in SCALES))
        for way in ways:
            shares = (way.efficiency.get(scale) for scale in SCALES)
            print(f"{way.name:<{width}}" + "".join(f"{'' if s is None else f'{s:.1%}':>13}" for s in shares))
    else:
        print("\nnot every token meets every weight of this model, so its speed is unknown: --calibrate measures it")
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
