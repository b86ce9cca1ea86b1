"""Fully sharded data parallel, in torch's second form (FSDP2): every process holds a part of each weight, of its
gradient and of its optimizer state, and sees the whole of a block's weights only while it computes that block."""

import contextlib
import functools
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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.shards import block_classes, fill, local

Weights = Iterable[tuple[str, torch.Tensor]]


# What an accelerate config may say: variable that the launcher sets -> default, values that are fine, why not others
_OWN_UNITS = "; leave it out: blocks are found from the model"
_LIMITS = {
    "FSDP_VERSION": ("1", "2", "asks for FSDP {}; set fsdp_version: 2, as accelerate_configs/fsdp2.yaml does"),
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
            f"has {name.lower()}_size {{}}, which is not supported; leave it out",
        )
        for name in ("TP", "CP", "SP")
    },
}


@dataclass(frozen=True)
class Sharding:
    """``replicas`` groups of ``shards`` processes; each group holds the model once."""

    replicas: int
    shards: int
    cpu_offload: bool = False

    @classmethod
    def asked(cls, processes: int) -> "Sharding | None":
        """What the accelerate config asks for, as its launcher passes it on; ``None`` where it does not shard, or
        where one process has nobody to share with. Raises :class:`UserError` for what this package does not do."""
        if not cls.is_asked():
            if _said("ACCELERATE_USE_PARALLELISM_CONFIG"):
                raise _refused("has a parallelism config without FSDP; see accelerate_configs/hsdp.yaml")
            return None
        for name, (default, fits, why) in _LIMITS.items():
            if not re.fullmatch(fits, value := os.environ.get(name, default), re.IGNORECASE):
                raise _refused(why.format(value))
        if processes == 1:
            return None
        replicas, shards = _size("DP_REPLICATE"), _size("DP_SHARD")
        if replicas == shards == 1:
            shards = processes
        if replicas * shards != processes:
            raise _refused(
                f"has {replicas} replicas (parallelism_config_dp_replicate_size) of {shards} processes "
                f"(parallelism_config_dp_shard_size), and {processes} processes were started"
            )
        return cls(replicas, shards, _said("FSDP_OFFLOAD_PARAMS")) if shards > 1 else None

    @staticmethod
    def is_asked() -> bool:
        return _said("ACCELERATE_USE_FSDP")

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
        sizes = ParallelismConfig(dp_replicate_size=self.replicas, dp_shard_size=self.shards)
        return {"fsdp_plugin": plugin, "parallelism_config": sizes}


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
    if not is_sharded(accelerator):
        return
    plugin, sizes = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    mesh = accelerator.torch_device_mesh[tuple(sizes.dp_dim_names)]
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
    whole_precision, block_precision = MixedPrecisionPolicy(), plugin.mixed_precision_policy
    for unit in _units(model, norms_apart=accelerator.native_amp):
        keep = False if unit.backward_begins else plugin.reshard_after_forward
        casts = block_precision if unit.multiplied else whole_precision
        fully_shard(unit.modules, reshard_after_forward=keep, mp_policy=casts, **settings)
    fully_shard(model, mp_policy=whole_precision, **settings)
    if accelerator.native_amp:  # accelerate wraps what it shards itself in nothing
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    reduce_all: Any = getattr(model, "set_reduce_scatter_unused_params", None)
    if reduce_all is not None:
        reduce_all(True)  # torch 2.13: also what one process has not used, an expert that no token chose
    home = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else accelerator.device
    empty = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for parameter in empty.values():
        made = nn.Parameter(torch.empty_like(parameter, device=home), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)  # the same object, wherever it is tied or referred to
    model.to(home)  # by which FSDP learns of it
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(accelerator.device))
    fill(empty, weights)
    _give_addresses(model)
    parts = f"{units(model)} units"
    replicas = f"{sizes.dp_replicate_size} x " if sizes.dp_replicate_size > 1 else ""
    here, everywhere = held_bytes(model)
    say(
        "sharded",
        f"FSDP2 over {replicas}{sizes.dp_shard_size} processes in {parts}; this one holds {here / 2**20:.2f} of "
        f"{everywhere / 2**20:.2f} MiB of weights",
    )


class Unit(NamedTuple):
    modules: list[nn.Module]
    multiplied: bool = True  # by autocast in half precision, and so gathered in it
    backward_begins: bool = False  # with it, so it is not freed before


def _units(model: Any, norms_apart: bool) -> Iterator[Unit]:
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
        if not local(parameter).numel():
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
    here = sum(local(p).numel() * p.element_size() for p in model.parameters())
    return here, sum(p.numel() * p.element_size() for p in model.parameters())
