"""Tensors of a base that a run does not train, such as a vision tower.

Text does not pass through them, so they are not loaded: neither ranks nor checkpoints hold them.
The finished model gets them from the files of the base, byte by byte.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from torch import Tensor

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError
from llmtrain.files import read_object
from llmtrain.json_types import JsonObject
from llmtrain.model_folders import is_adapter
from llmtrain.models.hub_models import local_folder, origin_of
from llmtrain.models.towers import outermost_modules
from llmtrain.models.weight_loading import (
    COMPUTED_BUFFERS,
    StoredTensor,
    random_weights,
    stored_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The file in the folder of an adapter, or in a checkpoint without all tensors, that identifies the
# base. Its name alone does not: it may refer to other weights later.
BASE_FILE = "base.json"


@dataclass(frozen=True)
class BaseTensors:
    """The tensors that a finished model gets from its base.

    Attributes:
        names: their names in the finished model.
        read: returns them by name. Their memory may be mapped from files.
        folder: the folder of the base; ``None`` if its weights are random.
        base: what a checkpoint says of the base, as it does not hold these tensors.
    """

    names: frozenset[str]
    read: Callable[[], dict[str, Tensor]]
    folder: Path | None = None
    base: JsonObject | None = None


def stored_base_tensors(
    model: "PreTrainedModel",
    outside_text: Collection[str],
    name: str,
    revision: str,
    *,
    is_reward_model: bool,
    origin: JsonObject | None = None,
) -> BaseTensors | None:
    """Return the stored tensors of a base that are not trained, and log those of no module.

    Some tensors belong to no module of the model, because its class ignores them: Qwen3-Next has
    heads that predict several tokens, for example.

    Args:
        model: the full model, on the meta device.
        outside_text: the modules that are not trained; see
            :func:`llmtrain.models.towers.outside_text_tower`.
        name: the folder or hub name of the base.
        revision: the branch, tag or commit of the base on the hub.
        is_reward_model: whether the class is another one than that of the stored model. Its files
            have a head for tokens then, which is left out.
        origin: identifies the weights of the base, for checkpoints; ``None`` if none are written.

    Raises:
        UserError: if the files cannot be read, or if a checkpoint's base has changed.
    """
    if refers_to_base(Path(name)):
        name, origin = _complete_base(Path(name))
        revision = origin.get("commit") or "main"
    folder = local_folder(name, revision)
    outside = _names_within(model.state_dict(), outside_text)
    known = {*model.state_dict(), *dict(model.named_buffers())}
    stored = [*stored_tensors(model, folder)]

    untrained = [tensor for tensor in stored if tensor.name in outside]
    _say_lost(model, outside - {tensor.name for tensor in untrained}, name)

    ignored = [
        tensor
        for tensor in stored
        if tensor.name not in known and not tensor.key.endswith(COMPUTED_BUFFERS)
    ]
    # The class ignores the scales of quantized weights, too. The finished model has none.
    is_quantized = "quantization_config" in read_object(folder / "config.json")
    keeps_ignored = not is_reward_model and not is_quantized
    if ignored:
        ignored_keys = {tensor.key for tensor in ignored}
        others = [tensor.key for tensor in stored if tensor.key not in ignored_keys]
        _say_ignored(model, ignored, others, is_kept=keeps_ignored)
    if keeps_ignored:
        untrained += ignored

    if not untrained:
        return None
    return BaseTensors(
        names=frozenset(tensor.key for tensor in untrained),
        read=functools.partial(_read, name, untrained, _headers(untrained)),
        folder=folder,
        base={"name": _lasting_name(name), "origin": origin},
    )


def random_base_tensors(
    model: "PreTrainedModel", outside_text: Collection[str], seed: int
) -> BaseTensors | None:
    """Return the random initial values of the modules that are not trained.

    Args:
        model: the full model, on the meta device, with real buffers.
        outside_text: the modules that are not trained.
        seed: the seed of the run.
    """
    outside = _names_within(model.state_dict(), outside_text)
    if not outside:
        return None
    initial = published(model, {name: model.state_dict()[name] for name in outside})
    return BaseTensors(
        names=frozenset(initial),
        read=functools.partial(_initialise, model, outside, seed),
    )


def _initialise(model: "PreTrainedModel", names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return random initial values of some of a model's tensors, by their published names."""
    values = {name: model.state_dict()[name] for name in names}  # with buffers
    parameters = [name for name, _ in model.named_parameters() if name in names]
    values.update(random_weights(model, seed, parameters))
    return published(model, values)


def published(model: "PreTrainedModel", tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of published checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    published: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return published


def refers_to_base(folder: Path) -> bool:
    """Return whether a folder is of a checkpoint that does not hold all tensors of its model."""
    return (folder / BASE_FILE).exists() and not is_adapter(folder)


def _complete_base(checkpoint: Path) -> tuple[str, JsonObject]:
    """Return the name of the base that a checkpoint refers to, and what identifies its weights.

    Raises:
        UserError: if that base has other weights now.
    """
    base = read_object(checkpoint / BASE_FILE)
    name = str(base.get("name"))
    origin: JsonObject = base.get("origin") or {}
    if origin_of(name, origin.get("commit") or "main") != origin:
        raise UserError(
            f"{checkpoint} does not hold what its run did not train, which is in {name}, and that "
            "has other weights now; put those back."
        )
    return name, origin


def _lasting_name(name: str) -> str:
    """Return a name that is right in any working directory."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _names_within(names: Iterable[str], modules: Collection[str]) -> set[str]:
    """Return the names of tensors that belong to some modules, or are named by themselves."""
    prefixes = tuple(f"{module}." for module in modules)
    return {name for name in names if name in modules or name.startswith(prefixes)}


def _headers(tensors: list[StoredTensor]) -> list[tuple[list[int], str]]:
    """Return the shape and dtype of stored tensors."""
    headers = []
    for tensor in tensors:
        stored = safe_open(tensor.path, "pt").get_slice(tensor.key)  # type: ignore[no-untyped-call]
        headers.append((stored.get_shape(), stored.get_dtype()))
    return headers


def _read(
    name: str, tensors: list[StoredTensor], headers: list[tuple[list[int], str]]
) -> dict[str, Tensor]:
    """Return stored tensors.

    Raises:
        UserError: if the files are not those of the beginning of the run any more.
    """
    try:
        has_changed = _headers(tensors) != headers
    except Exception:  # safetensors raises several types
        has_changed = True
    if has_changed:
        raise UserError(
            f"{name} has changed since the run began, and the finished model gets from it what was "
            "not trained; put its files back, and start the same command again."
        )
    return {tensor.key: tensor.read() for tensor in tensors}


def _say_lost(model: "PreTrainedModel", lost: Collection[str], base: str) -> None:
    """Log tensors of a model that are not trained, and that its base does not hold."""
    names = [*model.state_dict()]
    modules = outermost_modules(
        [name for name in names if name in lost],
        others=[name for name in names if name not in lost],
    )
    if modules:
        say("left out", f"{' and '.join(modules)}: {base} does not hold them, nor will the result")


def _say_ignored(
    model: "PreTrainedModel",
    ignored: list[StoredTensor],
    others: list[str],
    is_kept: bool,
) -> None:
    """Log stored tensors that the model's class ignores, by the modules that they belong to."""
    count = sum(math.prod(shape) for shape, _ in _headers(ignored))
    modules = [*outermost_modules([tensor.key for tensor in ignored], others=others)]
    if len(modules) > 3:
        modules = [modules[0], f"{len(modules) - 1} more"]
    description = (
        f"{' and '.join(modules)}: {type(model).__name__} does not have these "
        f"{pluralize(count, 'parameter')}"
    )
    if is_kept:
        say(
            "untrained",
            f"{description}; the finished model has them as they were, so they no longer match its "
            "other weights",
        )
    else:
        say("left out", f"{description}, nor will the finished model")
