"""The repeated blocks of a model, and its embedding and head."""

from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.fsdp import FSDPModule


@runtime_checkable
class HasEmbeddings(Protocol):
    """A model with the methods of transformers that return its embedding and its head."""

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module | None: ...


def block_classes(model: nn.Module) -> set[str]:
    """Return the class names of a model's repeated blocks.

    A model of transformers lists them in ``_no_split_modules``. In any other model, the blocks
    are the elements of its longest ``nn.ModuleList`` that is not inside another one. The result is
    empty if the model has no such list.
    """
    declared = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
    present = {type(module).__name__ for module in model.modules()}
    if declared & present:
        return declared & present

    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        is_inside_another = any(name.startswith(f"{outer}.") for outer in lists)
        if not is_inside_another:
            lists[name] = module
    longest = max(lists.values(), key=len, default=())
    return {type(block).__name__ for block in longest}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks, outer blocks before the blocks that they contain."""
    names = block_classes(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered.

    A forward pass without a backward pass can leave gathered weights behind.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
