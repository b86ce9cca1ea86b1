"""A stand-in for the rows that a model is built for."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerFast


@dataclass
class SomeRows:
    """The attributes of prepared rows that :func:`load_model` reads, without any rows."""

    tokenizer: PreTrainedTokenizerFast
    is_packed: bool = False
    stop_token_ids: tuple[int, ...] = ()
    new_tokens: list[int] = field(default_factory=list)
    decided: dict[str, Any] = field(default_factory=dict)
    metadata: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dataset="some data"))
