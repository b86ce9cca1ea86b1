"""Models of which no process holds the whole.

Fully sharded data parallel, in torch's second form (FSDP2): every process holds a part of each weight, of its gradient
and of its optimizer state, and sees the whole of a block's weights only while it computes that block. And tensor
parallelism (:mod:`llmtrain.parallel.tensor`), under which it never does; what is left of data parallelism beside it is
FSDP's too, with or without shards.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from llmtrain.console import say
from llmtrain.devices import check_room
from llmtrain.errors import UserError
from llmtrain.launching import shipped_config
from llmtrain.parallel.paper import PaperAccelerator
from llmtrain.parallel.tensor import cut_tensors
from llmtrain.shards import block_classes, cuts, fill, local, same_rows, sharding_of

Weights = Iterable[tuple[str, torch.Tensor]]


# What an accelerate config may say: variable that the launcher sets -> default, values that are fine, why not others
_OWN_UNITS = "; leave it out: blocks are found from the model"
_LIMITS = {
    "FSDP_VERSION": ("1", "2", "asks for FSDP {}; set fsdp_version: 2 in its fsdp_config"),
    "FSDP_AUTO_WRAP_POLICY": ("", "|TRANSFORMER_BASED_WRAP", "has an fsdp_auto_wrap_policy" + _OWN_UNITS),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("", "", "has fsdp_transformer_layer_cls_to_wrap {}" + _OWN_UNITS),
    "FSDP_IGNORED_MODULES": ("", "", "has fsdp_ignored_modules {}" + _OWN_UNITS),
    "FSDP_RESHARD_AFTER_FORWARD": (
        *("true", "true|false"),
        "has fsdp_reshard_after_forward: {}, which is a value of FSDP 1; write true or false",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (  # which would not draw the same dropout again
        *("false", "false"),
        "has fsdp_activation_checkpointing; leave it out, and use --gradient_checkpointing",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        *("false", "false"),
        "has fsdp_activation_checkpointing_offload, which is not supported; leave it out",
    ),
    **{
        f"PARALLELISM_CONFIG_{name}_SIZE": (
            "1",
            "1",
            f"has {name.lower()}_size {{}}: rows are not cut over processes here (torch does so on GPUs alone); leave "
            "it out, and use --gradient_checkpointing for long rows",
        )
        for name in ("CP", "SP")
    },
}


@dataclass(frozen=True)
class Sharding:
    """``replicas`` groups of ``shards`` x ``stages`` x ``tensor`` processes; each group holds the model once.
    Neighbours, ``stages`` x ``tensor`` of them, compute together on the same rows; others have rows of their own."""

    replicas: int
    shards: int
    cpu_offload: bool = False
    tensor: int = 1
    stages: int = 1

    @classmethod
    def asked(cls, processes: int, stages: int = 1) -> "Sharding | None":
        """What the accelerate config asks for, as its launcher passes it on; ``None`` where it does not shard, or
        where one process has nobody to share with. Raises :class:`UserError` for what this package does not do."""
        tensor = _size("TP")
        if stages > 1:
            if cls.is_asked():
                raise UserError("--pipeline_stages is for a DDP config; this one shards the model.")
            if processes % stages:
                raise UserError(
                    f"--pipeline_stages {stages} needs as many processes, or a multiple; {processes} started. Use: "
                    f"accelerate launch --multi_gpu --num_processes {stages}"
                )
            return cls(processes // stages, 1, stages=stages)
        if not cls.is_asked():
            if _said("ACCELERATE_USE_PARALLELISM_CONFIG"):
                raise _refused(f"has a parallelism config without FSDP; see {shipped_config('hsdp')}")
            return None
        for name, (default, fits, why) in _LIMITS.items():
            unused = name.startswith("FSDP") and not _said("ACCELERATE_USE_FSDP")  # whose defaults are always there
            if not unused and not re.fullmatch(fits, value := os.environ.get(name, default), re.IGNORECASE):
                raise _refused(why.format(value))
        if processes == 1:
            return None
        replicas, shards = _size("DP_REPLICATE"), _size("DP_SHARD")
        if replicas == shards == 1 and processes % tensor == 0:
            replicas, shards = (1, processes // tensor) if _said("ACCELERATE_USE_FSDP") else (processes // tensor, 1)
        if replicas * shards * tensor != processes:
            cut = f" x {tensor} (parallelism_config_tp_size)" if tensor > 1 else ""
            raise _refused(
                f"has {replicas} replicas (parallelism_config_dp_replicate_size) of {shards} processes "
                f"(parallelism_config_dp_shard_size){cut}, and {processes} processes were started"
            )
        offload = _said("ACCELERATE_USE_FSDP") and _said("FSDP_OFFLOAD_PARAMS")
        if offload and tensor > 1:
            raise _refused("offloads parameters beside tensor parallelism, which is not supported; leave one out")
        return cls(replicas, shards, offload, tensor) if shards * tensor > 1 else None

    @staticmethod
    def is_asked() -> bool:
        return _said("ACCELERATE_USE_FSDP") or (_said("ACCELERATE_USE_PARALLELISM_CONFIG") and _size("TP") > 1)

    @property
    def method(self) -> str:
        cut = f"tensor parallelism ({self.tensor})" if self.tensor > 1 else ""
        stages = f"{self.stages} stages" if self.stages > 1 else ""
        return " and ".join(filter(None, ["FSDP2" if self.shards > 1 else "", cut, stages]))

    @property
    def processes(self) -> int:
        return self.replicas * self.shards * self.together

    @property
    def together(self) -> int:
        """Neighbours that see the same rows."""
        return self.stages * self.tensor

    @property
    def mesh(self) -> DeviceMesh:
        return _MESHES[self]

    def settings(self, cpu: bool, precision: str) -> dict[str, Any]:
        """Arguments of ``Accelerator``. In bfloat16 blocks are gathered in it, and their gradients summed in float32;
        which product is computed in which precision autocast says, as under DDP, so no input or output is cast."""
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        casts = half if precision == "bf16" else MixedPrecisionPolicy()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="NO_WRAP",  # shard() knows the units
            mixed_precision_policy=casts,
            cpu_ram_efficient_loading=False,  # weights come as a stream
            state_dict_type="SHARDED_STATE_DICT",  # which nobody asks for
            cpu_offload=CPUOffloadPolicy(pin_memory=not cpu) if self.cpu_offload else None,
        )
        plugin.sharding = self
        # of tensor parallelism it would ask for classes that transformers no longer has (accelerate 1.15); the mesh
        # that set_mesh() gives it is enough
        replicas = self.replicas if self.together == 1 else 1
        sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=self.processes // replicas, tp_size=1)
        return {"fsdp_plugin": plugin, "parallelism_config": sizes}

    def set_mesh(self, accelerator: Accelerator) -> None:
        """Tell Accelerate, which deals out the rows, who sees the same."""
        if self.together == 1:
            return
        kind, names = accelerator.device.type, ("dp_replicate", "dp_shard", "pp", "tp")
        sizes = (self.replicas, self.shards, self.stages, self.tensor)
        _MESHES[self] = init_device_mesh(kind, sizes, mesh_dim_names=names)
        if self.stages > 1:  # to Accelerate, who sees the same rows is one dimension
            rows = (self.replicas, self.shards, self.together)
            accelerator.state.device_mesh = init_device_mesh(kind, rows, mesh_dim_names=(*names[:2], "tp"))
        else:
            accelerator.state.device_mesh = self.mesh["dp_replicate", "dp_shard", "tp"]


_MESHES: dict[Sharding, DeviceMesh] = {}


def _refused(why: str) -> UserError:
    return UserError(f"the accelerate config {why}.")


def _said(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def _size(name: str) -> int:
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))


def let_cpus_shard(**process_group: Any) -> None:
    """Join the process group over gloo and let accelerate see devices that can shard: it looks for FSDP only where it
    has found several accelerators, and would silently use DDP (accelerate 1.15, state.py)."""
    state = PartialState(cpu=True, **process_group)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def is_sharded(accelerator: Accelerator) -> bool:
    return accelerator.is_fsdp2


def empty_if_sharded(accelerator: Accelerator) -> contextlib.AbstractContextManager[Any]:
    """Where a model is built: without memory (the meta device) if it is to be sharded, as no process could hold it."""
    return torch.device("meta") if is_sharded(accelerator) else contextlib.nullcontext()


def shard(accelerator: Accelerator, model: nn.Module, weights: Weights) -> None:
    """Where the accelerate config asks for it, spread a model, in place, over the processes: each block is a unit that
    is gathered and freed on its own, and so is what stands before and after the blocks. Parameters on the meta device
    are made only as far as this process holds them, and filled from ``weights``, one whole tensor at a time; ties stay.

    Raises :class:`UserError` where the model has no blocks to find.
    """
    if isinstance(accelerator, PaperAccelerator):
        accelerator.take(model)
    check_room(accelerator, model)
    if not is_sharded(accelerator):
        return
    plugin, mesh, sharding = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh, sharding_of(accelerator)
    if sharding.together > 1:
        mesh = sharding.mesh["dp_replicate", "dp_shard"]
    if sharding.tensor > 1:
        cut_tensors(model, sharding.mesh["tp"])
    elsewhere, holders = _leave_to_other_stages(model, sharding)
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
    whole_precision, block_precision = MixedPrecisionPolicy(), plugin.mixed_precision_policy
    for unit in units_of(model, norms_apart=accelerator.native_amp):
        keep = False if unit.backward_begins else plugin.reshard_after_forward
        casts = block_precision if unit.multiplied else whole_precision
        if elsewhere.issuperset(p for module in unit.modules for p in module.parameters()):
            continue
        fully_shard(unit.modules, reshard_after_forward=keep, mp_policy=casts, **settings)
    fully_shard(model, mp_policy=whole_precision, ignored_params=elsewhere, **settings)
    if accelerator.native_amp:  # accelerate wraps what it shards itself in nothing
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    reduce_all: Any = getattr(model, "set_reduce_scatter_unused_params", None)
    if reduce_all is not None:
        reduce_all(True)  # torch 2.13: also what one process has not used, an expert that no token chose
    home = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else accelerator.device
    empty = {name: p for name, p in model.named_parameters() if p.is_meta and p not in elsewhere}
    for parameter in empty.values():
        made = nn.Parameter(torch.empty_like(parameter, device=home), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)  # the same object, wherever it is tied or referred to
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(home))  # by which FSDP learns of it
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(accelerator.device))
    fill(dict(model.named_parameters()) if elsewhere else empty, weights)
    for name, parameter in model.named_parameters():
        parameter.stages = holders.get(name, (0,))  # type: ignore[attr-defined]
    _give_addresses(model)
    parts = f"{units(model)} units"
    replicas = f"{sharding.replicas} x " if sharding.replicas > 1 else ""
    here, everywhere = held_bytes(model)
    say(
        "sharded",
        f"{sharding.method} over {replicas}{sharding.processes // sharding.replicas} processes in {parts}; this one "
        f"holds {here / 2**20:.2f} of {everywhere / 2**20:.2f} MiB of weights",
    )


def clip_grad_norm(accelerator: Accelerator, model: nn.Module, limit: float) -> torch.Tensor:
    """Scale the gradient so that its norm is at most ``limit``; returns the norm before, the same on every process.

    Where matrices are cut over neighbours and other tensors are not, torch adds up each on a mesh of its own; here the
    squares of all parts meet once, each divided by how many processes hold it.
    """
    if same_rows(accelerator) == 1:
        return accelerator.clip_grad_norm_(model.parameters(), limit)
    parts = {p: local(p.grad) for p in model.parameters() if p.grad is not None}
    norm = _norm_of_parts(accelerator, parts)
    scale = (limit / (norm + 1e-6)).clamp(max=1)  # torch's own formula
    for part in parts.values():
        part.mul_(scale)
    return norm


@torch.no_grad()
def weight_norm(accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    """Of all weights that are trained; the same on every process, but where each makes updates alone."""
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
    if is_sharded(accelerator):
        return _norm_of_parts(accelerator, {p: local(p) for p in trained})
    return nn.utils.get_total_norm([p.detach() for p in trained])


def _norm_of_parts(accelerator: Accelerator, parts: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """Of what all processes have of these parameters, or of their gradients."""
    sharding = sharding_of(accelerator)
    stage = sharding.mesh.get_local_rank("pp") if sharding.stages > 1 else 0
    squares = [
        torch.linalg.vector_norm(part, dtype=torch.float32).square()
        * (math.prod(cuts(p).values()) if p.stages[0] == stage else 0)  # type: ignore[attr-defined]
        for p, part in parts.items()
    ]
    mine = torch.stack(squares).sum() * (sharding.stages / accelerator.num_processes)
    return accelerator.reduce(mine.to(accelerator.device), reduction="sum").sqrt()


def _leave_to_other_stages(model: Any, sharding: Sharding) -> tuple[set[nn.Parameter], dict[str, tuple[int, ...]]]:
    """The parameters that this stage of a pipeline does not hold, and which stages hold each."""
    if sharding.stages == 1:
        return set(), {}
    stage = sharding.mesh.get_local_rank("pp")
    model.keep(stage, sharding.stages)
    holders = {name: model.stages_of(name, sharding.stages) for name, _ in model.named_parameters()}
    return {p for name, p in model.named_parameters() if stage not in holders[name]}, holders


class Unit(NamedTuple):
    modules: list[nn.Module]
    multiplied: bool = True  # by autocast in half precision, and so gathered in it
    backward_begins: bool = False  # with it, so it is not freed before


def units_of(model: Any, norms_apart: bool) -> Iterator[Unit]:
    """What is gathered and freed on its own: the blocks (and the norms of each, where they keep another precision); the
    embedding; the head, and with it an embedding that it shares weights with, for each weight belongs to one unit. What
    is left, the last norm or the like, stays with the model itself. Raises :class:`UserError` where there are no
    blocks."""
    blocks = block_classes(model)
    if not blocks:
        raise UserError(f"{type(model).__name__} has no repeated blocks that could be sharded; use DDP.")
    for block in reversed([module for module in model.modules() if type(module).__name__ in blocks]):  # inner first
        norms = [m for m in block.modules() if "Norm" in type(m).__name__ and any(True for _ in m.parameters(False))]
        if norms and norms_apart:
            yield Unit(norms, multiplied=False)
        yield Unit([block])
    if not hasattr(model, "get_output_embeddings"):
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shared = {*embedding.parameters()} & {*head.parameters()} if head is not None else set()
    if shared:
        yield Unit([embedding, head], multiplied=False, backward_begins=True)
    else:
        yield Unit([embedding], multiplied=False)
        yield from [Unit([head], backward_begins=True)] if head is not None else []


def _give_addresses(model: Any) -> None:
    """Accelerate knows an optimizer's parameters again by the address of their part, and empty parts have none."""
    for parameter in model.parameters():
        if not parameter.is_meta and not local(parameter).numel():
            parameter._local_tensor.data_ptr = functools.partial(id, parameter)


def units(model: nn.Module) -> int:
    """How many parts of a model are gathered and freed on their own."""
    return len(parameter_groups(model))


def parameter_groups(model: nn.Module) -> list[Any]:
    """Torch's own records of the units; ``reduce_grads`` of one says whether a backward pass reduces its gradient."""
    states = {id(state): state for m in model.modules() if isinstance(m, FSDPModule) for state in [m._get_fsdp_state()]}
    return [state._fsdp_param_group for state in states.values() if state._fsdp_param_group is not None]


def held_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the parameters that this process holds, and of all."""
    here = sum(local(p).numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    return here, sum(p.numel() * p.element_size() for p in model.parameters())
