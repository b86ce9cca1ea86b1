"""The parallel layouts of a run, and what each of them costs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from llmtrain.devices import RESERVED_MEMORY, Device
from llmtrain.errors import UserError
from llmtrain.lab.plan.hardware import PlanRequest, hardware_of, measured_peak
from llmtrain.lab.plan.speed import Cluster, Compute, Step, estimate_compute, step_time
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Bytes, Memory
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.recomputation import least_recomputation


class PlannedLayout(NamedTuple):
    """A parallel layout with its micro-batch, and what it costs.

    Attributes:
        name: such as ``DDP`` or ``HSDP 2 x 8``.
        memory: the memory of the model with the dtypes of this layout.
        sharding: how processes share the model.
        rows: the size of the micro-batch.
        accumulation: micro-batches per step.
        recomputes: whether blocks recompute their activations.
        bytes: memory of the process that holds most.
        step: seconds of a step; ``None`` if the model's FLOPs are unknown.
        largest: the largest micro-batch that fits and divides the rows of a process; 0 if none
            fits, or if that is not asked.
    """

    name: str
    memory: Memory
    sharding: Sharding
    rows: int
    accumulation: int
    recomputes: bool
    bytes: Bytes
    step: Step | None
    largest: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Positions that are computed in a second, on all processes; 0 if that is unknown."""
        recipe = self.memory.recipe
        if self.step is None:
            return 0.0
        return recipe.settings.data.global_batch_size * recipe.rows.positions / self.step.total

    @property
    def hours(self) -> float:
        """Hours of the full run; 0 if they are unknown."""
        steps: int = self.memory.recipe.settings.optim.max_steps
        return 0.0 if self.step is None else steps * self.step.total / 3600


class Plan(NamedTuple):
    """The parallel layouts in which a model can be trained on some hardware.

    Attributes:
        memory: the model, and the memory that it needs.
        device: the device of each process.
        cluster: the machines and their links.
        mfu: the share of its peak that the device reaches.
        layouts: the layouts that are possible.
        left_out: the names of other layouts, each with the reason why it is impossible.
    """

    memory: Memory
    device: Device
    cluster: Cluster
    mfu: float
    layouts: list[PlannedLayout]
    left_out: list[str]

    @property
    def compute(self) -> Compute | None:
        """How long it takes to compute; ``None`` if the model's FLOPs are unknown."""
        return estimate_compute(self.memory, self.device, self.mfu)


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
            layouts.append(_best_layout(plan, name, sharding))
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
    device, cluster = hardware_of(request)
    usual_precision = "bf16" if cluster.nccl else "no"
    recipe = build_recipe_model(request.recipe, request.flags, usual_precision)
    if not cluster.nccl:
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        peak = measured_peak(torch.device("cpu"), dtype)
        device = device._replace(peak=peak / cluster.per_machine)
    memory = Memory.of(recipe, on_gpu=cluster.nccl)
    return Plan(memory, device, cluster, request.mfu, layouts=[], left_out=[])


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


def plan_layout(
    plan: Plan,
    memory: Memory,
    name: str,
    sharding: Sharding,
    *,
    rows: int,
    recomputes: bool | None = None,
) -> PlannedLayout:
    """Return a layout with its cost.

    Args:
        plan: the hardware.
        memory: the memory of the model.
        name: the name of the layout.
        sharding: how processes share the model.
        rows: the size of the micro-batch. It divides the rows of a process.
        recomputes: whether blocks recompute their activations, as in :meth:`Memory.activations`.
    """
    if sharding.is_sharded and memory.has_4bit_base:
        raise UserError("--load_in_4bit weights cannot be sharded")
    if sharding.is_sharded and memory.recipe.settings.parallel.mixed_precision == "fp16":
        raise UserError("--mixed_precision fp16 is not for sharded models")
    accumulation = rows_of_process(memory, sharding.processes) // rows
    layout = PlannedLayout(
        name=name,
        memory=memory,
        sharding=sharding,
        rows=rows,
        accumulation=accumulation,
        recomputes=memory.recipe.recomputes if recomputes is None else recomputes,
        bytes=memory.bytes_of(sharding, rows, accumulation, recomputes),
        step=None,
    )
    compute = estimate_compute(memory, plan.device, plan.mfu)
    if compute is None:
        return layout

    step = step_time(
        memory,
        compute,
        plan.cluster,
        sharding,
        rows=rows,
        accumulation=accumulation,
        recomputes=layout.recomputes,
    )
    return layout._replace(step=step)


def rows_of_process(memory: Memory, processes: int) -> int:
    """Return how many rows of the global batch a process has.

    Raises:
        UserError: if the global batch cannot be divided among the processes.
    """
    global_batch: int = memory.recipe.settings.data.global_batch_size
    if global_batch % processes:
        raise UserError(
            f"--global_batch_size {global_batch} cannot be divided among {processes} processes; "
            f"use {-(-global_batch // processes) * processes}."
        )
    return global_batch // processes


def _best_layout(plan: Plan, name: str, sharding: Sharding) -> PlannedLayout:
    """Return a layout with the micro-batch of the recipe, or a smaller one if only that fits.

    Raises:
        UserError: if the global batch cannot be divided among the processes.
    """
    memory = plan.memory
    share = rows_of_process(memory, sharding.processes)
    device_bytes = plan.device.memory * (1 - RESERVED_MEMORY)
    # With auto, a micro-batch fits if it does when all blocks recompute their activations.
    most = True if memory.decides_recomputation else None
    fitting = fitting_sizes(memory, sharding, share, device_bytes, most)
    # The largest size that fits up to the requested one, or else the smallest that fits. If nothing
    # fits, the plan shows what the requested size would need.
    requested = memory.recipe.settings.data.per_device_train_batch_size
    candidates = fitting or divisors(share)
    rows = max((size for size in candidates if size <= requested), default=min(candidates))

    recomputes = None
    if memory.decides_recomputation:
        recomputes = least_recomputation(
            memory, sharding, rows=rows, accumulation=share // rows, device_bytes=device_bytes
        ).enabled
    layout = plan_layout(plan, memory, name, sharding, rows=rows, recomputes=recomputes)
    return layout._replace(largest=max(fitting, default=0))


def fitting_sizes(
    memory: Memory,
    sharding: Sharding,
    share: int,
    device_bytes: float,
    recomputes: bool | None = None,
) -> list[int]:
    """Return the sizes of a micro-batch that fit, in ascending order.

    A smaller micro-batch may need more memory. If a step has several micro-batches, gradients are
    kept between them. A single micro-batch with all rows does not need that.

    Args:
        memory: the model.
        sharding: how processes share the model.
        share: rows of the global batch that a process has. A micro-batch divides them.
        device_bytes: memory of the device.
        recomputes: whether blocks recompute their activations, as in :meth:`Memory.activations`.
    """
    sizes = []
    for rows in divisors(share):
        if memory.bytes_of(sharding, rows, share // rows, recomputes).total <= device_bytes:
            sizes.append(rows)
        elif memory.bytes_of(sharding, rows, 1, recomputes).total > device_bytes:
            # One micro-batch of this size is too large by itself, so larger ones are, too.
            break
    return sizes


def divisors(share: int) -> list[int]:
    """Return the sizes of a micro-batch that divide some rows, in ascending order."""
    return [rows for rows in range(1, share + 1) if share % rows == 0]
