"""What every engine promises, on one process."""

from typing import Any

import torch
from accelerate import Accelerator

from llmtrain.interfaces.batches import Batch
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from tests.engines import engine_of, split


def test_a_pass_without_gradients_leaves_the_random_numbers_of_training_as_they_were(
    accelerator: Accelerator,
) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), vocab_size=30)
    ids = torch.randint(30, (4, 9))
    batches = split({"input_ids": ids, "labels": ids}, micro_batch=2)

    def draw(model: Any, batch: Batch) -> torch.Tensor:
        return torch.rand(3)

    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    total = engine_of(accelerator, model).sum_over_batches(draw, batches)
    assert total.shape == (3,)
    assert torch.equal(torch.rand(5), expected)
