"""A student answers prompts in groups, from its own distribution, and answers are scored."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.generation import Sampling
from llmtrain.models.probe import probe
from llmtrain.training.answering import answer, scoring_batch, target_log_probabilities
from tests.engines import engine_of
from tests.models.small_models import perturbed

VOCABULARY = 61  # of the tokenizer; the model has more rows
WIDTH = 24
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [20, 21], [7, 7, 7, 7]]
NUMBERS = [40, 41, 42, 43]
# A window that is shorter than the text, learned positions, scaled logits, a softcap.
WITH_CACHE = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_positions": WIDTH - 1},
    "opt": {"max_position_embeddings": WIDTH - 1, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
}
# Layers that keep a state, and a model that keeps nothing.
WITHOUT_CACHE = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "mamba": {"state_size": 4},
    "openai-gpt": {"n_positions": WIDTH - 1},
}
KINDS = {**WITH_CACHE, **WITHOUT_CACHE}


def causal_lm(kind: str) -> Any:
    """Return a model with two layers and large random weights."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **KINDS[kind],
    )
    torch.manual_seed(0)
    model = make_causal_lm(AutoModelForCausalLM.from_config(config).float(), row_length=WIDTH - 1)
    perturbed(model)
    probe(model)
    return model


def answers_of(accelerator: Accelerator, model: Any, temperature: float = 1, **changes: Any) -> Any:
    arguments = {
        "prompts": PROMPTS,
        "numbers": NUMBERS,
        "sampling": Sampling(max_new_tokens=12, temperature=temperature, top_k=0, seed=1),
        "stop_token_ids": (),
        "width": WIDTH,
        "vocabulary": VOCABULARY,
        **changes,
    }
    return answer(engine_of(accelerator, model), **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers_and_do_not_depend_on_the_group(
    accelerator: Accelerator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = causal_lm(kind)
    widths = []
    logits_at = model.logits_at

    def counted(positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        widths.append(input_ids.shape[1])
        return logits_at(positions, input_ids)

    monkeypatch.setattr(model, "logits_at", counted)

    greedy = answers_of(accelerator, model, temperature=0, vocabulary=64)
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, use_cache=False
        )
        assert [*prompt, *ids] == expected[0].tolist()

    assert bool(widths) == (kind in WITHOUT_CACHE)

    sampled = answers_of(accelerator, model)
    assert sampled != greedy
    for prompt, number, ids in zip(PROMPTS, NUMBERS, sampled, strict=True):
        assert answers_of(accelerator, model, prompts=[prompt], numbers=[number]) == [ids]


def test_an_answer_ends_with_a_stop_token_or_at_its_limit(accelerator: Accelerator) -> None:
    model = causal_lm("llama")
    free = answers_of(accelerator, model)
    stop = free[0][4]

    stopped = answers_of(accelerator, model, stop_token_ids=[stop])
    for ids, long_ids in zip(stopped, free, strict=True):
        assert ids == long_ids[: long_ids.index(stop) + 1 if stop in long_ids else 12]
    # Its row is full.
    assert [len(ids) for ids in answers_of(accelerator, model, width=9)] == [2, 8, 7, 5]


def test_tokens_are_sampled_from_the_distribution_of_the_model(accelerator: Accelerator) -> None:
    model = causal_lm("gemma2")
    count = 20_000
    answers = answers_of(
        accelerator,
        model,
        prompts=[PROMPTS[0]] * count,
        numbers=range(count),
        sampling=Sampling(max_new_tokens=1, temperature=1, top_k=0),
    )
    with torch.no_grad():
        logits = model.own_forward(torch.tensor(PROMPTS[:1])).logits[0, -1, :VOCABULARY]
    expected = logits.double().softmax(-1) * count
    counts = torch.bincount(torch.tensor(answers)[:, 0], minlength=VOCABULARY)
    is_rare = expected < 5
    assert counts[is_rare].sum() < 2 * expected[is_rare].sum() + 5
    chi_square = ((counts - expected) ** 2 / expected)[~is_rare].sum()
    freedom = int((~is_rare).sum()) - 1
    assert freedom > 20
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_answers_are_scored_with_the_logits_of_transformers(
    accelerator: Accelerator, kind: str
) -> None:
    model = causal_lm(kind)
    answers = answers_of(accelerator, model)
    batch = scoring_batch(PROMPTS, answers, accelerator.device)
    with torch.no_grad():
        scores = model(**batch, compute=target_log_probabilities)
        expected = []
        for prompt, ids in zip(PROMPTS, answers, strict=True):
            logits = model.own_forward(torch.tensor([[*prompt, *ids]])).logits[0]
            logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected.append(logps.gather(1, torch.tensor(ids)[:, None])[:, 0])
    assert torch.allclose(scores, torch.cat(expected), atol=1e-5)
