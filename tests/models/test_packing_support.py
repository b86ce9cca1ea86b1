"""Rows are packed if the class is on a list, and the probes of the model find no leak."""

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from llmtrain.errors import UserError
from llmtrain.models import probe as probes
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.model_classes import PackingSupport, packing_support
from tests.models.small_models import small_model


def support_of(family: str, **settings: Any) -> PackingSupport:
    support = packing_support(ModelConfig(from_config=family, **settings))
    assert support is not None
    return support


# --- the rule


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("lfm2", r"^$"),
        ("gpt_oss", r"^GptOssForCausalLM lets the documents"),
        ("musicgen", r"^it was not tried whether MusicgenForCausalLM .*--packing"),
    ],
)
def test_a_class_packs_as_the_list_says(family: str, problem: str) -> None:
    support = support_of(family)
    assert re.search(problem, support.packing_problem)
    assert support.shares_prompts == (not support.packing_problem)
    assert support_of(family, max_length="auto") == support


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
def test_another_attention_packs_but_shares_no_prompts(implementation: str) -> None:
    support = support_of("llama", attn_implementation=implementation)
    assert not support.packing_problem
    assert not support.shares_prompts


@pytest.mark.parametrize(
    ("chunk", "max_length", "shares"),
    [
        pytest.param(64, 64, True, id="a chunk for each row"),
        pytest.param(64, 65, False, id="longer rows"),
        pytest.param(64, "auto", False, id="rows of any length"),
        pytest.param(None, "auto", True, id="no chunks"),
    ],
)
def test_prompts_are_not_shared_if_attention_has_chunks_shorter_than_the_row(
    chunk: int | None, max_length: Any, shares: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("llama4_text")
    config.attention_chunk_size = chunk
    config.save_pretrained(tmp_path)

    support = packing_support(ModelConfig(str(tmp_path), max_length=max_length))
    assert support == PackingSupport(shares_prompts=shares)


# --- the probes of a model, which decide


@pytest.fixture
def llama() -> CausalLM:
    model: CausalLM = small_model("llama", vocabulary=112, tokens=33, width=16)
    return model


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


def test_example_tokens_differ(llama: CausalLM) -> None:
    ids = probes.example_tokens(llama, 2, 16)
    assert len(ids.unique()) == ids.numel()


def test_a_model_that_computes_nan_is_refused(llama: CausalLM) -> None:
    with torch.no_grad():
        llama.get_parameter("model.norm.weight")[0] = math.nan
    with pytest.raises(UserError, match="LlamaForCausalLM computes NaN"):
        probes.probe(llama)


def test_an_error_of_the_model_is_a_user_error_with_its_cause_and_another_is_a_bug(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(probes, "differ", mock.Mock(side_effect=AttributeError("a bug")))
        with pytest.raises(AttributeError, match="a bug"):
            probes.probe(llama)

    monkeypatch.setattr(llama.base_model, "forward", mock.Mock(side_effect=ValueError("no rows")))
    with pytest.raises(UserError, match="cannot be trained here: no rows") as caught:
        probes.probe(llama)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_full_memory_is_reported_and_does_not_decide_the_attention(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [torch.OutOfMemoryError("CUDA out of memory"), AssertionError("it goes on")]
    monkeypatch.setattr(probes, "probe_output", mock.Mock(side_effect=results))
    with pytest.raises(torch.OutOfMemoryError):
        probes.probe(llama)
