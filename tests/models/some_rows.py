"""Rows as a model sees them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from transformers import PreTrainedTokenizerFast


@dataclass
class SomeRows:
    """What :func:`load_model` asks of the prepared data."""

    tokenizer: PreTrainedTokenizerFast
    is_packed: bool = False
    stop_token_ids: tuple[int, ...] = ()
    new_tokens: list[int] = field(default_factory=list)
    metadata: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dataset="some data"))
