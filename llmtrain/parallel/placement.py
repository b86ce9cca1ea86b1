"""Move a new model to the devices that train it, and choose the engine that computes with it."""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.interfaces.model import ModelBundle, Weights
from llmtrain.interfaces.objective import Objective
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine, parameter_groups, shard
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import fill, local_shard


def move_to_devices(ranks: Ranks, bundle: ModelBundle, label: str = "model") -> ModelBundle:
    """Move a new model to this rank's device, or shard it if the accelerate config asks for it.

    Parameters on the meta device become real and get their initial weights.

    Args:
        ranks: the ranks of the run.
        bundle: the model with its weights, and frozen ones. They are changed in place.
        label: of the model, in the log.

    Returns:
        The same ``bundle``.

    Raises:
        UserError: if the model lacks values, or cannot be sharded.
    """
    model = bundle.model
    class_name = type(model).__name__  # before FSDP renames it
    # Quantized weights are stored as integers.
    is_quantized = not all(p.is_floating_point() for p in model.parameters())

    if ranks.is_sharded and is_quantized and bundle.weights is None:
        raise UserError("--load_in_4bit weights cannot be sharded; use a DDP config.")
    without_values = [name for name, p in model.named_parameters() if p.is_meta]
    if without_values and bundle.weights is None:
        raise UserError(
            f"{class_name} has parameters on the meta device without values, such as "
            f"{without_values[0]}; pass their names and values to ModelBundle as weights, or build "
            "the model on the CPU."
        )
    total, trained = parameter_counts(model)
    share = (
        "" if trained in (0, total) else f", {trained:,} of them trained ({trained / total:.2%})"
    )
    say(label, f"{class_name}: {total:,} parameters{share}")

    if ranks.is_sharded:
        place_sharded(ranks, model, bundle.weights or ())
    else:
        empty = {name: p for name, p in model.named_parameters() if p.is_meta}
        _make_real(empty.values(), ranks.device)
        fill(empty, bundle.weights or ())
        if not is_quantized:  # bitsandbytes places quantized models itself
            model.to(ranks.device)
    bundle.check()
    bundle.objective.check(model)
    for name, frozen in bundle.frozen.items():
        move_to_devices(ranks, frozen, label=name)
        frozen.model.eval()
    return bundle


def place_sharded(ranks: Ranks, model: nn.Module, weights: Weights) -> None:
    """Shard a model over the ranks, in place, and load its initial weights.

    Parameters on the meta device become real. Tied parameters stay tied.

    Args:
        ranks: the ranks that hold a shard each.
        model: the model, real or on the meta device.
        weights: names and full tensors, for the parameters on the meta device. Only one full tensor
            is in memory at a time.

    Raises:
        UserError: if the model has no blocks.
    """
    shard(ranks.accelerator, model)

    device = torch.device("cpu") if ranks.sharding.cpu_offload else ranks.device
    empty = {name: p for name, p in model.named_parameters() if p.is_meta}
    _make_real(empty.values(), device)
    model.to(device)  # FSDP2 notices here that its parameters have new memory

    # Buffers are not offloaded.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(ranks.device))

    fill(empty, weights)
    _give_addresses(model)

    replicas = f"{ranks.sharding.replicas} x " if ranks.sharding.replicas > 1 else ""
    units = len(parameter_groups(model))
    say("sharded", f"FSDP2 over {replicas}{ranks.sharding.shards} processes in {units} units")


def _give_addresses(model: nn.Module) -> None:
    """Give the empty shards of a model distinct addresses.

    Accelerate identifies the parameters of an optimizer by ``data_ptr()``, which is 0 for all empty
    shards.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and local_shard(parameter).numel() == 0:
            address = functools.partial(id, parameter)
            parameter._local_tensor.data_ptr = address  # type: ignore[method-assign]


def _make_real(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Allocate memory for parameters on the meta device, in place and uninitialised.

    Each parameter stays the same object, so that tied modules still share it.
    """
    for parameter in parameters:
        real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters of a model, and how many of them are trained."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        is_quantized = not parameter.is_floating_point()
        count = parameter.numel()
        if is_quantized:  # bitsandbytes stores two 4-bit numbers in a byte
            count *= 2
        total += count
        if parameter.requires_grad:
            trained += count
    return total, trained


def engine_for(
    ranks: Ranks,
    model: nn.Module,
    objective: Objective,
    config: ParallelConfig,
    frozen: Mapping[str, ModelBundle] = MappingProxyType({}),
) -> Engine:
    """Return the engine for the parallel method that the accelerate config asks for.

    Args:
        ranks: the ranks that train the model.
        model: the model that ``accelerator.prepare`` returned.
        objective: the loss that is minimised.
        config: how ranks exchange gradients.
        frozen: the frozen models of the run.
    """
    engine_class: type[Engine] = ShardedEngine if ranks.is_sharded else ReplicatedEngine
    if config.bitwise:
        engine_class = BitwiseEngine
    return engine_class(
        ranks,
        model,
        objective=objective,
        sync_each_batch=config.sync_each_batch,
        frozen={name: bundle.model for name, bundle in frozen.items()},
    )
