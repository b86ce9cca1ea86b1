"""Say what a run would need before it is paid for: bytes a process, the largest micro-batch, seconds an update and
hours, for each way to spread the model over the processes. Nothing is trained, and no weight is in memory."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from llmtrain.commands.trial import check_recipe, gpus
from llmtrain.devices import Device, bytes_per_second, device_called
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from llmtrain.parallel.fsdp import Sharding
    from llmtrain.plan.memory import Bytes, Memory
    from llmtrain.plan.speed import Cluster, Compute, Step

_GIB = 2**30
_SCALES = (1, 8, 64, 512, 4096)
_MFU = 0.4
_HOP = {"inside": 2e-6, "between": 10e-6}  # seconds from one GPU to another under NCCL
_GLOO_HOP = {"inside": 30e-6, "between": 100e-6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe's file; other flags are the recipe's")
    _add_options(parser)
    options = type(parser)(prog=parser.prog, add_help=False, allow_abbrev=False)
    _add_options(options)  # which may also stand behind the recipe
    parser.set_defaults(options=options)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="one a device (default: %(default)s)")
    parser.add_argument("--device", metavar="NAME", help="such as h100-80gb, or cpu (default: what is here)")
    parser.add_argument("--link", metavar="RATE", help="what a process sends to another machine, such as 400Gbit")
    parser.add_argument("--per_machine", type=int, metavar="N", help="processes of a machine (default: the usual)")
    parser.add_argument("--tensor", type=int, metavar="N", help="processes that cut matrices (default: a machine's)")
    parser.add_argument("--stages", type=int, metavar="N", help="of a pipeline (default: as many, where layers allow)")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], help="(default: bf16 on a GPU)")
    parser.add_argument(
        "--mfu", type=float, default=_MFU, metavar="X", help="share of the device's arithmetic (default: %(default)s)"
    )
    parser.add_argument("--calibrate", action="store_true", help="take some real steps here, instead of --mfu")
    parser.add_argument("--json", action="store_true", help="print it for a program")


class Way(NamedTuple):
    """One way to spread the model, and what it would cost."""

    name: str
    bytes: "Bytes"
    largest: int  # rows of a micro-batch; 0 where not one fits
    rows: int
    accumulation: int
    step: "Step | None"  # unknown where the model's arithmetic is
    tokens_per_second: float
    hours: float
    efficiency: dict[int, float]


class Hardware(NamedTuple):
    name: str
    device: Device
    cluster: "Cluster"
    is_gpu: bool


def run(arguments: argparse.Namespace) -> None:
    check_recipe(arguments.recipe)
    _, arguments.flags = arguments.options.parse_known_args(arguments.flags, arguments)
    if arguments.processes < 1:
        raise UserError(f"--processes {arguments.processes}: there must be one or more.")
    if not 0 < arguments.mfu <= 1:
        raise UserError(f"--mfu {arguments.mfu} is a share, above 0 and at most 1.")
    hardware = _hardware(arguments)
    from llmtrain.plan.memory import Memory
    from llmtrain.plan.subject import subject_of

    precision = arguments.mixed_precision or ("bf16" if hardware.is_gpu else "no")
    subject = subject_of(arguments.recipe, arguments.flags, precision)
    memory = Memory(subject, hardware.is_gpu)
    compute = _compute(arguments, memory, hardware)
    ways, refused = _ways(arguments, memory, hardware, compute)
    if not ways:
        raise UserError(f"there is no way to train this: {'; '.join(refused)}")
    if arguments.json:
        print(json.dumps({"ways": [_plain(way) for way in ways], "refused": refused}, indent=1))
    else:
        _print(arguments, memory, hardware, compute, ways, refused)


def _hardware(arguments: argparse.Namespace) -> Hardware:
    import torch

    from llmtrain.plan.speed import Cluster, Link

    name = arguments.device or (_device_here() if gpus() else "cpu")
    is_gpu = name.lower() != "cpu"
    per_machine = arguments.per_machine or (device_called(name).per_machine if is_gpu else 1)
    device = device_called(name) if is_gpu else _this_cpu(per_machine, arguments.mixed_precision)
    hop = _HOP if is_gpu else _GLOO_HOP
    if arguments.processes > per_machine and not arguments.link:
        raise UserError(
            f"{arguments.processes} processes are more than a machine has ({per_machine}): say what each sends to "
            "another, such as --link 400Gbit."
        )
    between = bytes_per_second(arguments.link) if arguments.link else device.link
    inside = Link(device.link, hop["inside"])
    if arguments.calibrate and is_gpu and (not gpus() or device.title not in torch.cuda.get_device_name()):
        raise UserError(f"--calibrate takes steps on this machine, which has no {name}; leave it out, and say --mfu.")
    return Hardware(name, device, Cluster(per_machine, inside, Link(between, hop["between"]), is_gpu), is_gpu)


def _device_here() -> str:
    import torch

    from llmtrain.devices import DEVICES

    title = torch.cuda.get_device_name()
    known = next((name for name, device in DEVICES.items() if device.title in title), None)
    if known is None:
        raise UserError(f"{title} is not known; name one with --device: {', '.join(DEVICES)}, or cpu.")
    return known


def _this_cpu(processes: int, precision: str | None) -> Device:
    """What this machine has, shared out; measured, as there are no data sheets of it."""
    import time

    import psutil
    import torch

    from llmtrain.observe.throughput import measured_peak

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    source, target = torch.ones(1 << 24), torch.empty(1 << 24)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    copied = 2 * source.nbytes / best
    peak, memory = measured_peak(torch.device("cpu"), dtype), psutil.virtual_memory().total
    return Device("cpu", peak / processes, memory / processes, copied / processes, copied / 4)


def _compute(arguments: argparse.Namespace, memory: "Memory", hardware: Hardware) -> "Compute | None":
    """Seconds of a row; ``None`` where nobody knows the model's arithmetic."""
    from llmtrain.plan.calibration import calibrated
    from llmtrain.plan.speed import Compute, estimated

    subject = memory.subject
    if arguments.calibrate:
        count = min(arguments.processes, hardware.cluster.per_machine, gpus() or arguments.processes)
        rows = min(subject.settings.per_device_train_batch_size, subject.settings.global_batch_size)
        return calibrated(arguments.recipe, arguments.flags, count, rows, subject.precision)
    found: Compute | None = estimated(memory, hardware.device, arguments.mfu)
    return found


def _ways(
    arguments: argparse.Namespace, memory: "Memory", hardware: Hardware, compute: "Compute | None"
) -> tuple[list[Way], list[str]]:
    ways, refused = [], []
    for name, sharding in _shardings(arguments, memory, hardware):
        try:
            ways.append(_way(name, sharding, memory, hardware, compute))
        except UserError as error:
            refused.append(f"{name}: {error}")
    return ways, refused


def _shardings(arguments: argparse.Namespace, memory: "Memory", hardware: Hardware) -> list[tuple[str, "Sharding"]]:
    from llmtrain.parallel.fsdp import Sharding

    processes, per_machine = arguments.processes, hardware.cluster.per_machine
    if processes == 1:
        return [("one process", Sharding(1, 1))]
    found = [("DDP", Sharding(processes, 1)), ("FSDP2", Sharding(1, processes))]
    machines = processes // per_machine
    if machines > 1 and per_machine > 1 and processes % per_machine == 0:
        found.append((f"HSDP {machines} x {per_machine}", Sharding(machines, per_machine)))
    limit = min(per_machine if per_machine > 1 else processes, processes)
    fitting = [n for n in range(limit, 1, -1) if processes % n == 0 and _divides(memory, n)]
    cut = arguments.tensor or next(iter(fitting), limit)
    if cut > 1:
        rest = processes // cut
        found.append((f"TP {cut}" + (f" x FSDP2 {rest}" if rest > 1 else ""), Sharding(1, rest, tensor=cut)))
    if hasattr(memory.subject.model, "stages_of"):
        stages = arguments.stages or getattr(memory.subject.settings, "pipeline_stages", 1)
        if stages == 1:
            stages = _most(min(memory.subject.blocks, per_machine if per_machine > 1 else processes), processes)
        if stages > 1:
            rest = processes // stages
            found.append((f"PP {stages}" + (f" x DP {rest}" if rest > 1 else ""), Sharding(rest, 1, stages=stages)))
    return found


def _divides(memory: "Memory", count: int) -> bool:
    try:
        return bool(memory.parts(count))
    except UserError:
        return False


def _most(limit: int, of: int) -> int:
    return max(n for n in range(1, limit + 1) if of % n == 0)


def _way(name: str, sharding: "Sharding", memory: "Memory", hardware: Hardware, compute: "Compute | None") -> Way:
    from llmtrain.plan.memory import room_of
    from llmtrain.plan.speed import step_time

    settings = memory.subject.settings
    replicas = sharding.processes // sharding.together
    if settings.global_batch_size % replicas:
        raise UserError(
            f"--global_batch_size {settings.global_batch_size} does not divide among {replicas} groups that each have "
            f"rows of their own; {-(-settings.global_batch_size // replicas) * replicas} would."
        )
    share = settings.global_batch_size // replicas
    asked = min(settings.per_device_train_batch_size, share)
    largest = memory.largest(sharding, share, room_of(hardware.device.memory))
    rows = max(n for n in range(1, min(asked, largest or asked) + 1) if share % n == 0)
    accumulation = share // rows
    held = memory.of(sharding, rows, accumulation)
    if compute is None:
        return Way(name, held, largest, rows, accumulation, None, 0.0, 0.0, {})
    step = step_time(memory, compute, hardware.cluster, sharding, rows, accumulation)
    tokens = settings.global_batch_size * memory.subject.positions
    alone = rows * accumulation * (compute.forward + compute.backward)
    alone += compute.optimizer + compute.whole + compute.other
    efficiency = {}
    for processes in _SCALES:
        groups = processes // sharding.together
        if groups:
            scaled = _scaled(sharding, groups, hardware.cluster.per_machine)
            seconds = step_time(memory, compute, hardware.cluster, scaled, rows, accumulation).total
            efficiency[processes] = alone / sharding.together / seconds
    return Way(
        name,
        held,
        largest,
        rows,
        accumulation,
        step,
        tokens / step.total,
        settings.max_steps * step.total / 3600,
        efficiency,
    )


def _scaled(sharding: "Sharding", groups: int, per_machine: int) -> "Sharding":
    """The same way over more processes, or fewer: so many groups that each have rows of their own."""
    from llmtrain.parallel.fsdp import Sharding

    if sharding.shards == 1:
        shards = 1
    elif sharding.replicas == 1:
        shards = groups
    else:
        shards = min(groups, per_machine)
    return Sharding(groups // shards, shards, tensor=sharding.tensor, stages=sharding.stages)


def _plain(way: Way) -> dict[str, Any]:
    plain = way._asdict() | {"bytes": way.bytes._asdict()}
    if way.step is not None:
        plain["step"] = {**way.step._asdict(), "total": way.step.total}
    return plain


def _print(
    arguments: argparse.Namespace,
    memory: "Memory",
    hardware: Hardware,
    compute: "Compute | None",
    ways: list[Way],
    refused: list[str],
) -> None:
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
        print(f"\n{'efficiency at':<{width}}" + "".join(f"{scale:>13,}" for scale in _SCALES))
        for way in ways:
            shares = (way.efficiency.get(scale) for scale in _SCALES)
            print(f"{way.name:<{width}}" + "".join(f"{'' if s is None else f'{s:.1%}':>13}" for s in shares))
    else:
        print("\nnot every token meets every weight of this model, so its speed is unknown: --calibrate measures it")
    for reason in refused:
        print(f"left out: {reason}", file=sys.stderr)
