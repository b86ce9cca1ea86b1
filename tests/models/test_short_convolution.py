"""LFM2 computes packed documents as in separate rows: its convolutions stop at their borders."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models import documents
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.causal_lm import CausalLM, make_causal_lm, own_arguments
from llmtrain.models.documents import Documents
from llmtrain.models.probe import leaks, probe
from tests.models.small_models import gradients_of

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": SIZES,
    "lfm2_moe": {
        **SIZES,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
}
ROW_LENGTH = 20
# Lengths of the documents in each row. Some are shorter than the filters, which have three taps.
DOCUMENT_LENGTHS = ((7, 1, 2, 10), (13, 7))


def stock_model(family: str = "lfm2", **changes: Any) -> PreTrainedModel:
    """Return a model of transformers in float64, with weights so large that neighbours matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def trainable_model(
    family: str = "lfm2", *, shares_prompts: bool = False, **changes: Any
) -> CausalLM:
    """Return the same model as it is trained."""
    stock = stock_model(family, **changes)
    model = make_causal_lm(stock, row_length=ROW_LENGTH, shares_prompts=shares_prompts)
    probe(model)
    return model


def packed_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 250, (len(DOCUMENT_LENGTHS), ROW_LENGTH), generator=generator)
    rows_of_positions = []
    for lengths in DOCUMENT_LENGTHS:
        rows_of_positions.append(torch.cat([torch.arange(length) for length in lengths]))
    position_ids = torch.stack(rows_of_positions)
    labels = torch.where(position_ids == 0, IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids}


def documents_in(batch: Batch) -> list[Tensor]:
    """Return the tokens of each document of a batch, [1, n]. All but the first are targets."""
    documents = []
    for ids, lengths in zip(batch["input_ids"], DOCUMENT_LENGTHS, strict=True):
        documents += [document[None] for document in ids.split(lengths)]
    return documents


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return gradients_of(model)


def check_gradients(
    results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Check each gradient, with a tolerance relative to its largest element."""
    assert results.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(results[name], gradient, atol=atol, rtol=0, msg=name)


# --- packed rows. Norms compute in float32 in any model, so results agree to about 1e-6.


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_loss_and_gradients_of_transformers_for_each(
    family: str, implementation: str
) -> None:
    batch = packed_batch()
    model = trainable_model(family, attn_implementation=implementation)
    uses_package_attention = model.config._attn_implementation == ATTENTION_NAME
    assert uses_package_attention == (implementation == "sdpa")
    loss = model(**batch, **model.prepare_batch(batch))

    stock = stock_model(family)
    losses = []
    for ids in documents_in(batch):
        logits = stock(ids, use_cache=False).logits[0, :-1].double()
        losses.append(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    expected = torch.stack(losses).sum()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    check_gradients(gradients(model, loss), gradients(stock, expected), tolerance=2e-6)


def test_packed_rows_have_the_logits_of_separate_rows() -> None:
    batch = packed_batch()
    model = trainable_model()
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    expected = torch.cat([model(ids).logits[0] for ids in documents_in(batch)])
    torch.testing.assert_close(logits.flatten(0, 1), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_one_document_have_the_bits_of_transformers() -> None:
    model = trainable_model()
    stock = stock_model()
    ids = packed_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    assert [*model.state_dict()] == [*stock.state_dict()]


def test_a_convolution_that_ignores_borders_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not leaks(trainable_model())
    convolve = documents.convolve

    def convolve_whole_rows(x: Tensor, *, documents: Documents, **options: Any) -> Tensor:
        one_document = Documents(starts=torch.zeros_like(documents.starts))  # type: ignore[arg-type]
        return convolve(x, documents=one_document, **options)

    monkeypatch.setattr(documents, "convolve", convolve_whole_rows)
    assert leaks(trainable_model())


# --- the tokens before a position


# Two answers to one prompt, then another document. The prompt has five tokens, 0 to 4, and the
# answers have three. The second answer begins with a copy of token 4, at its position.
SHARED_PROMPT = Documents.of(
    torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2]]),
    answers=torch.tensor([[0] * 8 + [1] * 4 + [4] * 3]),
)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7, 4, 9, 10, 11, 0, 13, 14]),
        (2, [0, 0, 1, 2, 3, 4, 5, 6, 3, 4, 9, 10, 0, 0, 13]),
    ],
)
def test_the_second_answer_follows_the_prompt_and_not_the_first_answer(
    distance: int, expected: list[int]
) -> None:
    x = torch.arange(1.0, 16.0, dtype=torch.float64)[None, :, None]
    assert SHARED_PROMPT.preceding(x, distance)[0, :, 0].tolist() == expected


def test_preceding_positions_have_gradients() -> None:
    x = torch.randn(1, 15, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: SHARED_PROMPT.preceding(x, 2), [x])


@pytest.mark.parametrize("family", FAMILIES)
def test_two_answers_to_a_shared_prompt_have_the_logits_of_two_rows(family: str) -> None:
    model = trainable_model(family, shares_prompts=True)
    stock = stock_model(family)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 250, (5,), generator=generator).tolist()
    first = torch.randint(1, 250, (6,), generator=generator).tolist()
    second = torch.randint(1, 250, (4,), generator=generator).tolist()

    ids = torch.tensor([prompt + first + prompt[-1:] + second])
    positions = torch.tensor([[*range(11), *range(4, 9)]])
    codes = torch.tensor([[0] * 11 + [1] * 5])
    documents = Documents.of(positions, answers=codes)
    with torch.no_grad():
        logits = model.own_forward(**own_arguments(model, ids, positions, documents)).logits[0]
        expected_first = stock(torch.tensor([prompt + first])).logits[0, 4:]
        expected_second = stock(torch.tensor([prompt + second])).logits[0, 4:]

    torch.testing.assert_close(logits[4:11], expected_first, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[11:], expected_second, atol=1e-5, rtol=1e-5)
