"""The folder of a finished model, and how to load it: with transformers, peft or torch alone."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Size, Tensor, nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import JsonObject, read_object, write_json
from llmtrain.interfaces.model import TensorConverter
from llmtrain.model_folders import is_adapter, weight_files
from llmtrain.models.hub_models import (
    DTYPES,
    StoredDtypes,
    causal_lm_classes,
    check_range,
    with_dtype,
)
from llmtrain.models.text_tower import BASE_FILE, BaseTensors
from llmtrain.parallel.shards import meta_like
from llmtrain.redaction import redacted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# The key in config.json that names the class of a plain torch module.
MODULE_CLASS = "torch_module"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model folder, and the conversion between its tensors and a checkpoint's.

    Attributes:
        config: ``config.json``.
        tokenizer: the tokenizer of the model, if there is one.
        trained_on: the name of the data, for the model card.
        base: the folder or hub name of the model that this one was trained from.
        loss: the training loss, for the model card; empty if it is not known.
        generation: ``generation_config.json``.
        architecture: the model as transformers builds it, on the meta device. It knows the names
            of tensors in published checkpoints. ``None`` if the names are the model's own.
        base_tensors: what the finished model gets from its base, and a checkpoint does not hold.
        is_finished: whether this is the folder of a finished model, not of a checkpoint.
        base_dtypes: the dtypes of the base's weights, if the finished model has them, too.
        dtypes: the dtypes of the weights in the folder; ``None`` for those that are trained.
        weights_name: the name of the file with the weights.
        may_split_weights: whether the weights may be split over several files.
        library: the library that loads the folder, as the hub calls it.
        kind: what the folder holds, for the title of the model card.
    """

    config: JsonObject
    tokenizer: "PreTrainedTokenizerFast | None"
    trained_on: str = "unknown data"
    base: str | None = None
    loss: str = ""
    generation: JsonObject = field(default_factory=dict)
    architecture: "PreTrainedModel | None" = None
    base_tensors: BaseTensors | None = None
    is_finished: bool = False
    base_dtypes: StoredDtypes | None = None
    dtypes: StoredDtypes | None = None

    weights_name: ClassVar[str] = "model.safetensors"
    may_split_weights: ClassVar[bool] = True
    library: ClassVar[str] = "transformers"
    kind: ClassVar[str] = "model"

    def finished(self, dtype: str) -> "ModelFiles":
        """Return the files of the finished model's folder, which holds all tensors.

        Args:
            dtype: of its weights. ``auto`` stands for the dtypes of the base. A model without one
                keeps those of training.
        """
        files = replace(self, is_finished=True)
        dtypes = self.base_dtypes if dtype == "auto" else StoredDtypes(DTYPES[dtype])
        if dtypes is None:
            return files
        return replace(files, config=with_dtype(self.config, dtypes.main), dtypes=dtypes)

    def trained_in(self, dtype: torch.dtype) -> "ModelFiles":
        """Return the files of a model whose weights are trained in another dtype than float32."""
        return replace(self, config=with_dtype(self.config, dtype))

    # --- the files

    def write(self, folder: Path, parameters: int) -> None:
        """Write everything but the weights.

        Args:
            folder: the model folder, which exists.
            parameters: the number of parameters, for the model card.
        """
        if self.generation:
            write_json(folder / "generation_config.json", self.generation, durable=False)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(redacted(self.card(parameters)))
        self.write_config(folder)
        if self.base_tensors is not None:
            self.base_tensors.write(folder, self.is_finished)

    def write_config(self, folder: Path) -> None:
        """Write ``config.json``."""
        write_json(folder / "config.json", self.config, durable=False)

    def card(self, parameters: int) -> str:
        """Return the model card, in the form that the hub reads."""
        hub_lines = f"library_name: {self.library}\n"
        class_name = self.config.get(MODULE_CLASS)
        if not class_name:
            class_name = self.config["architectures"][0]
            task = "text-classification" if gives_scores(self.config) else "text-generation"
            hub_lines += f"pipeline_tag: {task}\n"

        origin = "Trained"
        if self.base and Path(self.base).exists():
            folder = Path(self.base).resolve()
            is_of_run = folder.name == "model"  # every run calls its folder so
            origin = f"Fine-tuned from {folder.parent.name if is_of_run else folder.name}"
        elif self.base:
            origin = f"Fine-tuned from {self.base}"
            hub_lines += f"base_model: {self.base}\n"

        vocabulary = f", vocabulary {len(self.tokenizer):,}" if self.tokenizer is not None else ""
        loss_line = f"Training loss: {self.loss}.\n\n" if self.loss else ""
        return (
            f"---\n{hub_lines}tags: [llmtrain]\n---\n\n"
            f"# {class_name}, a {self.kind} of {parameters:,} parameters\n\n"
            f"{origin} with llmtrain on {self.trained_on}{vocabulary}.\n\n{loss_line}"
            '```python\nFOLDER = "."  # this folder; if you run the code elsewhere, its path\n\n'
            f"{self.loading_code()}```\n"
        )

    def loading_code(self) -> str:
        """Return Python code that loads the model from the folder ``FOLDER``."""
        auto_class = auto_class_of(self.config)
        code = f"model = {auto_class}.from_pretrained(FOLDER)\n"
        if self.tokenizer is None:
            return f"from transformers import {auto_class}\n\n{code}"
        return (
            f"from transformers import {auto_class}, AutoTokenizer\n\n{code}"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        )

    # --- the tensors

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of the folder, by the model's own names.

        A tensor with several names, such as a tied weight, has only its first one. Those that come
        from the base have their published names.
        """
        named_tensors: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            named_tensors.setdefault(id(tensor), (name, tensor.detach()))
        tensors = dict(named_tensors.values())
        if self.is_finished and self.base_tensors is not None:
            tensors.update(self.base_tensors.read())
        return tensors

    def export_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of the finished model, by the names of published checkpoints."""
        return self.cast(self.published(self.tensors(model)))

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by the names of published checkpoints."""
        from transformers.core_model_loading import revert_weight_conversion

        if self.architecture is None:
            return tensors
        from_base = self.base_tensors.names if self.base_tensors is not None else frozenset()
        own = {name: tensor for name, tensor in tensors.items() if name not in from_base}
        others = {name: tensor for name, tensor in tensors.items() if name in from_base}
        return {**revert_weight_conversion(self.architecture, own), **others}

    def cast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, by the names in the folder, in the dtypes that they have there."""
        return self.dtypes.cast(tensors) if self.dtypes is not None else tensors

    def tensor_converter(self, model: nn.Module) -> TensorConverter:
        """Return a function that converts one tensor of a checkpoint without the others.

        Together, the results for all tensors of a checkpoint are those of :meth:`export_tensors`.
        That is impossible if a published tensor is made of several tensors. The function then
        changes no names, and transformers can load these tensors, too.
        """

        # Try it on tensors without memory. A conversion takes a millisecond.
        tensors = {name: meta_like(tensor) for name, tensor in self.tensors(model).items()}
        expected_shapes = _shapes(self.published(tensors))
        is_converted = expected_shapes != _shapes(tensors)
        if is_converted:
            separate: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                separate.update(self.published({name: tensor}))
            is_converted = _shapes(separate) == expected_shapes

        def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
            named = {name: tensor}
            return self.cast(self.published(named) if is_converted else named)

        return convert


class ModuleFiles(ModelFiles):
    """The folder of a plain torch module, which only its own class can load."""

    may_split_weights: ClassVar[bool] = False
    library: ClassVar[str] = "pytorch"
    kind: ClassVar[str] = "torch module"

    def loading_code(self) -> str:
        """Return Python code that loads the weights from the folder ``FOLDER`` into the module."""
        return (
            "from safetensors.torch import load_model\n\n"
            f"model = {self.config[MODULE_CLASS]}(...)  # as the recipe builds it\n"
            f'load_model(model, f"{{FOLDER}}/{self.weights_name}")\n'
        )


def write_copy(source: Path, folder: Path, dtype: str | None) -> None:
    """Copy a model folder, or that of an adapter.

    The copy of a checkpoint has what the finished model gets from its base.

    Args:
        source: the folder.
        folder: the folder to write, which exists.
        dtype: a name in :data:`DTYPES`, to which the weights are cast.

    Raises:
        UserError: if the weights are quantized, pickled or damaged, or too large for the dtype, or
            if the base of a checkpoint has other weights now.
    """
    base_tensors = BaseTensors.of_checkpoint(source)
    if dtype is None and base_tensors is None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return

    paths = weight_files(source)
    if not paths:
        raise UserError(f"--dtype {dtype}: {source} holds no safetensors files to cast.")
    config = read_object(source / "config.json")
    if "quantization_config" in config:
        raise UserError(
            f"--dtype {dtype}: the weights in {source} are quantized; leave --dtype out, which "
            "copies them."
        )
    other_files = shutil.ignore_patterns(*(path.name for path in paths))
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=other_files)
    if config and dtype is not None:
        write_json(folder / "config.json", with_dtype(config, DTYPES[dtype]))

    index_file = folder / "model.safetensors.index.json"
    index = read_object(index_file)
    from_base: dict[str, Tensor] = {}
    if base_tensors is not None:
        (folder / BASE_FILE).unlink()
        base_tensors.write(folder, is_finished=True)
        from_base = base_tensors.read()
    for path in paths:
        with as_user_error(str(path), first_line), safe_open(path, "pt") as file:
            metadata = file.metadata()
            weights = {name: file.get_tensor(name) for name in [*file.keys()]}
        if path == paths[-1]:
            weights.update(from_base)
        if dtype is not None:
            weights = StoredDtypes(DTYPES[dtype]).cast(weights)
            check_range(source, weights)
        save_file(weights, folder / path.name, metadata)
    if index:
        index["weight_map"].update(dict.fromkeys(from_base, paths[-1].name))
        index["metadata"] = {}  # the size of all tensors has changed
        write_json(index_file, index)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


# --- what a folder holds, by its configuration


def how_to_load(folder: Path) -> str:
    """Return how to load the model in a folder, in a few words."""
    config = folder_config(folder)
    module_class = config.get(MODULE_CLASS)
    if module_class:
        weights = folder / ModuleFiles.weights_name
        return f'safetensors.torch: load_model({module_class}(...), "{weights}")'
    if is_adapter(folder):
        return "peft: AutoPeftModelForCausalLM.from_pretrained"
    return f"transformers: {auto_class_of(config)}.from_pretrained"


def folder_config(folder: Path) -> JsonObject:
    """Return ``config.json`` of a model folder, or ``adapter_config.json`` of an adapter's."""
    name = "adapter_config.json" if is_adapter(folder) else "config.json"
    return read_object(folder / name)


def config_values(config: "PreTrainedConfig") -> JsonObject:
    """Return a configuration as values of JSON.

    JSON has no infinite numbers, and transformers has its own form for them.
    """
    return cast(JsonObject, json.loads(config.to_json_string(use_diff=False)))


def auto_class_of(config: JsonObject) -> str:
    """Return the class of transformers that loads a model, by its ``config.json``."""
    if gives_scores(config):
        return "AutoModelForSequenceClassification"
    names = causal_lm_classes(str(config.get("model_type")))
    return names[1] if names is not None else "AutoModelForCausalLM"


def gives_scores(config: JsonObject) -> bool:
    """Return whether a model is a reward model, which scores answers and writes none.

    Args:
        config: ``config.json``, or ``adapter_config.json`` of an adapter.
    """
    architectures = "".join(config.get("architectures") or ())
    return config.get("task_type") == "SEQ_CLS" or "ForSequenceClassification" in architectures
