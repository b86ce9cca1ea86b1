"""A model as every Hugging Face tool loads it: config.json, safetensors, tokenizer files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelFiles:
    """What belongs into a model folder beside the weights."""

    config: dict[str, Any]  # config.json
    tokenizer: "PreTrainedTokenizerFast"
    trained_on: str = "unknown data"

    def write(self, folder: Path, parameters: int) -> None:
        """Write all of a model folder but ``model.safetensors``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(self.card(parameters))

    def card(self, parameters: int) -> str:
        """The model card, in the form that the hub reads."""
        return (
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [llmtrain]\n---\n\n"
            f"# A {self.config['model_type']} of {parameters:,} parameters\n\n"
            f"Trained with llmtrain on {self.trained_on}, vocabulary {len(self.tokenizer):,}.\n\n"
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            "model = AutoModelForCausalLM.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
        )
