"""The probes of a model notice what plain comparisons of numbers miss."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.errors import UserError
from llmtrain.models import probe as probes
from llmtrain.models.causal_lm import CausalLM, make_causal_lm


@pytest.fixture
def llama() -> CausalLM:
    config = LlamaConfig(
        vocab_size=112,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return make_causal_lm(LlamaForCausalLM(config), row_length=32)


def test_nan_differs_from_everything_and_masked_logits_from_nothing() -> None:
    numbers = torch.tensor([1.0, -math.inf, 2.0])
    assert not probes.differ(numbers, numbers.clone())
    assert probes.differ(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert probes.differ(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))
    assert probes.differ(torch.tensor([1.0, -math.inf]), torch.tensor([1.0, 2.0]))


def test_tokens_differ_in_a_vocabulary_that_a_stride_of_7_divides(llama: CausalLM) -> None:
    rows = probes.example_tokens(llama, 2, 16)
    assert len(rows.unique()) == rows.numel()


def test_a_model_that_computes_nan_is_refused(llama: CausalLM) -> None:
    with torch.no_grad():
        llama.get_parameter("model.norm.weight")[0] = math.nan
    with pytest.raises(UserError, match="LlamaForCausalLM computes NaN"):
        probes.probe(llama)


def test_the_choice_of_an_attention_does_not_hide_that_memory_is_full(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = probes.probe_output
    calls = []

    def fail_once(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return correct(*arguments)

    monkeypatch.setattr(probes, "probe_output", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        probes.probe(llama)
