"""LFM2 computes a packed document as it computes the document alone: its convolutions stop at the border."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models import short_convolution
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.causal_lm import CausalLM, make_causal_lm, own_arguments
from llmtrain.models.config import ModelConfig
from llmtrain.models.documents import Documents
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.pretrained import load_model
from llmtrain.models.probe import leaks, probe
from llmtrain.parallel.placement import place
from llmtrain.training import compiling
from tests.models.some_rows import SomeRows

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
# Lengths of documents in each row. One is shorter than the convolution, which has three taps.
LENGTHS = ((7, 1, 2, 10), (13, 7))


def stock(family: str = "lfm2", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # larger than usual, so that neighbours matter
    return model.double().eval()


def trained(family: str = "lfm2", **changes: Any) -> CausalLM:
    model = make_causal_lm(stock(family, **changes), row_length=20)
    probe(model)
    return model


def packed_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 250, (len(LENGTHS), sum(LENGTHS[0])), generator=generator)
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    position_ids = torch.stack(positions)
    labels = torch.where(position_ids == 0, IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids}


def documents_of(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document of a batch, [1, n]."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        parts = zip(
            batch["input_ids"][row].split(lengths), batch["labels"][row].split(lengths), strict=True
        )
        found += [(ids[None], labels[None]) for ids, labels in parts]
    return found


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the documents of a batch, each in a row of its own."""
    rows = [row for row in documents_of(batch) if row[0].shape[1] > 1]
    return torch.stack([model(ids, labels) for ids, labels in rows]).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        # Norms compute in float32, whatever the model is in.
        atol = limit * float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_loss_and_the_gradients_that_transformers_has_for_each_alone(
    family: str, implementation: str
) -> None:
    batch = packed_batch()
    model = trained(family, attn_implementation=implementation)
    assert (model.config._attn_implementation == ATTENTION_NAME) == (implementation == "sdpa")
    loss = model(**batch, **model.prepare_batch(batch))
    ours = gradients(model, loss)

    reference = stock(family)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in documents_of(batch):
        logits = reference(ids, use_cache=False).logits[:, :-1].double()
        total = total + nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=IGNORED
        )
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert_same(ours, gradients(reference, total), limit=2e-6)


def test_packed_rows_compute_what_unpacked_rows_compute() -> None:
    batch = packed_batch()
    model = trained()
    packed = model(**batch)
    ours = gradients(model, packed)
    unpacked = summed_loss(model, batch)
    assert packed.item() == pytest.approx(unpacked.item(), rel=1e-6)
    assert_same(ours, gradients(model, unpacked), limit=2e-6)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    alone = torch.cat([model(ids).logits[0] for ids, _ in documents_of(batch)])
    torch.testing.assert_close(logits.flatten(0, 1), alone, atol=1e-5, rtol=1e-5)


def blind(x: Tensor, *, weight: Tensor, bias: Tensor | None, documents: Documents) -> Tensor:
    """A convolution that sees no borders, as that of transformers."""
    whole = Documents(starts=torch.zeros_like(documents.starts))  # type: ignore[arg-type]
    return _convolve(x, weight=weight, bias=bias, documents=whole)


_convolve = short_convolution._convolve


def test_a_convolution_that_ignores_borders_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not leaks(trained())
    monkeypatch.setattr(short_convolution, "_convolve", blind)
    assert leaks(trained())


def test_the_second_answer_follows_the_prompt_and_not_the_first_answer() -> None:
    """A prompt of five tokens and answers of three: the second begins with a copy of token 4."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2]])
    codes = torch.tensor([[0] * 8 + [1] * 4 + [4] * 3])
    documents = Documents.of(positions, answers=codes)
    x = torch.arange(1.0, 16.0, dtype=torch.float64)[None, :, None]
    x.requires_grad_()
    one = documents.preceding(x, 1)[0, :, 0].tolist()
    two = documents.preceding(x, 2)[0, :, 0].tolist()
    assert one == [0, 1, 2, 3, 4, 5, 6, 7, 4, 9, 10, 11, 0, 13, 14]
    assert two == [0, 0, 1, 2, 3, 4, 5, 6, 3, 4, 9, 10, 0, 0, 13]
    torch.autograd.gradcheck(lambda each: documents.preceding(each, 2), [x])
    flat = documents.laid_end_to_end()
    assert torch.equal(flat.preceding(x, 2), documents.preceding(x, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_answers_to_one_prompt_have_the_logits_of_two_rows(family: str) -> None:
    model = make_causal_lm(stock(family), row_length=20, shares_prompts=True)
    probe(model)
    generator = torch.Generator().manual_seed(3)
    prompt, first, second = (
        torch.randint(1, 250, (n,), generator=generator).tolist() for n in (5, 6, 4)
    )
    row = torch.tensor([prompt + first + prompt[-1:] + second])
    positions = torch.tensor([[*range(11), *range(4, 9)]])
    codes = torch.tensor([[0] * 11 + [1] * 5])
    documents = Documents.of(positions, answers=codes)
    with torch.no_grad():
        shared = model(**own_arguments(model, row, positions, documents)).logits[0]
        for answer, start in ((first, 4), (second, 11)):
            alone = stock(family)(torch.tensor([prompt + answer])).logits[0, 4:]
            ours = shared[start : start + len(answer) + 1]
            torch.testing.assert_close(ours, alone, atol=1e-5, rtol=1e-5)


def test_rows_that_lie_end_to_end_keep_their_documents() -> None:
    """As flash attention takes them."""
    documents = Documents.of(packed_batch()["position_ids"])
    x = torch.randn(2, 20, 3)
    flat = documents.laid_end_to_end()
    assert torch.equal(
        flat.preceding(x.view(1, 40, 3), 2), documents.preceding(x, 2).view(1, 40, 3)
    )
    assert documents.numbers().tolist() == [
        [0] * 7 + [1] + [2] * 2 + [3] * 10,
        [0] * 13 + [1] * 7,
    ]
    assert flat.numbers()[0, 20:].tolist() == [4] * 13 + [5] * 7


def test_the_convolution_itself_is_checked_for_rows_without_documents() -> None:
    model, reference = trained(), stock()
    ids = packed_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    assert [*model.state_dict()] == [*reference.state_dict()]


def loaded(words: Any, precision: str = "no", **settings: Any) -> Any:
    sizes = ",".join(f"{key}={value}" for key, value in SIZES.items() if key != "vocab_size")
    config = ModelConfig(
        from_config="lfm2", config_overrides=sizes.replace("'", ""), max_length=20, **settings
    )
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    return place(
        accelerator, load_model(config, None, SomeRows(words, is_packed=True), 3, precision)
    )


@pytest.fixture(scope="module")
def words() -> Any:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 20)


@pytest.fixture
def fresh_state() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_state")
def test_activations_computed_again_give_the_same_gradients(words: Any) -> None:
    batch = packed_batch()
    models = [loaded(words, gradient_checkpointing=again).model.train() for again in (False, True)]
    first, second = (gradients(model, model(**batch)) for model in models)
    assert all(torch.equal(second[name], gradient) for name, gradient in first.items())


@pytest.mark.usefixtures("fresh_state")
def test_autocast_packs_to_the_rounding_of_bfloat16(words: Any) -> None:
    batch = packed_batch()
    model = loaded(words, "bf16").model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        packed = model(**batch)
        unpacked = summed_loss(model, batch)
    assert packed.item() == pytest.approx(unpacked.item(), rel=2e-3)


@pytest.mark.usefixtures("fresh_state")
def test_blocks_are_compiled_once_wherever_documents_begin(words: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    bundle = loaded(words)
    model = bundle.model.train()
    expected = [model(**batch_with_border(border)).item() for border in range(3, 12)]
    compiling._compile(model, backend)
    kinds = len({*SIZES["layer_types"]})
    for border, loss in zip(range(3, 12), expected, strict=True):
        batch = batch_with_border(border)
        assert model(**batch, **bundle.prepare_batch(batch)).item() == pytest.approx(loss, rel=1e-5)
    assert len(graphs) == kinds
    torch._dynamo.reset()


def batch_with_border(border: int) -> Batch:
    ids = packed_batch()["input_ids"]
    positions = torch.cat([torch.arange(border), torch.arange(20 - border)]).expand(2, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.usefixtures("fresh_state")
def test_an_adapter_of_the_convolutions_is_trained_on_packed_rows(
    words: Any, tmp_path: Path
) -> None:
    stock().float().save_pretrained(tmp_path / "base")
    lora = LoraConfig(lora_r=4)
    config = ModelConfig(model_name_or_path=str(tmp_path / "base"), max_length=20)
    rows = SomeRows(words, is_packed=True)
    model = place(Accelerator(cpu=True), load_model(config, lora, rows, 3, "no")).model.eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)

    batch = packed_batch()
    packed = model(**batch)
    ours = gradients(model, packed)
    assert any("conv.in_proj.lora_A" in name for name in ours)
    unpacked = summed_loss(model, batch)
    assert packed.item() == pytest.approx(unpacked.item(), rel=1e-5)
    assert_same(ours, gradients(model, unpacked), limit=1e-4)
