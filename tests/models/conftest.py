"""Models as a run loads them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

import llmtrain as lt
from llmtrain.parallel.placement import move_to_devices
from tests.models.small_models import byte_tokenizer
from tests.models.some_rows import SomeRows


@pytest.fixture
def load(accelerator: Accelerator) -> Callable[..., lt.ModelBundle]:
    """Load a model on one process, without rows to train it on."""

    def load(
        config: lt.ModelConfig,
        lora: lt.LoraConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        packed: bool = False,
        new_tokens: Iterable[int] = (),
        stop_token_ids: tuple[int, ...] = (),
        metadata: Any = None,
        precision: str = "no",
        **options: Any,
    ) -> lt.ModelBundle:
        rows = SomeRows(
            tokenizer or byte_tokenizer(),
            is_packed=packed,
            stop_token_ids=stop_token_ids,
            new_tokens=[*new_tokens],
        )
        if metadata is not None:
            rows.metadata = metadata
        return move_to_devices(
            accelerator.ranks, lt.load_model(config, lora, rows, 3, precision, **options)
        )

    return load
