import math

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from llmtrain.data.loader import eval_loader
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.training.evaluate import evaluate
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
