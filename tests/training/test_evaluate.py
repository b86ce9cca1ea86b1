import math

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.training.evaluate import evaluate, row_losses
from llmtrain.types import Batch
from tests.engines import engine_of


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_every_eval_token_counts_once_whatever_the_batch(
    accelerator: Accelerator, micro: int
) -> None:
    rows = [[(7 * i + 3 * j) % 20 for j in range(9)] for i in range(5)]
    rows[4][6:] = [-100] * 3
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)
    model = GPT(config, vocab_size=20, seed=2).requires_grad_(False)
    nll = 0.0
    tokens = 0
    for row in rows:
        ids = torch.tensor([[token for token in row if token >= 0]])
        nll += float(model(ids, ids))
        tokens += ids.shape[1] - 1
    loader = accelerator.prepare(eval_loader(Dataset.from_dict({"input_ids": rows}), 1, micro))
    results = evaluate(engine_of(accelerator, model), loader, text_bytes=100)
    assert results["eval/loss"] == pytest.approx(nll / tokens, rel=1e-6)
    assert results["eval/perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert results["eval/bits_per_byte"] == pytest.approx(nll / math.log(2) / 100, rel=1e-6)
    assert model.training


class Offset(nn.Module):
    """A model that cannot compute without the offsets that `add_offsets` prepares."""

    def forward(self, input_ids: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        return (offsets * (labels[:, 1:] != -100).any(1)).sum().double()


def add_offsets(batch: Batch) -> Batch:
    return {"offsets": batch["input_ids"].sum(1)}


def test_the_loss_of_a_single_row_gets_what_prepare_batch_returns(accelerator: Accelerator) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    loader = train_loader(
        Dataset.from_dict({"input_ids": rows}), 4, 2, range(1), seed=None, prepare=add_offsets
    )
    (batch,) = accelerator.prepare(loader)
    losses = row_losses(engine_of(accelerator, Offset()), batch, add_offsets)
    assert [row["row"] for row in losses] == [0, 1, 2]
    assert [row["loss"] * row["targets"] for row in losses] == [6, 15, 24]
