"""The ways to spread a model over processes, and their cost."""

import timeit
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import DEVICES, USUAL_MFU, Device, bytes_per_second, device_called
from llmtrain.errors import UserError
from llmtrain.launching.children import gpus
from llmtrain.observe.throughput import measured_peak
from llmtrain.parallel.mesh import Sharding
from llmtrain.plan import pipeline
from llmtrain.plan.calibration import calibrated
from llmtrain.plan.memory import Bytes, Memory
from llmtrain.plan.speed import Cluster, Compute, Link, Step, estimated, step_time
from llmtrain.plan.subject import subject_of

SCALES = (1, 8, 64, 512, 4096)
NCCL_HOP = {"inside": 2e-6, "between": 10e-6}  # seconds from one process to another
GLOO_HOP = {"inside": 30e-6, "between": 100e-6}
GLOO_HANDLING = 4e-9  # seconds of a byte: two processes on two cores, torch 2.13
_FREE = 0.06  # of a GPU: the context of CUDA and NCCL, and what its allocator cannot fit into


class Asked(NamedTuple):
    """A recipe, and the hardware to plan it for."""

    recipe: str
    flags: list[str]
    processes: int = 1
    device: str | None = None
    link: str | None = None
    per_machine: int | None = None
    tensor: int | None = None
    stages: int | None = None
    mixed_precision: str | None = None
    mfu: float = USUAL_MFU
    calibrate: bool = False


class Way(NamedTuple):
    """One way to spread the model, and its cost."""

    name: str
    bytes: Bytes
    fitting: list[
        int
    ]  # sizes of a micro-batch that fit, ascending; they divide the rows of a process
    largest: int  # of these; 0 if none fits
    too_large: list[int]  # sizes below the largest that do not fit
    rows: int  # of the micro-batch that is planned for
    accumulation: int
    step: Step | None  # unknown if the model's arithmetic is
    tokens_per_second: float
    hours: float
    efficiency: dict[int, float]


class Plan(NamedTuple):
    """Some hardware, and the ways to train a subject on it."""

    memory: Memory
    device: Device
    cluster: Cluster
    compute: Compute | None  # unknown where the model's arithmetic is
    ways: list[Way]
    left_out: list[str]  # and why


def plan(asked: Asked) -> Plan:
    """Return the ways to train a recipe, and their cost.

    Raises:
        UserError: There is no way, or the recipe cannot be planned.
    """
    if asked.processes < 1:
        raise UserError(f"--processes {asked.processes}: there must be one or more.")
    for name, count in (("tensor", asked.tensor), ("stages", asked.stages)):
        if count is not None and (count < 1 or asked.processes % count != 0):
            raise UserError(f"--{name} {count} does not divide --processes {asked.processes}.")
    if not 0 < asked.mfu <= 1:
        raise UserError(f"--mfu {asked.mfu} is a share, above 0 and at most 1.")

    device, cluster = _hardware(asked)
    precision = asked.mixed_precision or ("bf16" if cluster.nccl else "no")
    memory = Memory(subject_of(asked.recipe, asked.flags, precision), cluster.nccl)
    result = Plan(
        memory=memory,
        device=device,
        cluster=cluster,
        compute=_compute(asked, memory, device, cluster),
        ways=[],
        left_out=[],
    )
    for name, sharding in _shardings(asked, memory, cluster.per_machine):
        try:
            result.ways.append(_way(name, sharding, result))
        except UserError as error:
            result.left_out.append(f"{name}: {error}")

    if not result.ways:
        raise UserError(f"there is no way to train this: {'; '.join(result.left_out)}")
    return result


def _hardware(asked: Asked) -> tuple[Device, Cluster]:
    name = device_name(asked.device)
    is_gpu = name.lower() != "cpu"
    per_machine = asked.per_machine or (device_called(name).per_machine if is_gpu else 1)
    device = device_called(name) if is_gpu else _this_cpu(per_machine, asked.mixed_precision)
    if asked.processes > per_machine and not asked.link:
        raise UserError(
            f"{asked.processes} processes are more than a machine has ({per_machine}): say what each sends to "
            "another, such as --link 400Gbit."
        )

    is_here = gpus() > 0 and device.title in torch.cuda.get_device_name()
    if asked.calibrate and is_gpu and not is_here:
        raise UserError(
            f"--calibrate takes steps on this machine, which has no {name}; leave it out, and say --mfu."
        )

    hop = NCCL_HOP if is_gpu else GLOO_HOP
    between_machines = bytes_per_second(asked.link) if asked.link else device.link
    cluster = Cluster(
        per_machine=per_machine,
        inside=Link(device.link, hop["inside"]),
        between=Link(between_machines, hop["between"]),
        nccl=is_gpu,
    )
    return device, cluster


def device_name(asked: str | None) -> str:
    """Return the name of the device to plan for: ``asked``, or the one of this machine.

    Raises:
        UserError: This machine's GPU is unknown.
    """
    if asked:
        return asked
    if gpus() == 0:
        return "cpu"

    title = torch.cuda.get_device_name()
    known = next((name for name, device in DEVICES.items() if device.title in title), None)
    if known is None:
        raise UserError(
            f"{title} is not known; name one with --device: {', '.join(DEVICES)}, or cpu."
        )
    return known


def _this_cpu(processes: int, precision: str | None) -> Device:
    """Measure this machine, of which there are no data sheets, and share it out."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    source, target = torch.ones(1 << 24), torch.empty(1 << 24)
    copied = (
        2 * source.nbytes / min(timeit.repeat(lambda: target.copy_(source), number=1))
    )  # the best of five
    peak, memory = measured_peak(torch.device("cpu"), dtype), psutil.virtual_memory().total
    return Device("cpu", peak / processes, memory / processes, copied / processes, copied / 4)


def _compute(asked: Asked, memory: Memory, device: Device, cluster: Cluster) -> Compute | None:
    subject, data = memory.subject, memory.subject.settings.data
    if asked.calibrate:
        count = min(asked.processes, cluster.per_machine, gpus() or asked.processes)
        rows = min(data.per_device_train_batch_size, data.global_batch_size)
        numbers = sum(part.numbers() for part in memory.parts(1) if part.is_trained)
        return calibrated(asked.recipe, asked.flags, count, rows, subject.precision, numbers)
    found = estimated(memory, device, asked.mfu)
    return found if found is None or cluster.nccl else found._replace(handling=GLOO_HANDLING)


def _shardings(asked: Asked, memory: Memory, per_machine: int) -> Iterator[tuple[str, Sharding]]:
    processes = asked.processes
    if processes == 1:
        yield "one process", Sharding(1, 1)
        return
    yield "DDP", Sharding(processes, 1)
    yield "FSDP2", Sharding(1, processes)
    machines = processes // per_machine
    if machines > 1 and per_machine > 1 and processes % per_machine == 0:
        yield f"HSDP {machines} x {per_machine}", Sharding(machines, per_machine)
    close = min(per_machine, processes) if per_machine > 1 else processes  # that a fast link joins
    fitting = (n for n in range(close, 1, -1) if processes % n == 0 and _divides(memory, n))
    tensor = asked.tensor or next(fitting, close)
    if tensor > 1:
        rest = processes // tensor
        yield (
            f"TP {tensor}" + (f" x FSDP2 {rest}" if rest > 1 else ""),
            Sharding(1, rest, tensor=tensor),
        )
    staged = pipeline.stages_for(memory.subject, processes, close, asked.stages)
    if staged is not None:
        yield (
            f"PP {staged.stages}" + (f" x DP {staged.replicas}" if staged.replicas > 1 else ""),
            staged,
        )


def _divides(memory: Memory, count: int) -> bool:
    """Return whether matrices can be sharded over so many processes."""
    try:
        return bool(memory.parts(count))
    except UserError:
        return False


def _way(name: str, sharding: Sharding, plan: Plan) -> Way:
    """Return what it costs to train with one sharding. Raises :class:`UserError` if the batch does not divide."""
    memory = plan.memory
    settings = memory.subject.settings
    global_batch = settings.data.global_batch_size
    groups = sharding.processes // sharding.model_parallel_size
    if global_batch % groups != 0:
        dividing = -(-global_batch // groups) * groups
        raise UserError(
            f"--global_batch_size {global_batch} does not divide among {groups} groups that each have rows of their "
            f"own; {dividing} would."
        )

    share = global_batch // groups
    fitting = memory.fitting(sharding, share, room=plan.device.memory * (1 - _FREE))
    largest = max(fitting, default=0)
    rows = _micro_batch(share, settings.data.per_device_train_batch_size, fitting)
    accumulation = share // rows
    way = Way(
        name=name,
        bytes=memory.of(sharding, rows, accumulation),
        fitting=fitting,
        largest=largest,
        too_large=[size for size in _divisors(share) if size < largest and size not in fitting],
        rows=rows,
        accumulation=accumulation,
        step=None,
        tokens_per_second=0.0,
        hours=0.0,
        efficiency={},
    )
    if plan.compute is None:
        return way

    step = step_time(memory, plan.compute, plan.cluster, sharding, rows, accumulation)
    return way._replace(
        step=step,
        tokens_per_second=global_batch * memory.subject.positions / step.total,
        hours=settings.optim.max_steps * step.total / 3600,
        efficiency=_efficiency(plan, plan.compute, sharding, rows, accumulation),
    )


def _micro_batch(share: int, wanted: int, fitting: list[int]) -> int:
    """Return the size of a micro-batch to plan for: as many rows as the recipe wants, if they fit.

    If they do not fit, it is the largest size below that does, else the smallest above. If nothing fits, the plan shows
    what the recipe's own size would need.
    """
    candidates = fitting or _divisors(share)
    not_above = [rows for rows in candidates if rows <= wanted]
    return max(not_above) if not_above else min(candidates)


def _divisors(share: int) -> list[int]:
    return [rows for rows in range(1, share + 1) if share % rows == 0]


def _efficiency(
    plan: Plan, compute: Compute, sharding: Sharding, rows: int, accumulation: int
) -> dict[int, float]:
    """Return the share of a step's time that is computing, by number of processes."""
    rows_seconds = rows * accumulation * (compute.forward + compute.backward)
    computing = rows_seconds + compute.optimizer + compute.whole + compute.other

    efficiency = {}
    for processes in SCALES:
        if processes < sharding.model_parallel_size:
            continue
        scaled = _scaled(
            sharding, processes // sharding.model_parallel_size, plan.cluster.per_machine
        )
        step = step_time(plan.memory, compute, plan.cluster, scaled, rows, accumulation)
        efficiency[processes] = computing / sharding.model_parallel_size / step.total
    return efficiency


def _scaled(sharding: Sharding, groups: int, per_machine: int) -> Sharding:
    """Return the same way with so many groups that each have rows of their own."""
    if sharding.shards == 1:
        shards = 1
    elif sharding.replicas == 1:
        shards = groups
    else:
        shards = min(groups, per_machine)
    return replace(sharding, replicas=groups // shards, shards=shards)
