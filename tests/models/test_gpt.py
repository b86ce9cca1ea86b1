import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import count_targets
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT, KeyedDropout, Projection, keys_at
from llmtrain.models.gpt_family import build_gpt
from llmtrain.models.lfm2 import _GatedConvolution, _RMSNorm, rotation
from llmtrain.models.loss import summed_nll
from llmtrain.record.saver import write_model

CONFIG = GPTConfig(n_layer=3, n_head=4, n_embd=32, block_size=24)
STOCK = {"gpt2": "GPT2LMHeadModel", "lfm2": "Lfm2ForCausalLM"}
both = pytest.mark.parametrize("architecture", STOCK)


def small(architecture: str, vocab_size: int, seed: int = 0, **changes: object) -> GPT:
    return build_gpt(
        dataclasses.replace(CONFIG, architecture=architecture, **changes), vocab_size, seed
    )


def tokenizer():
    return as_pretrained(train_tokenizer("byte", [], lambda: iter(())), CONFIG.block_size)


def jolted(model: torch.nn.Module) -> torch.nn.Module:
    """Weights far from their initial values, biases and norms too: a mapping that mixes them up must show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@both
def test_an_exported_gpt_computes_what_the_stock_class_computes(
    architecture: str, tmp_path: Path
) -> None:
    words = tokenizer()
    ours = jolted(small(architecture, len(words), seed=1))
    write_model(tmp_path, ours.files(words, "text"), ours.state_dict())
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == STOCK[architecture]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.randint(
        len(words), (3, CONFIG.block_size), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits = ours(ids)
        assert (logits - theirs.eval()(ids).logits).abs().max() < 1e-5
        follows = theirs.generate(
            ids[:1, :8], max_new_tokens=12, do_sample=False, use_cache=True, eos_token_id=None
        )
        for length in range(8, 20):  # each of our passes is over the whole text
            assert int(ours(follows[:, :length])[0, -1].argmax()) == int(follows[0, length])


@both
def test_the_loss_and_its_gradients_are_hugging_faces(architecture: str) -> None:
    words = tokenizer()
    ours = jolted(small(architecture, len(words))).double()
    config = AutoConfig.for_model(
        architecture, **{k: v for k, v in ours.hf_config().items() if k != "model_type"}
    )
    theirs = AutoModelForCausalLM.from_config(config).double().eval()
    theirs.load_state_dict({"lm_head.weight": ours.head, **ours.state_dict()})
    ids = torch.randint(
        len(words), (3, CONFIG.block_size), generator=torch.Generator().manual_seed(0)
    )
    labels = ids.masked_fill(
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100
    )
    mean = ours(ids, labels) / count_targets(labels)
    expected = theirs(ids, labels=labels).loss
    assert mean.item() == pytest.approx(expected.item(), rel=1e-6)  # theirs is float32
    assert abs(ours(ids, torch.roll(labels, -1, 1)) / count_targets(labels) - mean) > 1e-3
    mean.backward()
    expected.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6
        )


def test_the_stock_lfm2_trains_every_row_of_its_embedding() -> None:
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small("lfm2", 30).hf_config()))
    ids = torch.arange(30).repeat(2)[None]
    theirs(ids, labels=ids).loss.backward()
    assert (
        theirs.get_input_embeddings().weight.grad.abs().sum(1) > 0
    ).all()  # a padding token's would be 0


def test_norms_and_gated_convolutions_have_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    angles = tuple(each.double() for each in rotation(3, 6, torch.device("cpu")))
    assert torch.autograd.gradcheck(_RMSNorm.apply, (drawn(2, 3, 2, 6), drawn(6), *angles))
    assert torch.autograd.gradcheck(_RMSNorm.apply, (drawn(2, 3, 6), drawn(6)))
    for length in (1, 2, 5):  # also shorter than the filter
        x, taps = drawn(2, length, 12), drawn(4, 3)
        before, after, values = x.chunk(3, dim=-1)
        channels = F.conv1d((before * values).mT, taps[:, None], padding=2, groups=4)[..., :length]
        torch.testing.assert_close(_GatedConvolution.apply(x, taps, None), after * channels.mT)
        assert torch.autograd.gradcheck(_GatedConvolution.apply, (x, taps, None))


def test_an_odd_head_cannot_be_rotated() -> None:
    with pytest.raises(UserError, match="must be even"):
        small("lfm2", 30, n_head=4, n_embd=12)


def test_weights_of_a_gpt2_checkpoint_fit() -> None:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 50}
    config = GPT2Config(**sizes, resid_pdrop=0.0, activation_function="gelu")
    theirs = jolted(GPT2LMHeadModel(config))
    ours = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12), vocab_size=50).eval()
    missing, unknown = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert (missing, unknown) == ([], ["lm_head.weight"])
    ids = torch.randint(50, (2, 12))
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5


@both
def test_weights_depend_on_the_seed_alone(architecture: str) -> None:
    torch.manual_seed(1)
    first = small(architecture, 50, seed=3).state_dict()
    torch.manual_seed(2)
    second = small(architecture, 50, seed=3).state_dict()
    other = small(architecture, 50, seed=4).head
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(other, tensor) for tensor in first.values())


def test_what_is_added_to_the_residual_stream_is_scaled_down() -> None:
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256, block_size=8), 50)
    block = model.requires_grad_(False).transformer.h[0]
    assert block.attn.c_attn.weight.std() == pytest.approx(0.02, rel=0.02)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert float(block.attn.c_proj.bias.abs().max()) == 0
    assert float(block.ln_1.weight.min()) == 1


@both
def test_the_first_loss_is_that_of_a_uniform_guess(architecture: str) -> None:
    ids = torch.randint(500, (4, 24), generator=torch.Generator().manual_seed(0))
    model = small(architecture, 500).requires_grad_(False)
    assert float(model(ids, ids)) / (4 * 23) == pytest.approx(math.log(500), rel=0.02)


@both
def test_dropout_drops_a_row_alike_in_any_batch(architecture: str) -> None:
    model = jolted(small(architecture, 30, dropout=0.3)).train()
    ids = torch.randint(30, (6, 9), generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([11, 2**62 + 5, 13, 14, 2**40, 16])

    def loss_of(rows: slice, keys: torch.Tensor) -> torch.Tensor:
        return model(ids[rows], ids[rows], dropout_keys=keys[rows])

    expected = sum(loss_of(slice(i, i + 1), keys) for i in range(6))
    torch.testing.assert_close(loss_of(slice(None), keys), expected)
    halves = loss_of(slice(0, 3), keys) + loss_of(slice(3, 6), keys)
    torch.testing.assert_close(halves, expected)
    assert not torch.allclose(loss_of(slice(None), keys + 1), expected)
    assert not torch.allclose(model(ids, ids), expected)


@both
def test_each_site_of_dropout_has_keys_of_its_own(architecture: str) -> None:
    model, seen = small(architecture, 30, dropout=0.3).train(), []
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].tolist()))
    ids = torch.arange(9)[None]
    model(ids, ids, dropout_keys=torch.tensor([5]))
    assert len({tuple(keys) for keys in seen}) == 2 * CONFIG.n_layer + 1


def test_dropout_keeps_its_share_and_its_mean_and_draws_anew_in_every_place() -> None:
    ones = torch.ones(64, 32, 48)
    keys = torch.arange(64) * 7919
    first, second = (KeyedDropout(0.25).train()(ones, keys_at(keys, site)) for site in (0, 1))
    for dropped in (first, second):
        assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.005)
        assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    pairs = [
        (first, second),
        (first[:-1], first[1:]),
        (first[:, :-1], first[:, 1:]),
        (first[..., :-1], first[..., 1:]),
    ]
    for a, b in pairs:  # independent: both dropped in a sixteenth of the places
        assert float(((a == 0) & (b == 0)).float().mean()) == pytest.approx(0.0625, abs=0.004)


def test_dropout_is_off_in_evaluation() -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5), 30)
    model.eval()
    ids = torch.randint(30, (2, 8))
    keys = torch.tensor([1, 2])
    torch.testing.assert_close(model(ids, ids, dropout_keys=keys), model(ids, ids))


def test_the_sum_leaves_out_what_is_ignored_and_is_taken_in_float32() -> None:
    logits = torch.randn(2, 5, 11).bfloat16()
    targets = torch.randint(11, (2, 5))
    targets[0, :3] = -100
    expected = (
        -logits.float()
        .log_softmax(-1)
        .gather(-1, targets.clamp(min=0)[..., None])[targets != -100]
        .sum()
    )
    total = summed_nll(logits, targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected)
    assert float(summed_nll(logits, torch.full((2, 5), -100))) == 0


def test_targets_are_counted_after_the_shift() -> None:
    labels = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, -100], [1, 2, 3, -100]])
    assert int(count_targets(labels)) == 4


@both
def test_flops_count_every_matrix_but_what_is_looked_up(architecture: str) -> None:
    model = small(architecture, 100)
    weights = sum(
        p.numel() for n, p in model.named_parameters() if "wpe" not in n and "embed_tokens" not in n
    )
    attending = {"gpt2": 3, "lfm2": 2}[architecture]  # of its three layers
    assert model.flops_per_token() == 6 * weights + 12 * attending * 32 * 24


@both
def test_a_model_built_without_memory_is_given_the_same_first_weights(architecture: str) -> None:
    with torch.device("meta"):
        empty = small(architecture, 50, seed=4)
    assert all(parameter.is_meta for parameter in empty.parameters())
    drawn, real = (
        dict(empty.initial_weights(4)),
        dict(small(architecture, 50, seed=4).named_parameters()),
    )
    assert drawn.keys() == real.keys()
    assert all(torch.equal(drawn[name], real[name]) for name in real)


@both
def test_a_block_is_one_graph_for_a_compiler(architecture: str) -> None:
    model, ids = jolted(small(architecture, 50, n_layer=1)).train(), torch.randint(50, (3, 9))
    expected = model(ids, ids).detach()
    (blocks,) = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    blocks[0].compile(fullgraph=True, backend="eager")
    compiled = model(ids, ids)
    compiled.backward()
    torch.testing.assert_close(compiled.detach(), expected)


class OperationNames(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_projection_on_a_gpu_is_one_product_with_its_bias() -> None:
    projection = Projection(4, 6)
    torch.nn.init.normal_(projection.weight)
    torch.nn.init.normal_(projection.bias)
    x = torch.randn(2, 3, 4)
    expected = torch.nn.functional.linear(x, projection.weight.T, projection.bias)
    torch.testing.assert_close(projection(x), expected)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            on_gpu = Projection(4, 6)
        with OperationNames() as operations:
            y = on_gpu(torch.empty(2, 3, 4, device="cuda"))
    assert y.shape == (2, 3, 6)
    assert [name for name in operations.names if "mm" in name or "add" in name] == ["addmm"]
