"""Samples depend only on the weights, and sampling leaves no trace in the run."""

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from llmtrain import GPT, GPTConfig
from llmtrain.data.prompts import Prompts
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.models.generation import Sampling
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.training.evaluate import sample
from tests.engines import engine_of

TEXT = "the kernel waits for the bucket"
TEXTS = ["the k", ""]
SAMPLING = Sampling(max_new_tokens=20, seed=0)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return as_pretrained(train_tokenizer("char", [TEXT], lambda: iter([TEXT])), 8)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> GPT:
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, dropout=0.5)
    return GPT(config, len(tokenizer), seed=1).train()


@pytest.fixture
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return list(map(Prompts(tokenizer).of_question, TEXTS))


@pytest.fixture
def engine(accelerator: Accelerator, model: GPT) -> ReplicatedEngine:
    return engine_of(accelerator, model)


def test_samples_of_the_same_weights_are_equal_and_those_of_others_differ(
    engine: ReplicatedEngine,
    model: GPT,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
) -> None:
    samples = sample(engine, tokenizer, prompts, SAMPLING)

    assert len(samples) == len(TEXTS)
    assert all(samples)
    assert {*"".join(samples)} <= {*TEXT}
    assert sample(engine, tokenizer, prompts, SAMPLING) == samples

    weight = model.transformer.wte.weight
    weight.data += torch.randn_like(weight)
    assert sample(engine, tokenizer, prompts, SAMPLING) != samples


def test_a_sample_ends_before_a_stop_token(
    engine: ReplicatedEngine, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> None:
    samples = sample(engine, tokenizer, prompts, SAMPLING)
    letter = samples[0][5]
    stop_token_id = tokenizer.convert_tokens_to_ids(letter)

    stopped = sample(engine, tokenizer, prompts, SAMPLING, stop_token_ids=[stop_token_id])

    assert stopped == [text.partition(letter)[0] for text in samples]


def test_equal_prompts_have_different_samples(
    engine: ReplicatedEngine, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> None:
    assert len(set(sample(engine, tokenizer, prompts[:1] * 8, SAMPLING))) == 8


def test_sampling_leaves_the_mode_of_the_model_and_the_generator_unchanged(
    engine: ReplicatedEngine,
    model: GPT,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
) -> None:
    state = torch.get_rng_state()

    sample(engine, tokenizer, prompts, SAMPLING)

    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
