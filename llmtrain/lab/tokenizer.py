"""Loads the tokenizer of a run, to show its rows as text."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer in a folder; ``None`` if there is none."""
    from transformers import AutoTokenizer

    # Without this file, AutoTokenizer makes an empty tokenizer for some families.
    if not (folder / "tokenizer.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
