"""Samples are the same whenever they are taken of the same weights, and leave no trace in the run."""

import torch
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.models.generation import Sampling
from llmtrain.training.evaluate import sample
from tests.engines import engine_of


def test_a_sample_is_a_function_of_the_weights_and_leaves_modes_and_generators_alone(
    accelerator: Accelerator,
) -> None:
    texts = ["the kernel waits for the bucket"]
    tokenizer = as_pretrained(train_tokenizer("char", texts, lambda: iter(texts)), 8)
    model = GPT(
        GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, dropout=0.5), len(tokenizer), seed=1
    )
    model.train()
    engine = engine_of(accelerator, model)
    sampling = Sampling(max_new_tokens=20, seed=0)
    prompts = ["the k", ""]
    state = torch.get_rng_state()
    first = sample(engine, tokenizer, prompts, sampling)
    assert sample(engine, tokenizer, prompts, sampling) == first
    assert len(first) == 2
    assert all(first)
    assert {*"".join(first)} <= {*"the kernel waits for the bucket"}
    stop = tokenizer.convert_tokens_to_ids(first[0][5])
    stopped = sample(engine, tokenizer, prompts, sampling, stop_token_ids=[stop])
    assert stopped == [text.partition(first[0][5])[0] for text in first]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        model.transformer.wte.weight.add_(torch.randn_like(model.transformer.wte.weight))
    assert sample(engine, tokenizer, prompts, sampling) != first
