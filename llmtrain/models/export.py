"""The folder of a finished model, which every Hugging Face tool can load."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Size, Tensor, nn

from llmtrain.parallel.shards import meta_like
from llmtrain.types import JsonObject, TensorConverter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model folder, and the conversion between its tensors and a checkpoint's.

    Attributes:
        config: ``config.json``.
        tokenizer: the tokenizer of the model.
        trained_on: the name of the data, for the model card.
        base: the folder or hub name of the model that this one was trained from.
        generation: ``generation_config.json``.
        weights_name: the name of the file with the weights.
        may_split_weights: whether the weights may be split over several files.
    """

    config: JsonObject
    tokenizer: "PreTrainedTokenizerFast"
    trained_on: str = "unknown data"
    base: str | None = None
    generation: JsonObject = field(default_factory=dict)

    weights_name: ClassVar[str] = "model.safetensors"
    may_split_weights: ClassVar[bool] = True

    def write(self, folder: Path, parameters: int) -> None:
        """Write everything but the weights.

        Args:
            folder: the model folder, which may exist.
            parameters: the number of parameters, for the model card.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.generation:
            (folder / "generation_config.json").write_text(
                json.dumps(self.generation, indent=2) + "\n"
            )
        self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(self.card(parameters))
        self.write_config(folder)

    def write_config(self, folder: Path) -> None:
        """Write ``config.json``."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps, by the model's own names.

        A tensor with several names, such as a tied weight, has only its first one.
        """
        named_tensors: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            named_tensors.setdefault(id(tensor), (name, tensor.detach()))
        return dict(named_tensors.values())

    def export_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of the finished model, by the names of published checkpoints."""
        return self.published(model, self.tensors(model))

    def published(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of a checkpoint to those of a finished model."""
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion

        # The names of this package's GPT are those of published checkpoints.
        if not isinstance(model, PreTrainedModel):
            return tensors
        return cast(dict[str, Tensor], revert_weight_conversion(model, dict(tensors)))

    def tensor_converter(self, model: nn.Module) -> TensorConverter:
        """Return a function that converts one tensor of a checkpoint without the others.

        Together, the results for all tensors of a checkpoint are those of :meth:`export_tensors`.
        That is impossible if a published tensor is made of several tensors. The function then
        changes nothing, and transformers can load these tensors, too.
        """

        def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
            return self.published(model, {name: tensor})

        def leave_unchanged(name: str, tensor: Tensor) -> dict[str, Tensor]:
            return {name: tensor}

        # Try it on tensors without memory.
        tensors = {name: meta_like(tensor) for name, tensor in self.tensors(model).items()}
        expected_shapes = _shapes(self.published(model, tensors))
        if expected_shapes == _shapes(tensors):
            return leave_unchanged

        converted: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            converted.update(convert(name, tensor))
        return convert if _shapes(converted) == expected_shapes else leave_unchanged

    def card(self, parameters: int) -> str:
        """Return the model card, in the form that the hub reads."""
        hub_line = ""
        origin = "Trained"
        if self.base:
            is_local = Path(self.base).exists()
            if not is_local:
                hub_line = f"base_model: {self.base}\n"
            origin = f"Fine-tuned from {Path(self.base).name if is_local else self.base}"

        auto_class = "AutoModelForCausalLM"
        task = "text-generation"
        if gives_scores(self.config):
            auto_class = "AutoModelForSequenceClassification"
            task = "text-classification"

        return (
            f"---\nlibrary_name: transformers\npipeline_tag: {task}\n{hub_line}"
            "tags: [llmtrain]\n---\n\n"
            f"# {self.title(parameters)}\n\n"
            f"{origin} with llmtrain on {self.trained_on}, vocabulary {len(self.tokenizer):,}.\n\n"
            f"```python\nfrom transformers import {auto_class}, AutoTokenizer\n\n"
            f"model = {auto_class}.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
        )

    def title(self, parameters: int) -> str:
        """Return the title of the model card."""
        return f"A {self.config['model_type']} of {parameters:,} parameters"


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def gives_scores(config: JsonObject) -> bool:
    """Return whether ``config.json`` is of a reward model, which scores answers and writes none."""
    architectures = config.get("architectures") or ()
    return "ForSequenceClassification" in "".join(architectures)
