"""The ways to spread a model over processes, and their cost."""

import timeit
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import DEVICES, USUAL_MFU, Device, bytes_per_second, device_called
from llmtrain.errors import UserError, require
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
    largest: int  # rows of a micro-batch; 0 where not one fits
    rows: int
    accumulation: int
    step: Step | None  # unknown where the model's arithmetic is
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

    Raises :class:`UserError` where there is no way, or where the recipe cannot be planned.
    """
    require(asked.processes > 0, f"--processes {asked.processes}: there must be one or more.")
    for name, count in (("tensor", asked.tensor or 1), ("stages", asked.stages or 1)):
        if count < 1 or asked.processes % count:
            raise UserError(f"--{name} {count} does not divide --processes {asked.processes}.")
    require(0 < asked.mfu <= 1, f"--mfu {asked.mfu} is a share, above 0 and at most 1.")
    device, cluster = _hardware(asked)
    precision = asked.mixed_precision or ("bf16" if cluster.nccl else "no")
    memory = Memory(subject_of(asked.recipe, asked.flags, precision), cluster.nccl)
    found = Plan(memory, device, cluster, _compute(asked, memory, device, cluster), [], [])
    for name, sharding in _shardings(asked, memory, cluster.per_machine):
        try:
            found.ways.append(_way(name, sharding, found))
        except UserError as error:
            found.left_out.append(f"{name}: {error}")
    require(found.ways, f"there is no way to train this: {'; '.join(found.left_out)}")
    return found


def _hardware(asked: Asked) -> tuple[Device, Cluster]:
    name = device_name(asked.device)
    is_gpu = name.lower() != "cpu"
    per_machine = asked.per_machine or (device_called(name).per_machine if is_gpu else 1)
    device = device_called(name) if is_gpu else _this_cpu(per_machine, asked.mixed_precision)
    hop = NCCL_HOP if is_gpu else GLOO_HOP
    if asked.processes > per_machine and not asked.link:
        raise UserError(
            f"{asked.processes} processes are more than a machine has ({per_machine}): say what each sends to "
            "another, such as --link 400Gbit."
        )
    between = Link(bytes_per_second(asked.link) if asked.link else device.link, hop["between"])
    if (
        asked.calibrate
        and is_gpu
        and (not gpus() or device.title not in torch.cuda.get_device_name())
    ):
        raise UserError(
            f"--calibrate takes steps on this machine, which has no {name}; leave it out, and say --mfu."
        )
    return device, Cluster(per_machine, Link(device.link, hop["inside"]), between, is_gpu)


def device_name(asked: str | None) -> str:
    """Return the name of the device that was asked for, or is here. Raises :class:`UserError` where it is unknown."""
    if asked or not gpus():
        return asked or "cpu"
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
    staged = pipeline.stages_for(memory, processes, close, asked.stages)
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


def _way(name: str, sharding: Sharding, found: Plan) -> Way:
    memory, compute, cluster, settings = (
        found.memory,
        found.compute,
        found.cluster,
        found.memory.subject.settings,
    )
    batch, replicas = settings.data.global_batch_size, sharding.processes // sharding.together
    if batch % replicas:
        raise UserError(
            f"--global_batch_size {batch} does not divide among {replicas} groups that each have rows of their own; "
            f"{-(-batch // replicas) * replicas} would."
        )
    share = batch // replicas
    asked = min(settings.data.per_device_train_batch_size, share)
    largest = memory.largest(sharding, share, found.device.memory * (1 - _FREE))
    rows = max(n for n in range(1, min(asked, largest or asked) + 1) if share % n == 0)
    accumulation = share // rows
    held = memory.of(sharding, rows, accumulation)
    if compute is None:
        return Way(name, held, largest, rows, accumulation, None, 0.0, 0.0, {})

    def step_of(sharding: Sharding) -> Step:
        return step_time(memory, compute, cluster, sharding, rows, accumulation)

    step = step_of(sharding)
    tokens = batch * memory.subject.positions
    alone = rows * accumulation * (compute.forward + compute.backward)
    alone += compute.optimizer + compute.whole + compute.other
    groups = {
        processes: processes // sharding.together
        for processes in SCALES
        if processes >= sharding.together
    }
    scaled = {
        processes: step_of(_scaled(sharding, n, cluster.per_machine))
        for processes, n in groups.items()
    }
    efficiency = {
        processes: alone / sharding.together / step.total for processes, step in scaled.items()
    }
    hours = settings.optim.max_steps * step.total / 3600
    return Way(
        name, held, largest, rows, accumulation, step, tokens / step.total, hours, efficiency
    )


def _scaled(sharding: Sharding, groups: int, per_machine: int) -> Sharding:
    """Return the way over more processes, or fewer: so many groups that each have rows of their own."""
    shards = (
        1
        if sharding.shards == 1
        else groups
        if sharding.replicas == 1
        else min(groups, per_machine)
    )
    return replace(sharding, replicas=groups // shards, shards=shards)
