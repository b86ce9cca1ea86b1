"""The text tower of a multimodal model, and the modules that text does not pass through."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def outside_text_tower(model: "PreTrainedModel") -> dict[str, list[str]]:
    """Return the modules of a model that text does not pass through, such as a vision tower.

    The text tower is the module that ``config.get_text_config()`` describes. A head is outside the
    base model, and belongs to the text.

    Returns:
        The names of the parameters of each module, by the name of the module. It is empty if the
        model takes only text.
    """
    used = {*_text_tower(model).parameters()}
    used |= {*model.parameters()} - {*model.base_model.parameters()}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        used |= {*head.parameters()}

    names = dict(model.named_parameters(remove_duplicate=False))
    return outermost_modules(
        [name for name, parameter in names.items() if parameter not in used],
        others=[name for name, parameter in names.items() if parameter in used],
    )


def remove_modules(model: "PreTrainedModel", names: Iterable[str]) -> None:
    """Remove modules or parameters from a model, which has ``None`` in their places afterwards."""
    for name in names:
        owner_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner_name), own_name, None)


def _text_tower(model: "PreTrainedModel") -> nn.Module:
    from transformers import PreTrainedModel

    text_config = model.config.get_text_config()
    for module in model.modules():  # outer modules come first
        if isinstance(module, PreTrainedModel) and module.config is text_config:
            return module
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder


def outermost_modules(names: Iterable[str], others: Collection[str]) -> dict[str, list[str]]:
    """Group names of tensors by the outermost module that holds none of the ``others``.

    Args:
        names: names of tensors, with the modules that hold them before each dot.
        others: names of other tensors.

    Returns:
        The names of each module, by the name of the module. A tensor whose module also holds one of
        the others stands for itself.
    """
    shared_modules: set[str] = set()
    for name in others:
        shared_modules.update(_prefixes(name))

    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module = next((prefix for prefix in _prefixes(name) if prefix not in shared_modules), name)
        groups[module].append(name)
    return dict(groups)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a tensor, the outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
