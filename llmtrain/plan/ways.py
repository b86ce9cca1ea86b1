"""The ways to spread a model over processes, and what each would cost."""

import time
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import DEVICES, USUAL_MFU, Device, bytes_per_second, device_called
from llmtrain.errors import UserError
from llmtrain.launch.children import gpus
from llmtrain.observe.throughput import measured_peak
from llmtrain.parallel.fsdp import Sharding
from llmtrain.plan.calibration import calibrated
from llmtrain.plan.memory import Bytes, Memory, room_of
from llmtrain.plan.speed import Cluster, Compute, Link, Step, estimated, step_time
from llmtrain.plan.subject import subject_of

SCALES = (1, 8, 64, 512, 4096)
NCCL_HOP = {"inside": 2e-6, "between": 10e-6}  # seconds from one process to another
GLOO_HOP = {"inside": 30e-6, "between": 100e-6}
GLOO_HANDLING = 4e-9  # seconds of a byte: two processes on two cores, torch 2.13


class Asked(NamedTuple):
    """Of a plan."""

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
    """One way to spread the model, and what it would cost."""

    name: str
    bytes: Bytes
    largest: int  # rows of a micro-batch; 0 where not one fits
    rows: int
    accumulation: int
    step: Step | None  # unknown where the model's arithmetic is
    tokens_per_second: float
    hours: float
    efficiency: dict[int, float]


class Hardware(NamedTuple):
    name: str
    device: Device
    cluster: Cluster
    is_gpu: bool


class Plan(NamedTuple):
    memory: Memory
    hardware: Hardware
    compute: Compute | None  # unknown where the model's arithmetic is
    ways: list[Way]
    left_out: list[str]  # and why


def plan(asked: Asked) -> Plan:
    """Raises :class:`UserError` where the recipe cannot be trained so, or there is no way to."""
    if asked.processes < 1:
        raise UserError(f"--processes {asked.processes}: there must be one or more.")
    for name, count in (("tensor", asked.tensor or 1), ("stages", asked.stages or 1)):
        if count < 1 or asked.processes % count:
            raise UserError(f"--{name} {count} does not divide --processes {asked.processes}.")
    if not 0 < asked.mfu <= 1:
        raise UserError(f"--mfu {asked.mfu} is a share, above 0 and at most 1.")
    hardware = _hardware(asked)
    precision = asked.mixed_precision or ("bf16" if hardware.is_gpu else "no")
    memory = Memory(subject_of(asked.recipe, asked.flags, precision), hardware.is_gpu)
    compute = _compute(asked, memory, hardware)
    ways, left_out = _ways(asked, memory, hardware, compute)
    if not ways:
        raise UserError(f"there is no way to train this: {'; '.join(left_out)}")
    return Plan(memory, hardware, compute, ways, left_out)


def _hardware(asked: Asked) -> Hardware:
    name = asked.device or (_device_here() if gpus() else "cpu")
    is_gpu = name.lower() != "cpu"
    per_machine = asked.per_machine or (device_called(name).per_machine if is_gpu else 1)
    device = device_called(name) if is_gpu else _this_cpu(per_machine, asked.mixed_precision)
    hop = NCCL_HOP if is_gpu else GLOO_HOP
    if asked.processes > per_machine and not asked.link:
        raise UserError(
            f"{asked.processes} processes are more than a machine has ({per_machine}): say what each sends to "
            "another, such as --link 400Gbit."
        )
    between = bytes_per_second(asked.link) if asked.link else device.link
    inside = Link(device.link, hop["inside"])
    if asked.calibrate and is_gpu and (not gpus() or device.title not in torch.cuda.get_device_name()):
        raise UserError(f"--calibrate takes steps on this machine, which has no {name}; leave it out, and say --mfu.")
    return Hardware(name, device, Cluster(per_machine, inside, Link(between, hop["between"]), is_gpu), is_gpu)


def _device_here() -> str:
    title = torch.cuda.get_device_name()
    known = next((name for name, device in DEVICES.items() if device.title in title), None)
    if known is None:
        raise UserError(f"{title} is not known; name one with --device: {', '.join(DEVICES)}, or cpu.")
    return known


def _this_cpu(processes: int, precision: str | None) -> Device:
    """What this machine has, shared out; measured, as there are no data sheets of it."""
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


def _compute(asked: Asked, memory: Memory, hardware: Hardware) -> Compute | None:
    """Seconds of a row; ``None`` where nobody knows the model's arithmetic."""
    subject = memory.subject
    if asked.calibrate:
        count = min(asked.processes, hardware.cluster.per_machine, gpus() or asked.processes)
        rows = min(subject.settings.per_device_train_batch_size, subject.settings.global_batch_size)
        numbers = sum(part.numbers() for part in memory.parts(1) if part.is_trained)
        return calibrated(asked.recipe, asked.flags, count, rows, subject.precision, numbers)
    found = estimated(memory, hardware.device, asked.mfu)
    return found if found is None or hardware.is_gpu else found._replace(handling=GLOO_HANDLING)


def _ways(asked: Asked, memory: Memory, hardware: Hardware, compute: Compute | None) -> tuple[list[Way], list[str]]:
    ways, left_out = [], []
    for name, sharding in _shardings(asked, memory, hardware):
        try:
            ways.append(_way(name, sharding, memory, hardware, compute))
        except UserError as error:
            left_out.append(f"{name}: {error}")
    return ways, left_out


def _shardings(asked: Asked, memory: Memory, hardware: Hardware) -> list[tuple[str, Sharding]]:
    processes, per_machine = asked.processes, hardware.cluster.per_machine
    if processes == 1:
        return [("one process", Sharding(1, 1))]
    found = [("DDP", Sharding(processes, 1)), ("FSDP2", Sharding(1, processes))]
    machines = processes // per_machine
    if machines > 1 and per_machine > 1 and processes % per_machine == 0:
        found.append((f"HSDP {machines} x {per_machine}", Sharding(machines, per_machine)))
    limit = min(per_machine if per_machine > 1 else processes, processes)
    fitting = [n for n in range(limit, 1, -1) if processes % n == 0 and _divides(memory, n)]
    cut = asked.tensor or next(iter(fitting), limit)
    if cut > 1:
        rest = processes // cut
        found.append((f"TP {cut}" + (f" x FSDP2 {rest}" if rest > 1 else ""), Sharding(1, rest, tensor=cut)))
    if hasattr(memory.subject.model, "stages_of"):
        stages = asked.stages or memory.subject.settings.pipeline_stages
        if stages == 1:
            stages = _most(min(memory.subject.blocks, per_machine if per_machine > 1 else processes), processes)
        if stages > 1:
            rest = processes // stages
            found.append((f"PP {stages}" + (f" x DP {rest}" if rest > 1 else ""), Sharding(rest, 1, stages=stages)))
    return found


def _divides(memory: Memory, count: int) -> bool:
    try:
        return bool(memory.parts(count))
    except UserError:
        return False


def _most(limit: int, of: int) -> int:
    return max(n for n in range(1, limit + 1) if of % n == 0)


def _way(name: str, sharding: Sharding, memory: Memory, hardware: Hardware, compute: Compute | None) -> Way:
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
    for processes in SCALES:
        groups = processes // sharding.together
        if groups:
            scaled = _scaled(sharding, groups, hardware.cluster.per_machine)
            seconds = step_time(memory, compute, hardware.cluster, scaled, rows, accumulation).total
            efficiency[processes] = alone / sharding.together / seconds
    hours = settings.max_steps * step.total / 3600
    return Way(name, held, largest, rows, accumulation, step, tokens / step.total, hours, efficiency)


def _scaled(sharding: Sharding, groups: int, per_machine: int) -> Sharding:
    """The same way over more processes, or fewer: so many groups that each have rows of their own."""
    if sharding.shards == 1:
        shards = 1
    elif sharding.replicas == 1:
        shards = groups
    else:
        shards = min(groups, per_machine)
    return Sharding(groups // shards, shards, tensor=sharding.tensor, stages=sharding.stages)
