"""The cheapest flags with which a run fits into some memory.

First come flags that compute the same numbers up to rounding, from the fastest to the slowest: the
micro-batch, recomputation, how gradients are reduced, and how processes share the model. If none of
them fits, moments in 8 bits are next, then weights in bfloat16, then both. A flag that the user has
set stays as it is.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llmtrain.config.flags import configs_of, value_of
from llmtrain.devices import RESERVED_MEMORY, size_bytes
from llmtrain.errors import UserError
from llmtrain.files import shipped_config
from llmtrain.interfaces.model import can_recompute
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import (
    Plan,
    PlannedLayout,
    divisors,
    plan_layout,
    plan_without_layouts,
    rows_of_process,
    shardings,
)
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recomputation import least_recomputation

_EIGHT_BIT = "adamw_torch_8bit"
# What a changed flag means for the numbers of a run.
PROMISES = {
    "gradient_checkpointing": "the same bits",
    "per_device_train_batch_size": "equal to rounding",
    "sync_each_batch": "equal to rounding",
    "dtype": "other arithmetic: weights in bfloat16, with a compensation",
    "optim": "other arithmetic: AdamW with moments in 8 bits",
}
_PORT = 29500  # of the first machine, which accelerate's configs for several machines have, too


class Fit(NamedTuple):
    """The answer to whether a run fits.

    Attributes:
        limit: bytes that a process may use.
        chosen: the cheapest layout that fits; if nothing fits, the one that needs least.
        command: the command that runs the recipe with it, on the first machine if it takes several.
        machines: the number of machines.
        too_large: the next cheaper layout, which does not fit; ``None`` if there is none.
    """

    limit: float
    chosen: PlannedLayout
    command: str
    machines: int
    too_large: PlannedLayout | None

    @property
    def fits(self) -> bool:
        return self.chosen.bytes.total <= self.limit


def find_fit(request: PlanRequest, size: str) -> Fit:
    """Return the cheapest flags with which a recipe fits.

    Args:
        request: the recipe and the hardware.
        size: the memory of a device, such as ``80gb``.

    Raises:
        UserError: if the size is none, or if the recipe cannot be planned.
    """
    limit = size_bytes(size)
    plan = plan_without_layouts(request)
    if plan.memory.on_gpu:
        limit *= 1 - RESERVED_MEMORY
    return fit_into(limit, plan, request)


def fit_into(limit: float, plan: Plan, request: PlanRequest) -> Fit:
    """Return the cheapest flags with which a process needs at most ``limit`` bytes.

    Args:
        limit: bytes.
        plan: the model and the hardware.
        request: the recipe that the plan was made of.

    Raises:
        UserError: if the global batch cannot be divided among the processes.
    """
    machines = -(-request.processes // plan.cluster.per_machine)
    if request.processes % machines:
        raise UserError(
            f"--processes {request.processes} cannot be divided among {machines} machines of "
            f"{plan.cluster.per_machine}; accelerate starts equally many on each."
        )
    too_large: list[PlannedLayout] = []
    chosen: PlannedLayout | None = None
    for memory in _arithmetics(plan.memory):
        candidates = sorted(_candidates(plan, memory, request.processes, limit), key=_cost)
        for candidate in candidates:
            if candidate.bytes.total <= limit:
                chosen = candidate
                break
            too_large.append(candidate)
        if chosen is not None:
            break

    answer = chosen or min(too_large, key=lambda candidate: candidate.bytes.total)
    return Fit(
        limit=limit,
        chosen=answer,
        command=_command(request, answer, machines),
        machines=machines,
        too_large=too_large[-1] if chosen and too_large else None,
    )


# --- candidates


def _arithmetics(memory: Memory) -> list[Memory]:
    """Return the memory with each dtype of moments and weights, in the order of preference."""
    settings = memory.recipe.settings.optim
    may_change_optim = not settings.is_set("optim") and memory.optim == "adamw"
    may_change_dtype = not settings.is_set("dtype") and not memory.has_bf16_weights

    arithmetics = [memory]
    if may_change_optim:
        arithmetics.append(replace(memory, optim=_EIGHT_BIT))
    if may_change_dtype:
        in_bf16 = [replace(choice, has_bf16_weights=True) for choice in arithmetics]
        arithmetics.extend(in_bf16)
    return arithmetics


def _candidates(
    plan: Plan, memory: Memory, processes: int, limit: float
) -> Iterator[PlannedLayout]:
    """Yield layouts that compute the same numbers up to rounding.

    Args:
        plan: the model and the hardware.
        memory: the memory of the model with some dtypes.
        processes: the number of processes.
        limit: bytes that a process may use.
    """
    share = rows_of_process(memory, processes)
    data = memory.recipe.settings.data
    sizes = [rows for rows in divisors(share) if rows <= data.per_device_train_batch_size]
    if data.is_set("per_device_train_batch_size"):
        sizes = sizes[-1:]

    parallel = memory.recipe.settings.parallel
    sync_choices = [False, True]
    if processes == 1 or parallel.bitwise or parallel.is_set("sync_each_batch"):
        sync_choices = [parallel.sync_each_batch]

    for name, sharding in shardings(processes, plan.cluster.per_machine):
        if sharding.is_sharded and not _can_be_sharded(memory):
            continue
        for synced in sync_choices:
            with_sync = replace(memory, reduces_once=not synced)
            for rows in sizes:
                for recomputes in _recomputations(with_sync, sharding, rows, share // rows, limit):
                    yield plan_layout(
                        plan, with_sync, name, sharding, rows=rows, recomputes=recomputes
                    )


def _can_be_sharded(memory: Memory) -> bool:
    """Return whether FSDP2 can shard a model."""
    if memory.has_4bit_base or memory.recipe.settings.parallel.mixed_precision == "fp16":
        return False
    try:
        return bool(memory.units)
    except UserError:  # a model without blocks
        return False


def _recomputations(
    memory: Memory, sharding: Sharding, rows: int, accumulation: int, limit: float
) -> list[bool | None]:
    """Return whether to let blocks recompute their activations.

    On a GPU, a run with ``--gradient_checkpointing auto`` decides by itself. On a CPU, all blocks
    do or none does.
    """
    settings = memory.recipe.settings
    flag = value_of(settings, "gradient_checkpointing", default=True)
    configs = configs_of(settings).values()
    is_set = any(config.is_set("gradient_checkpointing") for config in configs)
    if flag or (is_set and flag is False) or not can_recompute(memory.recipe.model):
        return [None]
    if not memory.on_gpu or settings.parallel.bitwise:
        return [False] if is_set else [False, True]
    least = least_recomputation(
        memory, sharding, rows=rows, accumulation=accumulation, device_bytes=limit
    )
    return [least.enabled]


def _cost(layout: PlannedLayout) -> tuple[float, bool, int, int]:
    """Return the key by which layouts with the same dtypes are sorted, the cheapest first.

    If the seconds are unknown or equal, recomputation costs more than a smaller micro-batch.
    """
    seconds = 0.0 if layout.step is None else float(f"{layout.step.total:.6g}")
    return seconds, layout.recomputes, len(changed_flags(layout)), -layout.rows


# --- the answer


def changed_flags(layout: PlannedLayout) -> dict[str, str]:
    """Return the flags that differ from the recipe's own, by name. A switch has no value."""
    memory = layout.memory
    settings = memory.recipe.settings
    flags = {}
    if layout.recomputes and not memory.recipe.recomputes:
        flags["gradient_checkpointing"] = "auto" if memory.on_gpu else ""
    if layout.rows < settings.data.per_device_train_batch_size:
        flags["per_device_train_batch_size"] = str(layout.rows)
    if not memory.reduces_once and not settings.parallel.sync_each_batch:
        flags["sync_each_batch"] = ""
    if memory.has_bf16_weights and settings.optim.trained_dtype != "bfloat16":
        flags["dtype"] = "bfloat16"
    if memory.optim != settings.optim.optim:
        flags["optim"] = memory.optim
    return flags


def _command(request: PlanRequest, layout: PlannedLayout, machines: int) -> str:
    """Return the command that runs the recipe in a layout, on the first machine of several."""
    sharding = layout.sharding
    on_gpu = layout.memory.on_gpu
    words = ["python"]
    if sharding.processes > 1:
        config = "multi_gpu" if on_gpu else "cpu_ddp"
        if sharding.is_sharded:
            config = "hsdp" if sharding.replicas > 1 else "fsdp2"
        words = ["accelerate", "launch", "--config_file", str(shipped_config(config))]
        words += ["--num_processes", str(sharding.processes)]
        if config == "hsdp":
            words += ["--parallelism_config_dp_replicate_size", str(sharding.replicas)]
            words += ["--parallelism_config_dp_shard_size", str(sharding.shards)]
    if machines > 1:
        words += ["--num_machines", str(machines), "--machine_rank", "0"]
        words += ["--main_process_ip", "ADDRESS", "--main_process_port", str(_PORT)]

    words += [request.recipe, *request.flags]
    for name, value in changed_flags(layout).items():
        words += f"--{name} {value}".split()
    return shlex.join(words)
