"""The probes of a model handle NaN, masked logits and a full memory."""

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


@pytest.mark.parametrize(
    ("values", "other_values", "expected"),
    [
        pytest.param([1.0, -math.inf], [1.0, -math.inf], False, id="masked logits in both"),
        pytest.param([1.0, -math.inf], [1.0, 2.0], True, id="a masked logit"),
        pytest.param([1.0, math.nan], [1.0, 2.0], True, id="NaN in the first"),
        pytest.param([1.0, 2.0], [1.0, math.nan], True, id="NaN in the second"),
    ],
)
def test_nan_differs_from_everything_and_masked_logits_do_not_differ(
    values: list[float], other_values: list[float], expected: bool
) -> None:
    assert probes.differ(torch.tensor(values), torch.tensor(other_values)) == expected


def test_example_tokens_differ_even_if_their_stride_of_7_divides_the_vocabulary(
    llama: CausalLM,
) -> None:
    assert llama.vocabulary_size % 7 == 0
    ids = probes.example_tokens(llama, 2, 16)
    assert len(ids.unique()) == ids.numel()


def test_a_model_that_computes_nan_is_refused(llama: CausalLM) -> None:
    with torch.no_grad():
        llama.get_parameter("model.norm.weight")[0] = math.nan
    with pytest.raises(UserError, match="LlamaForCausalLM computes NaN"):
        probes.probe(llama)


def test_a_full_memory_is_reported_and_does_not_decide_the_attention(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_output = probes.probe_output
    calls = 0

    def run_out_of_memory_once(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return probe_output(*arguments)

    monkeypatch.setattr(probes, "probe_output", run_out_of_memory_once)
    with pytest.raises(torch.OutOfMemoryError):
        probes.probe(llama)
