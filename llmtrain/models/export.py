"""A model as every Hugging Face tool loads it: config.json, safetensors, tokenizer files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelFiles:
    """What belongs into a model folder beside the weights."""

    config: dict[str, Any]  # config.json
    tokenizer: "PreTrainedTokenizerFast"

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write a complete model folder; ``weights`` are keyed by Hugging Face's names."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
