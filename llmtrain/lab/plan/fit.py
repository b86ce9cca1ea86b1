"""The cheapest flags with which a run fits into some memory.

First come flags that compute the same numbers up to rounding, from the fastest to the slowest: the
micro-batch, recomputation, how gradients are reduced, and how processes share the model. If none of
them fits, moments in 8 bits are next, then weights in bfloat16, then both. A flag that the user has
set stays as it is.
"""

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llmtrain.config.flags import configs_of, value_of
from llmtrain.console import size_text
from llmtrain.devices import RESERVED_MEMORY, size_bytes
from llmtrain.errors import UserError
from llmtrain.files import shipped_config
from llmtrain.interfaces.model import can_recompute
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import Plan, plan_without_layouts, shardings
from llmtrain.lab.plan.speed import estimate_compute, step_time
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.recomputation import least_recomputation, recomputed_share

_EIGHT_BIT = "adamw_torch_8bit"
# What a changed flag means for the numbers of a run.
_PROMISES = {
    "gradient_checkpointing": "the same bits",
    "per_device_train_batch_size": "equal to rounding",
    "sync_each_batch": "equal to rounding",
    "dtype": "other arithmetic: weights in bfloat16, with a compensation",
    "optim": "other arithmetic: AdamW with moments in 8 bits",
}
# If nothing fits, FSDP2 is tried on so many processes.
_PROCESS_COUNTS = [2**exponent for exponent in range(1, 11)]
_LORA_RANK = 16


class Change(NamedTuple):
    """A flag that differs from the recipe's own.

    Attributes:
        flag: as it stands in the command.
        seconds: by which a step is longer because of it; ``None`` if that is unknown.
        promise: what it means for the numbers of the run.
    """

    flag: str
    seconds: float | None
    promise: str


class Candidate(NamedTuple):
    """Flags with which a run may fit.

    Attributes:
        memory: the memory of the model with these flags.
        layout: the name of the parallel layout.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        every: which blocks compute their activations again; ``None``: as the model was built.
        total: bytes of the process that holds most.
        seconds: of a step; ``None`` if they are unknown.
    """

    memory: Memory
    layout: str
    sharding: Sharding
    rows: int
    every: int | None
    total: float
    seconds: float | None

    @property
    def flags(self) -> dict[str, str]:
        """The flags that differ from the recipe's own, by name. A switch has no value."""
        settings = self.memory.recipe.settings
        flags = {}
        if self.rows < settings.data.per_device_train_batch_size:
            flags["per_device_train_batch_size"] = str(self.rows)
        if not self.memory.reduces_once and not settings.parallel.sync_each_batch:
            flags["sync_each_batch"] = ""
        if self.every:
            flags["gradient_checkpointing"] = "auto" if self.memory.on_gpu else ""
        if self.memory.has_bf16_weights and settings.optim.trained_dtype != "bfloat16":
            flags["dtype"] = "bfloat16"
        if self.memory.optim != settings.optim.optim:
            flags["optim"] = self.memory.optim
        return flags


class Fit(NamedTuple):
    """The answer to whether a run fits.

    Attributes:
        limit: bytes that a process may use.
        chosen: the cheapest flags that fit; if nothing fits, those that need least.
        command: the command that runs the recipe with them.
        changes: the flags that were added, with their costs.
        too_large: the next cheaper flags, which do not fit; ``None`` if there are none.
        would_fit: what else would fit, if nothing does.
    """

    limit: float
    chosen: Candidate
    command: str
    changes: list[Change]
    too_large: Candidate | None
    would_fit: list[str]

    @property
    def fits(self) -> bool:
        return self.chosen.total <= self.limit


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
    too_large: list[Candidate] = []
    chosen: Candidate | None = None
    for memory in _arithmetics(plan.memory):
        candidates = sorted(_candidates(plan, memory, request.processes, limit), key=_cost)
        for candidate in candidates:
            if candidate.total <= limit:
                chosen = candidate
                break
            too_large.append(candidate)
        if chosen is not None:
            break

    answer = chosen or min(too_large, key=lambda candidate: candidate.total)
    return Fit(
        limit=limit,
        chosen=answer,
        command=_command(request, answer),
        changes=_changes(plan, answer),
        too_large=too_large[-1] if chosen and too_large else None,
        would_fit=[] if chosen else _would_fit(request, plan, limit),
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


def _candidates(plan: Plan, memory: Memory, processes: int, limit: float) -> Iterator[Candidate]:
    """Yield flags that compute the same numbers up to rounding.

    Args:
        plan: the model and the hardware.
        memory: the memory of the model with some dtypes.
        processes: the number of processes.
        limit: bytes that a process may use.
    """
    data = memory.recipe.settings.data
    if data.global_batch_size % processes:
        raise UserError(
            f"--global_batch_size {data.global_batch_size} cannot be divided among {processes} "
            "processes."
        )
    share = data.global_batch_size // processes

    for layout, sharding in shardings(processes, plan.cluster.per_machine):
        if sharding.is_sharded and not _can_be_sharded(memory):
            continue
        for synced in _sync_choices(memory, processes):
            with_sync = replace(memory, reduces_once=not synced)
            for rows in _micro_batches(memory, share):
                for every in _recomputations(with_sync, sharding, rows, share // rows, limit):
                    yield _candidate(plan, with_sync, layout, sharding, rows=rows, every=every)


def _can_be_sharded(memory: Memory) -> bool:
    """Return whether FSDP2 can shard a model."""
    try:
        return bool(memory.units)
    except UserError:  # a model without blocks
        return False


def _micro_batches(memory: Memory, share: int) -> list[int]:
    """Return the sizes of a micro-batch to try."""
    data = memory.recipe.settings.data
    most = min(data.per_device_train_batch_size, share)
    sizes = [rows for rows in range(most, 0, -1) if share % rows == 0]
    return sizes[:1] if data.is_set("per_device_train_batch_size") else sizes


def _sync_choices(memory: Memory, processes: int) -> list[bool]:
    """Return whether to try ``--sync_each_batch``, which several processes need."""
    parallel = memory.recipe.settings.parallel
    if processes == 1 or parallel.bitwise or parallel.is_set("sync_each_batch"):
        return [parallel.sync_each_batch]
    return [False, True]


def _recomputations(
    memory: Memory, sharding: Sharding, rows: int, accumulation: int, limit: float
) -> list[int | None]:
    """Return which blocks to let compute their activations again.

    On a GPU, a run with ``--gradient_checkpointing auto`` decides by itself. On a CPU, all blocks
    do or none does.
    """
    settings = memory.recipe.settings
    flag = value_of(settings, "gradient_checkpointing", default=True)
    is_set = _is_set(memory, "gradient_checkpointing")
    if flag or (is_set and flag is False) or not can_recompute(memory.recipe.model):
        return [None]
    if not memory.on_gpu or settings.parallel.bitwise:
        return [0] if is_set else [0, 1]
    least = least_recomputation(
        memory, sharding, rows=rows, accumulation=accumulation, device_bytes=limit
    )
    return [least.every]


def _is_set(memory: Memory, name: str) -> bool:
    """Return whether the user set a flag of the recipe."""
    configs = configs_of(memory.recipe.settings).values()
    return any(config.is_set(name) for config in configs)


def _candidate(
    plan: Plan,
    memory: Memory,
    layout: str,
    sharding: Sharding,
    *,
    rows: int,
    every: int | None,
) -> Candidate:
    """Return a candidate with its memory and its seconds."""
    share = memory.recipe.settings.data.global_batch_size // sharding.processes
    accumulation = share // rows
    candidate = Candidate(
        memory=memory,
        layout=layout,
        sharding=sharding,
        rows=rows,
        every=every,
        total=memory.bytes_of(sharding, rows, accumulation, every).total,
        seconds=None,
    )
    if plan.compute is None:
        return candidate

    compute = plan.compute
    estimate = estimate_compute(memory, plan.device, mfu=1.0)
    if estimate is not None:  # plan.compute has the optimizer of the recipe's own flags
        compute = compute._replace(optimizer=estimate.optimizer)
    blocks = memory.activations(rows, sharding.is_sharded, every).blocks
    step = step_time(
        memory,
        compute,
        plan.cluster,
        sharding,
        rows=rows,
        accumulation=accumulation,
        recomputed_share=recomputed_share(
            blocks, memory.recipe.recompute_every if every is None else every
        ),
    )
    return candidate._replace(seconds=step.total)


def _cost(candidate: Candidate) -> tuple[float, float, int, int]:
    """Return the key by which candidates with the same dtypes are sorted, the cheapest first.

    If the seconds are unknown or equal, recomputation costs more than a smaller micro-batch.
    """
    seconds = float(f"{candidate.seconds or 0:.6g}")
    recomputed = 1 / candidate.every if candidate.every else 0.0
    return seconds, recomputed, len(candidate.flags), -candidate.rows


# --- the answer


def _changes(plan: Plan, chosen: Candidate) -> list[Change]:
    """Return the flags of a candidate, each with the seconds that it adds to those before it."""
    unchanged = plan.memory
    synced = replace(unchanged, reduces_once=chosen.memory.reduces_once)
    in_bf16 = replace(synced, has_bf16_weights=chosen.memory.has_bf16_weights)
    share = unchanged.recipe.settings.data.global_batch_size // chosen.sharding.processes
    most_rows = _micro_batches(unchanged, share)[0]
    no_block = None if chosen.every is None else 0

    def with_flags(memory: Memory, *, rows: int, every: int | None) -> Candidate:
        return _candidate(plan, memory, chosen.layout, chosen.sharding, rows=rows, every=every)

    # Each has one more flag of the chosen candidate than the one before it.
    candidates = [
        with_flags(unchanged, rows=most_rows, every=no_block),
        with_flags(unchanged, rows=chosen.rows, every=no_block),
        with_flags(synced, rows=chosen.rows, every=no_block),
        with_flags(synced, rows=chosen.rows, every=chosen.every),
        with_flags(in_bf16, rows=chosen.rows, every=chosen.every),
        with_flags(chosen.memory, rows=chosen.rows, every=chosen.every),
    ]
    changes = []
    for before, after in itertools.pairwise(candidates):
        for name, value in after.flags.items():
            if name in before.flags:
                continue
            seconds = None
            if after.seconds is not None and before.seconds is not None:
                seconds = after.seconds - before.seconds
            flag = f"--{name} {value}".rstrip()
            changes.append(Change(flag=flag, seconds=seconds, promise=_PROMISES[name]))
    return changes


def _command(request: PlanRequest, candidate: Candidate) -> str:
    """Return the command that runs the recipe with the flags of a candidate."""
    words = ["python"]
    if candidate.sharding.processes > 1:
        config = "multi_gpu" if candidate.memory.on_gpu else "cpu_ddp"
        if candidate.sharding.is_sharded:
            config = "hsdp" if candidate.sharding.replicas > 1 else "fsdp2"
        words = ["accelerate", "launch", "--config_file", str(shipped_config(config))]
        words += ["--num_processes", str(candidate.sharding.processes)]
    words += [request.recipe, *request.flags]
    for name, value in candidate.flags.items():
        words += f"--{name} {value}".split()
    return shlex.join(words)


def _would_fit(request: PlanRequest, plan: Plan, limit: float) -> list[str]:
    """Return what else would fit: FSDP2 on more processes, or LoRA."""
    answers = []
    global_batch = plan.memory.recipe.settings.data.global_batch_size
    smallest = replace(_arithmetics(plan.memory)[-1], reduces_once=False)
    for processes in _PROCESS_COUNTS:
        if processes <= request.processes or global_batch % processes:
            continue
        total = _least_bytes(smallest, Sharding(replicas=1, shards=processes))
        if total is not None and total <= limit:
            answers.append(f"FSDP2 on {processes} processes: {size_text(total)} each")
            break

    settings = plan.memory.recipe.settings
    has_base = bool(value_of(settings, "model_name_or_path", default=None))
    if has_base and value_of(settings, "lora_r", default=None) == 0:
        flags = [*request.flags, "--lora_r", str(_LORA_RANK)]
        recipe = build_recipe_model(request.recipe, flags, plan.memory.recipe.precision)
        memory = Memory.of(recipe, plan.memory.on_gpu)
        total = _least_bytes(memory, Sharding(replicas=request.processes, shards=1))
        if total is not None and total <= limit:
            answers.append(f"--lora_r {_LORA_RANK}: {size_text(total)}")
    return answers


def _least_bytes(memory: Memory, sharding: Sharding) -> float | None:
    """Return the bytes for micro-batches of a row, recomputed; ``None`` if that is impossible."""
    if sharding.is_sharded and not _can_be_sharded(memory):
        return None
    every = 1 if can_recompute(memory.recipe.model) else None
    accumulation = memory.recipe.settings.data.global_batch_size // sharding.processes
    return memory.bytes_of(sharding, 1, accumulation, every).total
