"""The parallel layouts of a run, and what each of them costs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llmtrain.devices import RESERVED_MEMORY, Device
from llmtrain.errors import UserError
from llmtrain.lab.plan.hardware import (
    PlanRequest,
    check_request,
    compute_of,
    cpu_peak,
    hardware_of,
)
from llmtrain.lab.plan.speed import Cluster, Compute, Step, bytes_sent, step_time
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Bytes, Memory
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.recomputation import least_recomputation, recomputed_share

# Numbers of processes for which a plan shows the efficiency.
PROCESS_COUNTS = (1, 8, 64, 512, 4096)


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
        recompute_every: n: blocks 0, n, 2n, ... compute their activations again; 0: no block does.
        step: seconds of a step; ``None`` if the model's FLOPs are unknown.
        tokens_per_second: positions that are computed in a second, on all processes.
        hours: of the full run.
        efficiency: the share of a step in which a process computes, by number of processes, for
            those that the layout can have. The time that gloo takes from the processors to send
            does not count.
    """

    name: str
    bytes: Bytes
    fitting: list[int]
    largest: int
    too_large: list[int]
    fits_if_synced: bool
    rows: int
    accumulation: int
    recompute_every: int
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
    plan = plan_without_layouts(request)
    layouts = []
    left_out = []
    for name, sharding in shardings(request.processes, plan.cluster.per_machine):
        try:
            layouts.append(_plan_layout(name, sharding, plan))
        except UserError as error:
            left_out.append(f"{name}: {error}")
    if not layouts:
        raise UserError(f"this run cannot be planned: {'; '.join(left_out)}")
    return plan._replace(layouts=layouts, left_out=left_out)


def plan_without_layouts(request: PlanRequest) -> Plan:
    """Return the model and the hardware of a plan.

    Raises:
        UserError: if the recipe cannot be planned, or an option is out of range.
    """
    check_request(request)
    device, cluster = hardware_of(request)
    usual_precision = "bf16" if cluster.nccl else "no"
    recipe = build_recipe_model(request.recipe, request.flags, usual_precision)
    if not cluster.nccl:
        device = device._replace(peak=cpu_peak(recipe.precision) / cluster.per_machine)
    memory = Memory.of(recipe, on_gpu=cluster.nccl)
    return Plan(
        memory=memory,
        device=device,
        cluster=cluster,
        compute=compute_of(request, memory, device, cluster),
        layouts=[],
        left_out=[],
    )


# --- layouts


def shardings(processes: int, per_machine: int) -> Iterator[tuple[str, Sharding]]:
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
    device_bytes = plan.device.memory * (1 - RESERVED_MEMORY)
    # With auto, a micro-batch fits if it does when all blocks compute their activations again.
    most = 1 if memory.decides_recomputation else None
    fitting = fitting_sizes(memory, sharding, share, device_bytes, most)
    largest = max(fitting, default=0)
    rows = _micro_batch_size(share, settings.data.per_device_train_batch_size, fitting)
    accumulation = share // rows
    fits_if_synced = False
    if not fitting:
        synced = replace(memory, reduces_once=False)
        needed = synced.bytes_of(sharding, rows=1, accumulation=share, every=most).total
        fits_if_synced = needed <= device_bytes

    every = None
    if memory.decides_recomputation:
        every = least_recomputation(
            memory, sharding, rows=rows, accumulation=accumulation, device_bytes=device_bytes
        ).every
    recompute_every = memory.recipe.recompute_every if every is None else every
    blocks = memory.activations(rows, sharding.is_sharded, every).blocks
    recomputed = recomputed_share(blocks, recompute_every)
    layout = PlannedLayout(
        name=name,
        bytes=memory.bytes_of(sharding, rows, accumulation, every),
        fitting=fitting,
        largest=largest,
        too_large=[size for size in _divisors(share) if size < largest and size not in fitting],
        fits_if_synced=fits_if_synced,
        rows=rows,
        accumulation=accumulation,
        recompute_every=recompute_every,
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
        recomputed_share=recomputed,
    )
    return layout._replace(
        step=step,
        tokens_per_second=global_batch * memory.recipe.rows.positions / step.total,
        hours=settings.optim.max_steps * step.total / 3600,
        efficiency=_efficiency(
            plan,
            plan.compute,
            sharding,
            rows=rows,
            accumulation=accumulation,
            recomputed_share=recomputed,
        ),
    )


def fitting_sizes(
    memory: Memory, sharding: Sharding, share: int, device_bytes: float, every: int | None = None
) -> list[int]:
    """Return the sizes of a micro-batch that fit, in ascending order.

    A smaller micro-batch may need more memory. If a step has several micro-batches, gradients are
    kept between them. A single micro-batch with all rows does not need that.

    Args:
        memory: the model.
        sharding: how processes share the model.
        share: rows of the global batch that a process has. A micro-batch divides them.
        device_bytes: memory of the device.
        every: which blocks compute their activations again, as in :meth:`Memory.activations`.
    """
    sizes = []
    for rows in _divisors(share):
        if memory.bytes_of(sharding, rows, share // rows, every).total <= device_bytes:
            sizes.append(rows)
        elif memory.bytes_of(sharding, rows, 1, every).total > device_bytes:
            # One micro-batch of this size is too large by itself, so larger ones are, too.
            break
    return sizes


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
    recomputed_share: float,
) -> dict[int, float]:
    """Return the share of a step in which a process computes, by number of processes.

    Args:
        plan: the hardware.
        compute: how long it takes to compute.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
        recomputed_share: the share of the blocks that compute their activations again.
    """
    efficiency = {}
    for processes in PROCESS_COUNTS:
        spread = _with_processes(sharding, processes, plan.cluster.per_machine)
        if spread.replicas * spread.shards != processes:
            continue  # HSDP has a replica on each machine, and this is no number of whole machines
        step = step_time(
            plan.memory, compute, plan.cluster, spread, rows, accumulation, recomputed_share
        )
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
