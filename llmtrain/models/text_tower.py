"""Multimodal models on text: a run trains the text tower, and the rest stays with the base.

Text does not pass through a vision tower, so that is not loaded: neither ranks nor checkpoints hold
it. Other tensors belong to no module of the class, such as heads that predict several tokens. The
finished model gets both from the files of the base, byte by byte.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from torch import Tensor

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError, as_user_error
from llmtrain.files import JsonObject, read_object, write_json
from llmtrain.model_folders import weight_files
from llmtrain.models.hub_models import local_folder, origin_of
from llmtrain.models.weight_loading import COMPUTED_BUFFERS, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The file in the folder of an adapter, or in a checkpoint without all tensors, that identifies the
# base. Its name alone does not: it may refer to other weights later.
BASE_FILE = "base.json"
# The files of a multimodal model that prepare images and sound for it.
_PROCESSOR_FILES = "*processor_config.json"


# --- the modules that text does not pass through


def outside_text_tower(model: "PreTrainedModel") -> list[str]:
    """Return the modules of a model that text does not pass through, such as a vision tower.

    A head is outside the base model, and belongs to the text.

    Returns:
        The names of the modules, or of single parameters. There are none if the model takes only
        text.
    """
    if model.config.get_text_config() is model.config:
        return []
    used = {*model.get_decoder().parameters()}  # type: ignore[no-untyped-call]
    used |= {*model.parameters()} - {*model.base_model.parameters()}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        used |= {*head.parameters()}

    names = dict(model.named_parameters(remove_duplicate=False))
    used_modules: set[str] = set()
    for name, parameter in names.items():
        if parameter in used:
            used_modules.update(_prefixes(name))

    # The outermost modules that hold no used parameter. A parameter whose module also holds a used
    # one stands for itself.
    modules: list[str] = []
    for name, parameter in names.items():
        if parameter not in used:
            unused = [prefix for prefix in _prefixes(name) if prefix not in used_modules]
            modules.append(unused[0])
    return [*dict.fromkeys(modules)]


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a tensor, the outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def remove_outside_text(model: "PreTrainedModel", modules: Collection[str]) -> None:
    """Remove modules or parameters from a model, which has ``None`` in their places afterwards.

    Args:
        model: the model.
        modules: what :func:`outside_text_tower` returned.
    """
    if not modules:
        return
    count = model.num_parameters()
    for name in modules:
        owner_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner_name), own_name, None)
    count -= model.num_parameters()
    say(
        "text only",
        f"{count:,} parameters are not loaded, as text never reaches them: {', '.join(modules)}",
    )


# --- what a finished model gets from its base


@dataclass(frozen=True)
class BaseTensors:
    """The tensors that a finished model gets from its base, and a checkpoint does not hold.

    Attributes:
        base: the folder or hub name of the base.
        origin: identifies its weights.
        names: the names of the tensors in its files, and in the finished model.
    """

    base: str
    origin: JsonObject
    names: frozenset[str]

    def folder(self) -> Path:
        """Return the local folder of the base.

        Raises:
            UserError: if the base has other weights than :attr:`origin`, or none.
        """
        revision = self.origin.get("commit") or "main"
        with as_user_error(self.base):
            if origin_of(self.base, revision) != self.origin:
                raise UserError(
                    f"{self.base} has other weights now, and the finished model gets from it what "
                    "is not trained; put those back, and start the same command again."
                )
            return local_folder(self.base, revision)

    def read(self) -> dict[str, Tensor]:
        """Return the tensors by name. Their memory may be mapped from files."""
        tensors = {}
        for path in weight_files(self.folder()):
            with safe_open(path, "pt") as file:
                for name in sorted(self.names.intersection(file.keys())):
                    tensors[name] = file.get_tensor(name)
        return tensors

    def write(self, folder: Path, is_finished: bool) -> None:
        """Write the processor of the base into a finished model, or its name into a checkpoint."""
        if is_finished:
            copy_processor(self.folder(), folder)
        else:
            content = {"base": self.base, "origin": self.origin, "names": sorted(self.names)}
            write_json(folder / BASE_FILE, content, durable=False)

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "BaseTensors | None":
        """Return what a checkpoint lacks; ``None`` for a model or an adapter."""
        content = read_object(folder / BASE_FILE)
        if "names" not in content:  # an adapter only has the origin of its base
            return None
        return cls(content["base"], content["origin"], frozenset(content["names"]))


def copy_processor(base: Path, folder: Path) -> None:
    """Copy the files of a multimodal model's processor to another model folder."""
    for path in base.glob(_PROCESSOR_FILES):
        shutil.copyfile(path, folder / path.name)


def stored_base_tensors(
    model: "PreTrainedModel",
    outside_text: Collection[str],
    name: str,
    origin: JsonObject,
    *,
    is_reward_model: bool,
) -> BaseTensors | None:
    """Return the stored tensors of a base that are not trained, and log those of no module.

    Args:
        model: the full model, on the meta device.
        outside_text: the modules that are not trained; see :func:`outside_text_tower`.
        name: the folder or hub name of the base, or the folder of a checkpoint.
        origin: identifies the weights of the base.
        is_reward_model: whether the class is another one than that of the stored model. Its files
            have a head for tokens then, which is left out.

    Raises:
        UserError: if the files cannot be read, or if a checkpoint's base has changed.
    """
    folder = local_folder(name, origin.get("commit") or "main")
    tensors = BaseTensors.of_checkpoint(folder)
    if tensors is not None:
        return tensors

    known = {*model.state_dict(), *dict(model.named_buffers())}
    prefixes = tuple(f"{module}." for module in outside_text)
    untrained = []
    ignored = []
    for tensor in stored_tensors(model, folder):
        if tensor.name in outside_text or tensor.name.startswith(prefixes):
            untrained.append(tensor.key)
        elif tensor.name not in known and not tensor.key.endswith(COMPUTED_BUFFERS):
            ignored.append(tensor.key)

    if ignored:
        # The class ignores the scales of quantized weights, too. The finished model has none.
        is_quantized = "quantization_config" in read_object(folder / "config.json")
        is_kept = not is_reward_model and not is_quantized
        if is_kept:
            untrained += ignored
        outcome = "has them as they were" if is_kept else "does not have them either"
        say(
            "untrained" if is_kept else "left out",
            f"{ignored[0]} ({pluralize(len(ignored), 'tensor')} in all): {type(model).__name__} "
            f"does not have them; the finished model {outcome}",
        )
    if not untrained:
        return None
    base = str(folder.resolve()) if Path(name).is_dir() else name
    return BaseTensors(base, origin, frozenset(untrained))
