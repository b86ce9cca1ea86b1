"""The models of this package compute what the stock classes of transformers compute."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, count_targets
from llmtrain.models.config import GPTConfig
from llmtrain.models.documents import Documents
from llmtrain.models.gpt import GPT, KeyedDropout, Projection, keys_at
from llmtrain.models.lfm2 import build_gpt, convolve
from llmtrain.models.loss import summed_nll
from llmtrain.record.saver import write_model
from tests.models.small_models import byte_tokenizer, perturbed

CONFIG = GPTConfig(n_layer=3, n_head=4, n_embd=32, block_size=24)
STOCK_CLASSES = {"gpt2": "GPT2LMHeadModel", "lfm2": "Lfm2ForCausalLM"}
ATTENTION_LAYERS = {"gpt2": 3, "lfm2": 2}  # of the three layers
VOCABULARY = 257

with_each_architecture = pytest.mark.parametrize("architecture", STOCK_CLASSES)


def make_gpt(architecture: str, vocabulary: int, *, seed: int = 0, **changes: object) -> GPT:
    config = dataclasses.replace(CONFIG, architecture=architecture, **changes)
    return build_gpt(config, vocabulary, seed)


def random_ids(*shape: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


# --- beside transformers


@with_each_architecture
def test_an_exported_gpt_has_the_logits_of_the_stock_class(
    architecture: str, tmp_path: Path
) -> None:
    gpt, stock = exported(architecture, tmp_path)
    ids = random_ids(3, CONFIG.block_size, vocabulary=VOCABULARY)
    with torch.no_grad():
        torch.testing.assert_close(gpt(ids), stock(ids).logits, rtol=0, atol=1e-5)


def exported(architecture: str, folder: Path) -> tuple[GPT, PreTrainedModel]:
    """Return a model, and the stock class that transformers loads from its folder."""
    tokenizer = byte_tokenizer(CONFIG.block_size)
    gpt: Any = perturbed(make_gpt(architecture, len(tokenizer), seed=1))
    write_model(folder, gpt.files(tokenizer, "text"), gpt.state_dict())
    stock, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(stock).__name__ == STOCK_CLASSES[architecture]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return gpt, stock.eval()


@with_each_architecture
def test_the_loss_and_its_gradients_are_those_of_the_stock_class(architecture: str) -> None:
    gpt: Any = perturbed(make_gpt(architecture, VOCABULARY)).double()
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**gpt.hf_config()))
    stock = stock.double().eval()
    stock.load_state_dict({"lm_head.weight": gpt.head, **gpt.state_dict()})
    ids = random_ids(3, CONFIG.block_size, vocabulary=VOCABULARY)
    is_ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    labels = ids.masked_fill(is_ignored, IGNORED)

    mean_loss = gpt(ids, labels) / count_targets(labels)
    mean_loss.backward()
    expected = stock(ids, labels=labels).loss
    expected.backward()

    assert mean_loss.item() == pytest.approx(expected.item(), rel=1e-6)  # stock is in float32
    for name, parameter in stock.named_parameters():
        gradient = gpt.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)

    loss_of_shifted_labels = gpt(ids, torch.roll(labels, -1, 1)) / count_targets(labels)
    assert abs(loss_of_shifted_labels - mean_loss) > 1e-3, "the shift of labels matters"


def test_the_stock_lfm2_trains_every_row_of_its_embedding() -> None:
    """With a padding token, the gradient of its row would be 0."""
    config = AutoConfig.for_model(**make_gpt("lfm2", 30).hf_config())
    stock = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(30).repeat(2)[None]
    stock(ids, labels=ids).loss.backward()
    gradient = stock.get_input_embeddings().weight.grad
    assert gradient.any(dim=1).all()


# --- parts of the models


def random_float64(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_gradients_of_bfloat16_weights_are_those_of_float64_up_to_their_rounding() -> None:
    model = make_gpt("gpt2", VOCABULARY, block_size=128).bfloat16()
    exact_model = make_gpt("gpt2", VOCABULARY, block_size=128).double()
    exact_model.load_state_dict(model.state_dict())
    ids = random_ids(16, 129, vocabulary=VOCABULARY)
    for each in (model, exact_model):
        (each(ids, ids) / ids.numel()).backward()

    exact_gradients = {name: p.grad for name, p in exact_model.named_parameters()}
    for name, parameter in model.named_parameters():
        error = (parameter.grad - exact_gradients[name]).norm() / exact_gradients[name].norm()
        assert error < 0.02, name


@pytest.mark.parametrize("length", [1, 2, 5], ids=["one", "shorter than the filter", "longer"])
def test_a_short_convolution_is_the_convolution_of_torch(length: int) -> None:
    x = random_float64(2, length, 4, seed=0)
    filters = random_float64(4, 3, seed=1)
    convolved = F.conv1d(x.mT, filters[:, None], padding=2, groups=4)[..., :length]
    output = convolve(x, weight=filters, documents=Documents())
    torch.testing.assert_close(output, convolved.mT)


def test_rotary_heads_of_odd_size_are_refused() -> None:
    with pytest.raises(UserError, match="must be even"):
        make_gpt("lfm2", 30, n_head=4, n_embd=12)


def test_a_projection_is_linear() -> None:
    projection = Projection(4, 6)
    torch.nn.init.normal_(projection.weight)
    torch.nn.init.normal_(projection.bias)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(projection(x), F.linear(x, projection.weight.T, projection.bias))


# --- initial weights


@with_each_architecture
def test_initial_weights_depend_only_on_the_seed(architecture: str) -> None:
    torch.manual_seed(1)
    first = make_gpt(architecture, 50, seed=3).state_dict()
    torch.manual_seed(2)
    second = make_gpt(architecture, 50, seed=3).state_dict()
    torch.testing.assert_close(second, first, rtol=0, atol=0)

    for another_seed in (4, 3 + 2**32):
        head = make_gpt(architecture, 50, seed=another_seed).head
        assert not any(torch.equal(head, tensor) for tensor in first.values())


@with_each_architecture
def test_a_model_on_the_meta_device_gets_the_same_initial_weights(architecture: str) -> None:
    with torch.device("meta"):
        empty_model = make_gpt(architecture, 50, seed=4)
    assert all(parameter.is_meta for parameter in empty_model.parameters())

    weights = dict(empty_model.initial_weights(4))

    expected = dict(make_gpt(architecture, 50, seed=4).named_parameters())
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_projections_into_the_residual_stream_are_scaled_down() -> None:
    """GPT-2 divides the standard deviation 0.02 by the square root of the number of additions."""
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256, block_size=8), 50)
    block = model.requires_grad_(False).transformer.h[0]
    assert block.attn.c_attn.weight.std() == pytest.approx(0.02, rel=0.02)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.02)
    assert not block.attn.c_proj.bias.any()
    assert (block.ln_1.weight == 1).all()


@with_each_architecture
def test_the_first_loss_is_that_of_a_uniform_guess(architecture: str) -> None:
    ids = random_ids(4, 24, vocabulary=500)
    model = make_gpt(architecture, 500).requires_grad_(False)
    mean_loss = float(model(ids, ids)) / (4 * 23)
    assert mean_loss == pytest.approx(math.log(500), rel=0.02)


# --- dropout, which depends on a key for each row


@with_each_architecture
def test_dropout_of_a_row_is_the_same_in_any_batch(architecture: str) -> None:
    model = perturbed(make_gpt(architecture, 30, dropout=0.3)).train()
    ids = random_ids(6, 9, vocabulary=30)
    keys = torch.tensor([11, 2**62 + 5, 13, 14, 2**40, 16])

    def loss_of(rows: slice, keys: torch.Tensor) -> torch.Tensor:
        return model(ids[rows], ids[rows], dropout_keys=keys[rows])

    sum_over_rows = sum(loss_of(slice(row, row + 1), keys) for row in range(6))
    sum_over_halves = loss_of(slice(0, 3), keys) + loss_of(slice(3, 6), keys)
    whole_batch = loss_of(slice(None), keys)

    torch.testing.assert_close(whole_batch, sum_over_rows)
    torch.testing.assert_close(sum_over_halves, sum_over_rows)
    assert not torch.allclose(loss_of(slice(None), keys + 1), sum_over_rows)
    assert not torch.allclose(model(ids, ids), sum_over_rows)
    model.eval()
    torch.testing.assert_close(model(ids, ids, dropout_keys=keys), model(ids, ids))


@with_each_architecture
def test_each_dropout_in_a_model_has_its_own_keys(architecture: str) -> None:
    model = make_gpt(architecture, 30, dropout=0.3).train()
    keys = []
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.register_forward_pre_hook(lambda _, inputs: keys.append(inputs[1].item()))

    ids = torch.arange(9)[None]
    model(ids, ids, dropout_keys=torch.tensor([5]))

    assert len(set(keys)) == 2 * CONFIG.n_layer + 1, "two in each layer, and the embedding"


def test_dropout_drops_its_share_independently_in_every_place() -> None:
    ones = torch.ones(64, 32, 48)
    keys = torch.arange(64) * 7919
    dropout = KeyedDropout(0.25).train()
    first = dropout(ones, keys_at(keys, 0))
    second = dropout(ones, keys_at(keys, 1))
    for output in (first, second):
        assert float((output == 0).float().mean()) == pytest.approx(0.25, abs=0.005)
        assert float(output.mean()) == pytest.approx(1, abs=0.01)

    neighbours = {
        "another dropout": (first, second),
        "the next row": (first[:-1], first[1:]),
        "the next position": (first[:, :-1], first[:, 1:]),
        "the next channel": (first[..., :-1], first[..., 1:]),
    }
    for name, (output, neighbour) in neighbours.items():
        both_dropped = (output == 0) & (neighbour == 0)
        share = float(both_dropped.float().mean())
        assert share == pytest.approx(0.25**2, abs=0.004), name


# --- sums and counts


def test_the_summed_loss_ignores_targets_and_is_computed_in_float32() -> None:
    logits = torch.randn(2, 5, 11).bfloat16()
    targets = torch.randint(11, (2, 5))
    targets[0, :3] = IGNORED

    loss = summed_nll(logits, targets)

    log_probabilities = logits.float().log_softmax(-1)
    is_counted = targets != IGNORED
    expected = -log_probabilities[is_counted][range(7), targets[is_counted]].sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert summed_nll(logits, torch.full((2, 5), IGNORED)) == 0


@with_each_architecture
def test_flops_count_every_matrix_except_those_that_are_looked_up(architecture: str) -> None:
    model = make_gpt(architecture, 100)
    weights = 0
    for name, parameter in model.named_parameters():
        if "wpe" not in name and "embed_tokens" not in name:
            weights += parameter.numel()
    attention = ATTENTION_LAYERS[architecture] * CONFIG.n_embd * CONFIG.block_size
    assert model.flops_per_token() == 6 * weights + 12 * attention
