"""Sharding: models that no rank holds in full.

Fully sharded data parallel, in torch's second form (FSDP2): every rank holds a shard of each weight, of its gradient
and of its optimizer state, and sees a block's full weights only while it computes that block. And tensor parallelism
(:mod:`llmtrain.parallel.tensor`), under which it never does; what is left of data parallelism beside it is FSDP's too.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.contract import Built, Weights
from llmtrain.errors import UserError
from llmtrain.parallel import mesh as meshes
from llmtrain.parallel.mesh import Sharding, local_shard, sharding_of
from llmtrain.parallel.tensor import parallelize
from llmtrain.shipped import shipped_config

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_GIB = 2**30


def sharding_settings(sharding: Sharding, cpu: bool, precision: str) -> dict[str, object]:
    """Return the arguments of ``Accelerator`` by which it shards.

    In bfloat16 blocks are gathered in it and their gradients summed in float32. Autocast says which product has which
    precision, as under DDP, so nothing is cast.
    """
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    plugin = meshes.ShardingPlugin(
        sharding,
        auto_wrap_policy="NO_WRAP",  # shard() knows the units
        mixed_precision_policy=half if precision == "bf16" else MixedPrecisionPolicy(),
        cpu_ram_efficient_loading=False,  # weights come as a stream
        state_dict_type="SHARDED_STATE_DICT",  # which nobody asks for
        cpu_offload=CPUOffloadPolicy(pin_memory=not cpu) if sharding.cpu_offload else None,
    )
    # Of tensor parallelism accelerate 1.15 would ask for classes that transformers no longer has; the mesh that
    # set_mesh() gives it is enough.
    replicas = sharding.replicas if sharding.together == 1 else 1
    sizes = ParallelismConfig(
        dp_replicate_size=replicas, dp_shard_size=sharding.processes // replicas, tp_size=1
    )
    return {"fsdp_plugin": plugin, "parallelism_config": sizes}


def let_cpus_shard(**process_group: object) -> None:
    """Join the process group over gloo, and let accelerate see devices that can shard.

    It looks for FSDP only where it has found several accelerators, and would silently use DDP (accelerate 1.15).
    """
    PartialState(cpu=True, **process_group)._shared_state["distributed_type"] = (
        DistributedType.MULTI_GPU
    )


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether ranks share a model."""
    return bool(accelerator.is_fsdp2)


def place(accelerator: Accelerator, built: Built) -> Built:
    """Bring a new model to where it is trained: sharded, or whole on this rank's device.

    Parameters on the meta device become real and get their first weights.

    Raises:
        UserError: if there is not enough memory, or if the model cannot be sharded.
    """
    model = built.model
    kind = type(model).__name__  # before FSDP renames it
    # bitsandbytes keeps two 4-bit numbers in a byte.
    is_quantized = not all(p.is_floating_point() for p in model.parameters())
    if is_sharded(accelerator) and built.weights is None:
        if is_quantized:
            raise UserError("--load_in_4bit weights cannot be sharded; use a DDP config.")
        raise UserError(
            f"{kind} has no stream of weights, without which a model of one's own cannot be sharded: build it on the "
            "meta device and hand its first weights to Built, or use a DDP config."
        )
    check_room(accelerator, model)
    _say_size(model, kind)

    if is_sharded(accelerator):
        shard(accelerator, model, built.weights or ())
    else:
        empty = {name: p for name, p in model.named_parameters() if p.is_meta}
        _make_real(empty.values(), accelerator.device)
        meshes.fill(empty, built.weights or ())
        if not is_quantized:  # else bitsandbytes has placed it
            model.to(accelerator.device)
    built.check()
    return built


def _say_size(model: nn.Module, kind: str) -> None:
    """Print how many parameters a model has, and how many of them are trained."""
    every = 0
    trained = 0
    for parameter in model.parameters():
        is_quantized = not parameter.is_floating_point()
        count = parameter.numel() * (2 if is_quantized else 1)
        every += count
        if parameter.requires_grad:
            trained += count
    share = "" if trained == every else f", {trained:,} of them trained ({trained / every:.2%})"
    say("model", f"{kind}: {every:,} parameters{share}")


def shard(accelerator: Accelerator, model: nn.Module, weights: Weights) -> None:
    """Shard a model, in place, over the ranks, as the accelerate config asks.

    Each block is a unit that is gathered and freed on its own, and so is what stands before and after the blocks.
    Parameters on the meta device become real as far as this rank holds them, and are filled from ``weights``, one full
    tensor at a time; ties stay. Raises :class:`UserError` where the model has no blocks to find.
    """
    sharding, plugin, mesh = (
        sharding_of(accelerator),
        accelerator.state.fsdp_plugin,
        accelerator.torch_device_mesh,
    )
    if sharding.together > 1:
        mesh = sharding.submesh("dp_replicate", "dp_shard")
    if sharding.tensor > 1:
        parallelize(model, sharding.submesh("tp"))
    elsewhere = _leave_to_other_stages(model, sharding)
    split = functools.partial(fully_shard, mesh=mesh, offload_policy=plugin.cpu_offload)
    full_precision, block_precision = MixedPrecisionPolicy(), plugin.mixed_precision_policy
    for unit in units_of(model, norms_apart=accelerator.native_amp):
        keep = False if unit.backward_begins else plugin.reshard_after_forward
        casts = block_precision if unit.multiplied else full_precision
        if not elsewhere.issuperset(p for module in unit.modules for p in module.parameters()):
            split(unit.modules, reshard_after_forward=keep, mp_policy=casts)
    split(model, mp_policy=full_precision, ignored_params=elsewhere)
    if accelerator.native_amp:  # accelerate wraps what it shards itself in nothing
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    reduce_all: Callable[[bool], None] | None = getattr(
        model, "set_reduce_scatter_unused_params", None
    )
    if reduce_all is not None:
        reduce_all(True)  # torch 2.13: also gradients of an expert that no token of a rank chose
    home = (
        torch.device("cpu")
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        else accelerator.device
    )
    empty = {name: p for name, p in model.named_parameters() if p.is_meta and p not in elsewhere}
    _make_real(empty.values(), home)
    # FSDP learns of it by this
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(home))  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(accelerator.device))
    meshes.fill(dict(model.named_parameters()) if elsewhere else empty, weights)
    for p in (
        model.parameters()
    ):  # accelerate maps an optimizer's parameters by address, and empty shards have none
        if isinstance(p, DTensor) and not p.is_meta and not p._local_tensor.numel():
            p._local_tensor.data_ptr = functools.partial(id, p)  # type: ignore[method-assign]  # undeclared: see above
    replicas = f"{sharding.replicas} x " if sharding.replicas > 1 else ""
    (here, everywhere), units = held_bytes(model), len(parameter_groups(model))
    say(
        "sharded",
        f"{sharding.method} over {replicas}{sharding.processes // sharding.replicas} processes in {units} units; this "
        f"one holds {here / 2**20:.2f} of {everywhere / 2**20:.2f} MiB of weights",
    )


def _make_real(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Give parameters on the meta device memory, in place: each stays the same object, wherever it is tied."""
    for parameter in parameters:
        real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


def clip_grad_norm(accelerator: Accelerator, model: nn.Module, limit: float) -> torch.Tensor:
    """Scale the gradient so that its norm is at most ``limit``; returns the norm before, the same on every rank.

    Where matrices are sharded over neighbours and other tensors are not, torch sums each on a mesh of its own; here the
    squares of all shards are summed once, each divided by how many ranks hold it.
    """
    if meshes.model_parallel_size(accelerator) == 1:
        before: torch.Tensor = accelerator.clip_grad_norm_(model.parameters(), limit)
        return before.full_tensor() if isinstance(before, DTensor) else before
    shards = {
        name: local_shard(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }
    norm = _norm_of_shards(accelerator, model, shards)
    scale = (limit / (norm + 1e-6)).clamp(max=1)  # torch's own formula
    for one in shards.values():
        one.mul_(scale)
    return norm


@torch.no_grad()
def weight_norm(accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    """Return the norm of all trained weights; the same on every rank."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and not p.is_meta}
    if is_sharded(accelerator):
        return _norm_of_shards(
            accelerator, model, {name: local_shard(p) for name, p in trained.items()}
        )
    return nn.utils.get_total_norm([p.detach() for p in trained.values()])


def _norm_of_shards(
    accelerator: Accelerator, model: nn.Module, shards: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the norm of what all ranks have of these parameters, or of their gradients."""
    sharding, parameters = sharding_of(accelerator), dict(model.named_parameters())
    stage = sharding.submesh("pp").get_local_rank() if sharding.stages > 1 else 0
    holders = meshes.holders_of(model, sharding.stages)
    squares = [
        torch.linalg.vector_norm(one, dtype=torch.float32).square()
        * (
            math.prod(meshes.shards_over(parameters[name]).values())
            if holders[name][0] == stage
            else 0
        )
        for name, one in shards.items()
    ]
    mine = torch.stack(squares).sum() * (sharding.stages / accelerator.num_processes)
    return torch.sqrt(accelerator.reduce(mine.to(accelerator.device), reduction="sum"))


def _leave_to_other_stages(model: nn.Module, sharding: Sharding) -> set[nn.Parameter]:
    """Have a model compute as one stage of a pipeline; return the parameters that other stages hold."""
    if sharding.stages == 1:
        return set()
    if not isinstance(model, meshes.Staged):
        raise UserError(
            f"{type(model).__name__} cannot be split into stages; leave out --pipeline_stages."
        )
    stage = sharding.submesh("pp").get_local_rank()
    model.keep(stage, sharding.stages)
    return {
        p
        for name, p in model.named_parameters()
        if stage not in model.stages_of(name, sharding.stages)
    }


def check_room(accelerator: Accelerator, model: nn.Module) -> None:
    """Check, before any memory is taken, that the GPU can hold the least that a run needs.

    That is weights, gradients and optimizer state. AdamW keeps two numbers for each weight and Muon
    one, so one is counted.

    Raises:
        UserError: if the GPU has less memory.
    """
    sharding = sharding_of(accelerator)
    if accelerator.device.type != "cuda" or sharding.cpu_offload:
        return
    shards = sharding.shards * sharding.together
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / shards
    gradients = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) / shards
    least = weights + 2 * gradients
    room = int(torch.cuda.get_device_properties(accelerator.device).total_memory)
    if least > room:
        raise UserError(
            f"this run needs {least / _GIB:.1f} GiB a process and more: {weights / _GIB:.1f} for "
            f"weights, {gradients / _GIB:.1f} for gradients, as much at least for the optimizer, and activations; "
            f"this GPU has {room / _GIB:.1f}. Share them among more processes ({shipped_config('fsdp2')}): see "
            "llmtrain plan."
        )


class Unit(NamedTuple):
    """Modules whose weights are gathered and freed together."""

    modules: list[nn.Module]
    multiplied: bool = True  # by autocast in half precision, and so gathered in it
    backward_begins: bool = False  # with it, so it is not freed before


def units_of(model: nn.Module, norms_apart: bool) -> Iterator[Unit]:
    """Yield what is gathered and freed together.

    Each block is a unit, and its norms are another if they keep another precision. The embedding is
    a unit, and so is the head. If the two share weights they are one unit, because each weight
    belongs to one. The rest, such as the last norm, stays with the model itself.

    Raises:
        UserError: if the model has no blocks.
    """
    blocks = meshes.blocks_of(model)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks that could be sharded; use DDP."
        )
    for block in reversed(blocks):  # inner first
        norms = [module for module in block.modules() if _is_norm(module)]
        if norms and norms_apart:
            yield Unit(norms, multiplied=False)
        yield Unit([block])

    if not isinstance(model, meshes.HasEmbeddings):
        return
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None:
        yield Unit([embedding], multiplied=False)
    elif {*embedding.parameters()} & {*head.parameters()}:
        yield Unit([embedding, head], multiplied=False, backward_begins=True)
    else:
        yield Unit([embedding], multiplied=False)
        yield Unit([head], backward_begins=True)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm with weights of its own."""
    has_weights = any(True for _ in module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and has_weights


def parameter_groups(model: nn.Module) -> "list[FSDPParamGroup]":
    """Return torch's own records of the units, which say whether a backward pass reduces their gradients."""
    states = {
        id(state): state
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for state in [m._get_fsdp_state()]
    }
    return [
        state._fsdp_param_group for state in states.values() if state._fsdp_param_group is not None
    ]


def held_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the parameters that this rank holds, and of all."""
    here = sum(
        local_shard(p).numel() * p.element_size() for p in model.parameters() if not p.is_meta
    )
    return here, sum(p.numel() * p.element_size() for p in model.parameters())
