"""Place a new model on the devices that train it, and load its initial weights."""

import functools
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle, Weights
from llmtrain.parallel.fsdp import parameter_groups, shard
from llmtrain.parallel.ranks import Ranks, Sharding
from llmtrain.parallel.sharding import ranks_of
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.shipped import shipped_config

_GIB = 2**30
_MIB = 2**20


def place(accelerator: Accelerator, bundle: ModelBundle) -> ModelBundle:
    """Move a new model to this rank's device, or shard it if the accelerate config asks for it.

    Parameters on the meta device become real and get their initial weights.

    Args:
        accelerator: the Accelerator of this run.
        bundle: the model with its weights. It is changed in place.

    Returns:
        The same ``bundle``.

    Raises:
        UserError: if there is not enough memory, or if the model cannot be sharded.
    """
    model = bundle.model
    class_name = type(model).__name__  # before FSDP renames it
    # Quantized weights are stored as integers.
    is_quantized = not all(p.is_floating_point() for p in model.parameters())
    ranks = ranks_of(accelerator)
    sharding = ranks.sharding

    if sharding.is_sharded and is_quantized and bundle.weights is None:
        raise UserError("--load_in_4bit weights cannot be sharded; use a DDP config.")
    without_values = [name for name, p in model.named_parameters() if p.is_meta]
    if without_values and bundle.weights is None:
        raise UserError(
            f"{class_name} has parameters on the meta device without values, such as "
            f"{without_values[0]}; pass their names and values to ModelBundle as weights, or build "
            "the model on the CPU."
        )
    check_memory(sharding, accelerator.device, model)
    _say_size(model, class_name)

    if sharding.is_sharded:
        place_sharded(ranks, model, bundle.weights or ())
    else:
        empty = {name: p for name, p in model.named_parameters() if p.is_meta}
        _make_real(empty.values(), accelerator.device)
        fill(empty, bundle.weights or ())
        if not is_quantized:  # bitsandbytes places quantized models itself
            model.to(accelerator.device)
    bundle.check()
    bundle.objective.check(model)
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
    _load_shards(ranks.accelerator, model, weights)
    _say_sharding(ranks.sharding, model)


def _load_shards(accelerator: Accelerator, model: nn.Module, weights: Weights) -> None:
    """Allocate this rank's shards of a model, and load their weights."""
    offload = accelerator.state.fsdp_plugin.cpu_offload
    is_offloaded = isinstance(offload, CPUOffloadPolicy)
    device = torch.device("cpu") if is_offloaded else accelerator.device

    empty = {name: p for name, p in model.named_parameters() if p.is_meta}
    _make_real(empty.values(), device)
    model.to(device)  # FSDP2 notices here that its parameters have new memory

    # Buffers are not offloaded.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(accelerator.device))

    fill(empty, weights)
    _give_addresses(model)


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


def check_memory(sharding: Sharding, device: torch.device, model: nn.Module) -> None:
    """Check that the GPU has the least memory that a run needs.

    This is the memory for weights and gradients. The state of an optimizer may be small. The check
    allocates nothing.

    Raises:
        UserError: if the GPU has less memory.
    """
    if device.type != "cuda" or sharding.cpu_offload:
        return

    weights = 0.0
    gradients = 0.0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size() / sharding.shards
        weights += size
        if parameter.requires_grad:
            gradients += size
    available = int(torch.cuda.get_device_properties(device).total_memory)
    if weights + gradients > available:
        raise UserError(
            f"each process needs at least {(weights + gradients) / _GIB:.1f} GiB, but this GPU has "
            f"{available / _GIB:.1f}: {weights / _GIB:.1f} GiB for weights, {gradients / _GIB:.1f} "
            "for gradients, and more for the optimizer and for activations. Shard the model over "
            f"more processes ({shipped_config('fsdp2')}), or use fewer bytes for each weight; "
            "llmtrain plan --fit shows how."
        )


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of this rank's shards of the parameters, and of the full parameters."""
    local = 0
    full = 0
    for parameter in model.parameters():
        full += parameter.numel() * parameter.element_size()
        local += local_shard(parameter).numel() * parameter.element_size()
    return local, full


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


def _say_size(model: nn.Module, class_name: str) -> None:
    """Print the number of parameters of a model, and how many of them are trained."""
    total, trained = parameter_counts(model)
    share = "" if trained == total else f", {trained:,} of them trained ({trained / total:.2%})"
    say("model", f"{class_name}: {total:,} parameters{share}")


def _say_sharding(sharding: Sharding, model: nn.Module) -> None:
    """Print how a model is sharded, and how much of it this process holds."""
    replicas = f"{sharding.replicas} x " if sharding.replicas > 1 else ""
    units = len(parameter_groups(model))
    local, full = parameter_bytes(model)
    say(
        "sharded",
        f"FSDP2 over {replicas}{sharding.shards} processes in {units} units; "
        f"this process holds {local / _MIB:.2f} of {full / _MIB:.2f} MiB of weights",
    )
