"""Fully sharded data parallelism, with FSDP2 of torch.

Every rank holds a shard of each weight, of its gradient and of its optimizer state. It gathers
the full weights of a block only while it computes that block.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from llmtrain.errors import UserError
from llmtrain.interfaces.model import HasEmbeddings, blocks_of
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import Sharding
from llmtrain.parallel.shards import local_shard

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

# Weights are gathered as they are stored.
_STORED_PRECISION = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def sharding_settings(sharding: Sharding, on_cpu: bool, precision: str) -> dict[str, object]:
    """Return the arguments of ``Accelerator`` that make it shard models.

    Gradients are summed in float32. If ``precision`` is ``bf16``, weights are gathered in bfloat16.
    Inputs are not cast, because autocast chooses the precision of each product, as under
    DDP.
    """
    mixed_precision = _STORED_PRECISION
    if precision == "bf16":
        mixed_precision = replace(
            _STORED_PRECISION, param_dtype=torch.bfloat16, cast_forward_inputs=False
        )

    offload = None
    if sharding.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=not on_cpu)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",  # fsdp.shard() chooses what is gathered together
        mixed_precision_policy=mixed_precision,
        cpu_ram_efficient_loading=False,  # weights are loaded one by one
        state_dict_type="SHARDED_STATE_DICT",  # not used
        cpu_offload=offload,
    )

    sizes = ParallelismConfig(
        dp_replicate_size=sharding.replicas,
        dp_shard_size=sharding.shards,
    )
    return {"fsdp_plugin": plugin, "parallelism_config": sizes}


def let_cpus_shard(**process_group: object) -> None:
    """Join the process group on CPUs, and make Accelerate accept FSDP there.

    Accelerate 1.15 uses FSDP only if the processes have accelerators, and would silently use DDP.
    """
    state = PartialState(cpu=True, **process_group)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class Unit(NamedTuple):
    """Modules whose weights are gathered and freed together.

    Attributes:
        modules: the modules.
        is_autocast: whether autocast runs these modules. If so, their weights are cast to its
            precision before they are gathered. Otherwise they are gathered as they are stored.
        starts_backward: whether the backward pass starts with this unit. If so, it is not freed
            after the forward pass.
    """

    modules: list[nn.Module]
    is_autocast: bool = True
    starts_backward: bool = False

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all modules."""
        return itertools.chain.from_iterable(module.parameters() for module in self.modules)


def units_of(model: nn.Module, separate_norms: bool) -> Iterator[Unit]:
    """Yield the units of a model.

    Each block is a unit, and so are the embedding and the head. If the embedding and the head share
    weights, they are a single unit, because each weight belongs to exactly one unit. The rest of
    the model, such as its last norm, is in no unit.

    Args:
        model: a model with repeated blocks.
        separate_norms: whether the norms of each block are a separate unit, because they compute in
            another precision than the rest of the block.

    Raises:
        UserError: if the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks to shard; use a DDP config."
        )

    # Blocks are nested if a model lists a class in `_no_split_modules` that contains another one of
    # the list. Inner blocks come first here: a weight belongs to the first unit that has it.
    for block in reversed(blocks):
        norms = [module for module in block.modules() if _is_norm(module)]
        if norms and separate_norms:
            yield Unit(norms, is_autocast=False)
        yield Unit([block])

    if not isinstance(model, HasEmbeddings):
        return
    # Autocast casts the inputs of matrix products. An embedding is looked up instead, with the bits
    # that are stored. A head that shares its weights is gathered together with it, in the same way.
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None:
        yield Unit([embedding], is_autocast=False)
    elif {*embedding.parameters()} & {*head.parameters()}:
        yield Unit([embedding, head], is_autocast=False, starts_backward=True)
    else:
        yield Unit([embedding], is_autocast=False)
        yield Unit([head], starts_backward=True)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm that has weights."""
    has_weights = any(True for _ in module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and has_weights


def shard(accelerator: Accelerator, model: nn.Module) -> None:
    """Shard a model over the ranks, in place, as the accelerate config asks.

    Parameters on the meta device stay there. See :mod:`llmtrain.parallel.placement`.

    Args:
        accelerator: the Accelerator of this run.
        model: a model with repeated blocks.

    Raises:
        UserError: if the model has no blocks.
    """
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    stored_policy = _STORED_PRECISION
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        policy = stored_policy = MixedPrecisionPolicy()  # float32 would round their gradients
    fully_shard_on_mesh = functools.partial(
        fully_shard, mesh=accelerator.torch_device_mesh, offload_policy=plugin.cpu_offload
    )
    # No backward pass would free the blocks of a frozen model.
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    frees_blocks = is_frozen or plugin.reshard_after_forward
    for unit in units_of(model, separate_norms=accelerator.native_amp):
        fully_shard_on_mesh(
            unit.modules,
            reshard_after_forward=False if unit.starts_backward else frees_blocks,
            mp_policy=policy if unit.is_autocast else stored_policy,
        )
    fully_shard_on_mesh(model, mp_policy=stored_policy)

    # accelerator.prepare() adds autocast to models in DDP, and not to those in FSDP2.
    if accelerator.native_amp:
        autocast = torch.autocast(accelerator.device.type, torch.bfloat16)
        model.forward = autocast(model.forward)

    # If a rank routes no token to an expert, the expert's weights get no gradient there. By default
    # torch 2.13 then does not reduce the gradient over the ranks.
    reduce_unused: Callable[[bool], None] | None = getattr(
        model, "set_reduce_scatter_unused_params", None
    )
    if reduce_unused is not None:
        reduce_unused(True)


def parameter_groups(model: nn.Module) -> "list[FSDPParamGroup]":
    """Return torch's internal objects for the units of a sharded model.

    They show, for example, whether a backward pass reduces the gradients of a unit.
    """
    states = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state  # the modules of a unit share one state

    groups = [state._fsdp_param_group for state in states.values()]
    return [group for group in groups if group is not None]


class ShardedEngine(Engine):
    """Every rank holds a shard of the weights, of their gradients and of the optimizer state."""

    @property
    def reduces_gradients(self) -> bool:
        return any(group.reduce_grads for group in self._parameter_groups)

    @functools.cached_property
    def _parameter_groups(self) -> "list[FSDPParamGroup]":
        return parameter_groups(self.model)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def weight_norm(self) -> Tensor:
        squares = []
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                norm = torch.linalg.vector_norm(local_shard(parameter), dtype=torch.float32)
                squares.append(norm.square())
        total = self.ranks.sum_over_ranks(torch.stack(squares).sum().to(self.device))
        # Each replica of the model has counted all of it.
        return torch.sqrt(total / self.ranks.sharding.replicas)
