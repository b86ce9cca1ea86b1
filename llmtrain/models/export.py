"""A model as every Hugging Face tool loads it: config.json, safetensors, tokenizer files."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from llmtrain.parallel.mesh import meta_like

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelFiles:
    """What belongs into a model folder, and how a model's tensors come into it and back."""

    config: dict[str, Any]  # config.json
    tokenizer: "PreTrainedTokenizerFast"
    trained_on: str = "unknown data"
    base: str | None = None  # what it was trained from
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json

    weights: ClassVar[str] = "model.safetensors"
    divisible: ClassVar[bool] = True  # into several files

    def write(self, folder: Path, parameters: int) -> None:
        """Write all of a model folder but the weights."""
        self.write_beside(folder, parameters)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    def write_beside(self, folder: Path, parameters: int) -> None:
        """The tokenizer, the model card, and where generation ends."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.generation:
            (folder / "generation_config.json").write_text(json.dumps(self.generation, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(self.card(parameters))

    def tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by the names of the model at hand; of tied weights one."""
        kept: dict[str, torch.Tensor] = {}
        seen = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                kept[name] = tensor.detach()
            seen.add(id(tensor))
        return kept

    def exported(self, model: Any) -> dict[str, torch.Tensor]:
        """The finished model's tensors, by the names that published models of this kind have."""
        return self._published(model, self.tensors(model))

    def _published(self, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not hasattr(model, "get_output_embeddings"):  # this package's GPT, whose names are those already
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(model, dict(tensors))

    def publishing(self, model: Any) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What turns one tensor of a checkpoint into those that :meth:`exported` has of it, so that the others need not
        be there. Where published tensors are made of several, it leaves all as they are, which transformers loads, too.
        """

        def as_it_is(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: whole}

        def converted(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
            return self._published(model, {name: whole})

        def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in tensors.items()}

        kept = {name: meta_like(tensor) for name, tensor in self.tensors(model).items()}
        at_once = self._published(model, kept)
        if shapes(at_once) == shapes(kept):
            return as_it_is
        apart = {key: part for name, tensor in kept.items() for key, part in converted(name, tensor).items()}
        return converted if shapes(apart) == shapes(at_once) else as_it_is

    def card(self, parameters: int) -> str:
        """The model card, in the form that the hub reads."""
        what = self._title(parameters)
        base = f"base_model: {self.base}\n" if self.base and not Path(self.base).exists() else ""
        start = f"Fine-tuned from {Path(self.base).name if base == '' else self.base}" if self.base else "Trained"
        return (
            f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base}tags: [llmtrain]\n---\n\n"
            f"# {what}\n\n"
            f"{start} with llmtrain on {self.trained_on}, vocabulary {len(self.tokenizer):,}.\n\n"
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            "model = AutoModelForCausalLM.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
        )

    def _title(self, parameters: int) -> str:
        return f"A {self.config['model_type']} of {parameters:,} parameters"
