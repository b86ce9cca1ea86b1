"""The parallel layouts of a run, and what each of them costs."""

import timeit
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import (
    DEVICES,
    USUAL_MFU,
    Device,
    bytes_per_second,
    get_device,
    known_device,
)
from llmtrain.errors import UserError
from llmtrain.lab.plan.calibration import calibrate, measured_peak
from llmtrain.lab.plan.speed import (
    Cluster,
    Compute,
    Link,
    Step,
    bytes_sent,
    estimate_compute,
    step_time,
)
from llmtrain.launching.children import gpu_count
from llmtrain.parallel.sharding import Sharding
from llmtrain.training.predicted_memory import Bytes, Memory

# Numbers of processes for which a plan shows the efficiency.
PROCESS_COUNTS = (1, 8, 64, 512, 4096)

# Seconds of the shortest message from one process to another.
NCCL_LATENCY = {"inside": 2e-6, "between": 10e-6}
GLOO_LATENCY = {"inside": 30e-6, "between": 100e-6}
# Seconds for which gloo occupies the processors to send a byte: measured with two processes on two
# cores, torch 2.13.
GLOO_SECONDS_PER_BYTE = 4e-9

# The share of a GPU's memory that tensors cannot have: the context of CUDA and NCCL takes some, and
# the allocator leaves gaps.
_RESERVED_MEMORY = 0.06


class PlanRequest(NamedTuple):
    """A recipe, and the hardware to plan it for.

    Attributes:
        recipe: path of the recipe.
        flags: its flags.
        processes: the number of processes.
        device: name of the device; ``None`` for this machine's.
        link: the rate at which a process sends to another machine, such as ``400Gbit``.
        per_machine: processes of a machine; ``None`` for the usual number.
        mixed_precision: ``no`` or ``bf16``; ``None`` for the device's usual precision.
        mfu: the share of its peak that the device reaches.
        calibrate: measure the seconds of computing on this machine.
    """

    recipe: str
    flags: list[str]
    processes: int = 1
    device: str | None = None
    link: str | None = None
    per_machine: int | None = None
    mixed_precision: str | None = None
    mfu: float = USUAL_MFU
    calibrate: bool = False


class PlannedLayout(NamedTuple):
    """A parallel layout, and its cost.

    Attributes:
        name: such as ``DDP`` or ``HSDP 2 x 8``.
        bytes: memory of the process that holds most.
        fitting: the sizes of a micro-batch that fit, in ascending order. They divide the rows of a
            process.
        largest: the largest of these; 0 if none fits.
        too_large: sizes that do not fit, although larger ones do.
        fits_if_synced: whether nothing fits, but a row would with ``--sync_each_batch``.
        rows: the size of the micro-batch that is planned for.
        accumulation: micro-batches per step.
        step: seconds of a step; ``None`` if the model's FLOPs are unknown.
        tokens_per_second: positions that are computed in a second, on all processes.
        hours: of the full run.
        efficiency: the share of a step in which a process computes, by number of processes. The
            time that gloo takes from the processors to send does not count.
    """

    name: str
    bytes: Bytes
    fitting: list[int]
    largest: int
    too_large: list[int]
    fits_if_synced: bool
    rows: int
    accumulation: int
    step: Step | None
    tokens_per_second: float
    hours: float
    efficiency: dict[int, float]


class Plan(NamedTuple):
    """The parallel layouts in which a model can be trained on some hardware.

    Attributes:
        memory: the model, and the memory that it needs.
        device: the device of each process.
        cluster: the machines and their links.
        compute: how long it takes to compute; ``None`` if the model's FLOPs are unknown.
        layouts: the layouts that are possible.
        left_out: the names of other layouts, each with the reason why it is impossible.
    """

    memory: Memory
    device: Device
    cluster: Cluster
    compute: Compute | None
    layouts: list[PlannedLayout]
    left_out: list[str]


def make_plan(request: PlanRequest) -> Plan:
    """Return the layouts in which a recipe can be trained, and what they cost.

    Raises:
        UserError: if no layout is possible, or if the recipe cannot be planned.
    """
    _check(request)
    device, cluster = _hardware(request)
    precision = request.mixed_precision or ("bf16" if cluster.nccl else "no")
    memory = Memory.of_recipe(request.recipe, request.flags, precision, on_gpu=cluster.nccl)
    plan = Plan(
        memory=memory,
        device=device,
        cluster=cluster,
        compute=_compute(request, memory, device, cluster),
        layouts=[],
        left_out=[],
    )

    layouts = []
    left_out = []
    for name, sharding in _shardings(request.processes, cluster.per_machine):
        try:
            layouts.append(_plan_layout(name, sharding, plan))
        except UserError as error:
            left_out.append(f"{name}: {error}")
    if not layouts:
        raise UserError(f"this run cannot be planned: {'; '.join(left_out)}")
    return plan._replace(layouts=layouts, left_out=left_out)


def _check(request: PlanRequest) -> None:
    if request.processes < 1:
        raise UserError(f"--processes {request.processes}: use at least one process.")
    if request.per_machine is not None and request.per_machine < 1:
        raise UserError(f"--per_machine {request.per_machine}: a machine has at least one process.")

    if not 0 < request.mfu <= 1:
        raise UserError(
            f"--mfu {request.mfu}: write a fraction of the peak, above 0 and at most 1."
        )


# --- hardware


def _hardware(request: PlanRequest) -> tuple[Device, Cluster]:
    """Return the device of each process, and the machines.

    Raises:
        UserError: if the device or a link is unknown.
    """
    name = device_name(request.device)
    is_gpu = name.lower() != "cpu"
    if is_gpu:
        device = get_device(name)
        per_machine = request.per_machine or device.per_machine
    else:
        per_machine = request.per_machine or 1
        device = _this_cpu(per_machine, request.mixed_precision)

    if request.processes > per_machine and not request.link:
        raise UserError(
            f"--processes {request.processes} takes several machines with {per_machine} processes "
            "each: add the rate at which a process sends to another machine, such as "
            "--link 400Gbit."
        )
    is_this_device = gpu_count() > 0 and known_device(torch.cuda.get_device_name()) == name.lower()
    if request.calibrate and is_gpu and not is_this_device:
        raise UserError(
            f"--calibrate runs steps on this machine, which has no {name}; use --mfu instead."
        )

    latency = NCCL_LATENCY if is_gpu else GLOO_LATENCY
    bandwidth_between = bytes_per_second(request.link) if request.link else device.link
    cluster = Cluster(
        per_machine=per_machine,
        inside=Link(bandwidth=device.link, latency=latency["inside"]),
        between=Link(bandwidth=bandwidth_between, latency=latency["between"]),
        nccl=is_gpu,
    )
    return device, cluster


def device_name(requested: str | None) -> str:
    """Return the name of the device to plan for: this machine's, if none is requested.

    Raises:
        UserError: if this machine's GPU is unknown.
    """
    if requested:
        return requested
    if gpu_count() == 0:
        return "cpu"

    title = torch.cuda.get_device_name()
    name = known_device(title)
    if name is None:
        raise UserError(
            f"this machine's {title} is unknown; choose a device with --device: "
            f"{', '.join(DEVICES)}, or cpu."
        )
    return name


def _this_cpu(processes: int, precision: str | None) -> Device:
    """Measure this machine's CPU, and divide it among some processes."""
    source = torch.ones(1 << 24)
    target = torch.empty(1 << 24)
    copy_seconds = min(timeit.repeat(lambda: target.copy_(source), number=1))
    memory_bandwidth = 2 * source.nbytes / copy_seconds  # read and written

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    peak = measured_peak(torch.device("cpu"), dtype)
    return Device(
        title="cpu",
        peak=peak / processes,
        memory=psutil.virtual_memory().total / processes,
        memory_bandwidth=memory_bandwidth / processes,
        link=memory_bandwidth / 4,
    )


def _compute(
    request: PlanRequest, memory: Memory, device: Device, cluster: Cluster
) -> Compute | None:
    """Return the seconds of computing, or ``None`` if the FLOPs are unknown."""
    if request.calibrate:
        data = memory.recipe.settings.data
        trained = [parameter for parameter in memory.parameters if parameter.is_trained]
        return calibrate(
            request.recipe,
            request.flags,
            processes=min(request.processes, cluster.per_machine, gpu_count() or request.processes),
            rows=min(data.per_device_train_batch_size, data.global_batch_size),
            precision=memory.recipe.precision,
            trained_numel=sum(parameter.numel() for parameter in trained),
        )

    compute = estimate_compute(memory, device, request.mfu)
    if compute is None or cluster.nccl:
        return compute
    return compute._replace(per_sent_byte=GLOO_SECONDS_PER_BYTE)


# --- layouts


def _shardings(processes: int, per_machine: int) -> Iterator[tuple[str, Sharding]]:
    """Yield how a model can be divided among processes, each with its name."""
    if processes == 1:
        yield "one process", Sharding(replicas=1, shards=1)
        return

    yield "DDP", Sharding(replicas=processes, shards=1)
    yield "FSDP2", Sharding(replicas=1, shards=processes)
    machines = processes // per_machine
    if machines > 1 and per_machine > 1 and processes % per_machine == 0:
        yield f"HSDP {machines} x {per_machine}", Sharding(replicas=machines, shards=per_machine)


def _plan_layout(name: str, sharding: Sharding, plan: Plan) -> PlannedLayout:
    """Return a layout with its cost.

    Raises:
        UserError: if the global batch cannot be divided among the processes.
    """
    memory = plan.memory
    settings = memory.recipe.settings
    global_batch = settings.data.global_batch_size
    processes = sharding.processes
    if global_batch % processes != 0:
        divisible = -(-global_batch // processes) * processes
        raise UserError(
            f"--global_batch_size {global_batch} cannot be divided among {processes} processes; "
            f"use {divisible}."
        )

    share = global_batch // processes
    device_bytes = plan.device.memory * (1 - _RESERVED_MEMORY)
    fitting = memory.fitting(sharding, share, device_bytes)
    largest = max(fitting, default=0)
    rows = _micro_batch_size(share, settings.data.per_device_train_batch_size, fitting)
    accumulation = share // rows
    layout = PlannedLayout(
        name=name,
        bytes=memory.bytes_of(sharding, rows, accumulation),
        fitting=fitting,
        largest=largest,
        too_large=[size for size in _divisors(share) if size < largest and size not in fitting],
        fits_if_synced=not fitting and memory.fits_if_synced(sharding, share, device_bytes),
        rows=rows,
        accumulation=accumulation,
        step=None,
        tokens_per_second=0.0,
        hours=0.0,
        efficiency={},
    )
    if plan.compute is None:
        return layout

    step = step_time(
        memory,
        plan.compute,
        plan.cluster,
        sharding,
        rows=rows,
        accumulation=accumulation,
    )
    return layout._replace(
        step=step,
        tokens_per_second=global_batch * memory.recipe.positions / step.total,
        hours=settings.optim.max_steps * step.total / 3600,
        efficiency=_efficiency(
            plan,
            plan.compute,
            sharding,
            rows=rows,
            accumulation=accumulation,
        ),
    )


def _micro_batch_size(share: int, requested: int, fitting: list[int]) -> int:
    """Return the size of the micro-batch to plan for.

    It is the largest fitting size up to the requested one, or else the smallest fitting size. If
    nothing fits, the plan shows what the requested size would need.

    Args:
        share: rows of the global batch that a process has.
        requested: the size that the recipe asks for.
        fitting: the sizes that fit.
    """
    candidates = fitting or _divisors(share)
    not_above = [rows for rows in candidates if rows <= requested]
    return max(not_above) if not_above else min(candidates)


def _divisors(share: int) -> list[int]:
    return [rows for rows in range(1, share + 1) if share % rows == 0]


def _efficiency(
    plan: Plan,
    compute: Compute,
    sharding: Sharding,
    *,
    rows: int,
    accumulation: int,
) -> dict[int, float]:
    """Return the share of a step in which a process computes, by number of processes.

    Args:
        plan: the hardware.
        compute: how long it takes to compute.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
    """
    efficiency = {}
    for processes in PROCESS_COUNTS:
        spread = _with_processes(sharding, processes, plan.cluster.per_machine)
        step = step_time(plan.memory, compute, plan.cluster, spread, rows, accumulation)
        sent = bytes_sent(plan.memory, spread, accumulation)
        computing = step.compute - compute.per_sent_byte * sent
        efficiency[processes] = computing / step.total
    return efficiency


def _with_processes(sharding: Sharding, processes: int, per_machine: int) -> Sharding:
    """Return the same kind of sharding for another number of processes."""
    if sharding.shards == 1:
        shards = 1
    elif sharding.replicas == 1:
        shards = processes
    else:
        shards = min(processes, per_machine)
    return replace(sharding, replicas=processes // shards, shards=shards)
