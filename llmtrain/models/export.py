"""A model as every Hugging Face tool loads it: config.json, safetensors, tokenizer files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Size, Tensor, nn

from llmtrain.parallel.shards import meta_like
from llmtrain.types import Facts, Published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model folder, and how a model's tensors come into it and back."""

    config: Facts  # config.json
    tokenizer: "PreTrainedTokenizerFast"
    trained_on: str = "unknown data"
    base: str | None = None  # the model that it was trained from
    generation: Facts = field(default_factory=dict)  # generation_config.json

    weights: ClassVar[str] = "model.safetensors"
    divisible: ClassVar[bool] = True  # into several files

    def write(self, folder: Path, parameters: int) -> None:
        """Write all of a model folder but the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.generation:
            (folder / "generation_config.json").write_text(
                json.dumps(self.generation, indent=2) + "\n"
            )
        self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(self.card(parameters))
        self.write_config(folder)

    def write_config(self, folder: Path) -> None:
        """Write what describes the model."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a checkpoint keeps, by the names of the model at hand; of tied weights one."""
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), (name, tensor.detach()))
        return dict(first.values())

    def exported(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the finished model's tensors, by the names that published models of this kind have."""
        return self.published(model, self.tensors(model))

    def published(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors of a checkpoint to those of a finished model."""
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion

        if not isinstance(
            model, PreTrainedModel
        ):  # this package's GPT, whose names are published ones
            return tensors
        return cast(dict[str, Tensor], revert_weight_conversion(model, dict(tensors)))

    def publishing(self, model: nn.Module) -> Published:
        """Return what turns one tensor of a checkpoint into those that :meth:`exported` has of it.

        The other tensors need not be there. Where published tensors are made of several, it leaves all unchanged,
        which transformers loads, too.
        """

        def converted(name: str, whole: Tensor) -> dict[str, Tensor]:
            return self.published(model, {name: whole})

        def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Size]:
            return {name: tensor.shape for name, tensor in tensors.items()}

        kept = {name: meta_like(tensor) for name, tensor in self.tensors(model).items()}
        together = shapes(self.published(model, kept))
        if together != shapes(kept):
            apart = {
                key: each
                for name, tensor in kept.items()
                for key, each in converted(name, tensor).items()
            }
            if shapes(apart) == together:
                return converted
        return lambda name, whole: {name: whole}

    def card(self, parameters: int) -> str:
        """Return the model card, in the form that the hub reads."""
        base = f"base_model: {self.base}\n" if self.base and not Path(self.base).exists() else ""
        start = (
            f"Fine-tuned from {Path(self.base).name if base == '' else self.base}"
            if self.base
            else "Trained"
        )
        auto, task = "AutoModelForCausalLM", "text-generation"
        if gives_scores(self.config):
            auto, task = "AutoModelForSequenceClassification", "text-classification"
        return (
            f"---\nlibrary_name: transformers\npipeline_tag: {task}\n{base}tags: [llmtrain]\n---\n\n"
            f"# {self.title(parameters)}\n\n"
            f"{start} with llmtrain on {self.trained_on}, vocabulary {len(self.tokenizer):,}.\n\n"
            f"```python\nfrom transformers import {auto}, AutoTokenizer\n\n"
            f"model = {auto}.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
        )

    def title(self, parameters: int) -> str:
        """Return the title of the model card."""
        return f"A {self.config['model_type']} of {parameters:,} parameters"


def gives_scores(config: Facts) -> bool:
    """Return whether a model with this config.json gives answers scores, and writes none."""
    return "ForSequenceClassification" in "".join(config.get("architectures") or ())
