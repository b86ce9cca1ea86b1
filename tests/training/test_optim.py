"""Weight decay is for matrices; Muon takes the hidden ones, and AdamW the rest."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import llmtrain.training.muon as muon_module
import llmtrain.training.optim as optim_module
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.gpt_family import build_gpt
from llmtrain.training.learning_rates import LearningRates
from llmtrain.training.muon import Muon, orthogonal
from llmtrain.training.optim import MuonWithAdamW, is_made_by_flag, make_optimizer
from llmtrain.training.settings import OptimConfig

ALONE: Any = SimpleNamespace(mixed_precision="no", ddp_handler=None, state=None, num_processes=1)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.cube = nn.Parameter(torch.ones(2, 2, 2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_only_parameters_of_rank_two_and_more_decay():
    model = Parts()
    optimizer = make_optimizer(ALONE, model, OptimConfig(weight_decay=0.3))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    found = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert found == {
        "table.weight": 0.3,
        "linear.weight": 0.3,
        "cube": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "scale": 0.0,
        "frozen": None,
    }


def test_an_update_without_gradient_shrinks_matrices_and_nothing_else():
    model = Parts()
    optimizer = make_optimizer(ALONE, model, OptimConfig(learning_rate=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter.dim() >= 2 and parameter.requires_grad
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))


def test_the_optimizer_has_the_configured_moments():
    config = OptimConfig(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-6)
    optimizer = make_optimizer(ALONE, Parts(), config)
    assert all(group["betas"] == (0.8, 0.7) for group in optimizer.param_groups)
    assert all(group["eps"] == 1e-6 for group in optimizer.param_groups)


@pytest.mark.parametrize("architecture", ["gpt2", "lfm2"])
def test_muon_takes_the_hidden_matrices_and_leaves_the_rest_to_adamw(architecture: str) -> None:
    model = build_gpt(
        GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, architecture=architecture), 30
    )
    optimizer = make_optimizer(ALONE, model, OptimConfig(optim="muon", learning_rate=0.01))
    muon, *adamw = (
        {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}
        for group in optimizer.param_groups
    )
    assert muon == {
        name for name, p in model.named_parameters() if re.search(r"\.\d\.", name) and p.dim() == 2
    }
    assert set().union(*adamw) == {name for name, _ in model.named_parameters()} - muon
    ids = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(0))
    rates = LearningRates(optimizer, OptimConfig(max_steps=30, warmup_steps=1))
    losses = []
    for step in range(30):
        rates.set(step)
        loss = model(ids, ids) / 32
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert muon == {
        name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]
    }


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_muon_leaves_the_embedding_and_the_head_of_any_family_to_adamw(family: str) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    muon, _ = make_optimizer(ALONE, model, OptimConfig(optim="muon")).parts
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {names[parameter] for parameter in muon.param_groups[0]["params"]}
    outer = {
        names[module.weight] for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    outer.add(names[model.get_output_embeddings().weight])
    hidden = {name for name, parameter in model.named_parameters() if parameter.dim() == 2} - outer
    assert taken == hidden
    assert len(taken) >= 4


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_muon_leaves_the_score_head_of_a_reward_model_to_adamw(family: str) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    config = AutoConfig.for_model(family, **sizes, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)

    optimizer = make_optimizer(ALONE, model, OptimConfig(optim="muon"))

    muon, *adamw = (
        {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}
        for group in optimizer.param_groups
    )
    assert "score.weight" in set().union(*adamw)
    assert "score.weight" not in muon
    assert len(muon) >= 4
    assert muon | set().union(*adamw) == {name for name, _ in model.named_parameters()}


def _matrices(*shapes: tuple[int, int]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape, generator=generator)
    return matrices


def test_muon_may_have_several_groups_beside_adamw() -> None:
    fast, slow = _matrices((4, 4), (4, 4))
    [head] = _matrices((4, 4))
    muon = Muon([{"params": [fast]}, {"params": [slow], "lr": 0.01}], lr=0.1, weight_decay=0.0)
    optimizer = MuonWithAdamW(muon, torch.optim.AdamW([head], lr=0.3))
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
    before = [matrix.detach().clone() for matrix in (fast, slow)]
    optimizer.step()

    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 0.3]
    assert [[*optimizer.state[matrix]] for matrix in (fast, slow)] == [["momentum_buffer"]] * 2
    assert {"exp_avg", "exp_avg_sq"} <= {*optimizer.state[head]}
    fast_step, slow_step = (
        (matrix - old).norm() for matrix, old in zip((fast, slow), before, strict=True)
    )
    assert fast_step > 5 * slow_step


SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (16, 16)]


def test_muon_is_torchs_but_for_the_rounding_to_bfloat16() -> None:
    ours, theirs = _matrices(*SHAPES), _matrices(*SHAPES)
    mine = Muon(ours, lr=0.1, weight_decay=0.2, momentum=0.95)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for matrix, other in zip(ours, theirs, strict=True):
            matrix.grad = other.grad = torch.randn(matrix.shape, generator=generator)
        before = [matrix.detach().clone() for matrix in theirs]
        mine.step()
        reference.step()
        for matrix, other, old in zip(ours, theirs, before, strict=True):
            assert (matrix - other).norm() < 0.05 * (
                other - old
            ).norm()  # bfloat16 has three digits
            with torch.no_grad():
                matrix.copy_(other)


def test_muons_updates_are_orthogonal_whatever_goes_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together, alone = _matrices(*SHAPES), _matrices(*SHAPES)
    before = [matrix.detach().clone() for matrix in together]
    Muon(together, lr=0.1, weight_decay=0.0).step()
    monkeypatch.setitem(muon_module._BATCH_NUMBERS, "cpu", 1)
    Muon(alone, lr=0.1, weight_decay=0.0).step()
    for matrix, other, old in zip(together, alone, before, strict=True):
        torch.testing.assert_close(matrix, other)
        values = torch.linalg.svdvals((matrix - old).detach()) / (
            0.1 * 0.2 * max(matrix.shape) ** 0.5
        )
        assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_computes_in_the_precision_of_the_gradients(dtype: torch.dtype) -> None:
    [matrix] = _matrices((8, 24))
    exact = orthogonal(matrix.grad[None].double())[0]  # whose size does not matter
    found = _direction(nn.Parameter(matrix.detach().to(dtype)), matrix.grad)
    assert (found - exact).norm() / exact.norm() < {torch.float64: 1e-12, torch.float32: 1e-5}[
        dtype
    ]
    rounded = _direction(nn.Parameter(matrix.detach().to(dtype)), matrix.grad, torch.bfloat16)
    assert 1e-3 < (rounded - exact).norm() / exact.norm() < 0.03


def _direction(
    matrix: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    matrix.grad = gradient.to(matrix.dtype)
    before = matrix.detach().clone()
    Muon([matrix], lr=1.0, weight_decay=0.0, dtype=dtype).step()
    return (before - matrix.detach()).double() / (0.2 * max(matrix.shape) ** 0.5)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", None), ("fp16", None), ("bf16", torch.bfloat16)]
)
def test_muon_has_the_runs_precision_and_momentum(
    precision: str, dtype: torch.dtype | None
) -> None:
    config = OptimConfig(optim="muon", adam_beta1=0.7)
    accelerator = SimpleNamespace(
        mixed_precision=precision, ddp_handler=None, state=None, num_processes=1
    )
    muon, _ = make_optimizer(accelerator, GPT(GPTConfig(n_embd=16), 30), config).parts
    assert [(group["dtype"], group["momentum"]) for group in muon.param_groups] == [(dtype, 0.7)]


def trained(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(4, 4).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "is_sharded", "why"),
    [
        ("adafactor", torch.bfloat16, False, "adafactor loses small updates of bfloat16 weights"),
        (
            "adafactor",
            torch.float32,
            True,
            "adafactor cannot train sharded weights; use .*multi_gpu",
        ),
        ("paged_adamw_8bit", torch.float32, False, "needs bitsandbytes: pip install"),
    ],
)
def test_an_optimizer_that_cannot_train_these_weights_is_one_line(
    name: str,
    dtype: torch.dtype,
    is_sharded: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optim_module, "Ranks", lambda _: SimpleNamespace(is_sharded=is_sharded))
    monkeypatch.setattr(optim_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=why):
        make_optimizer(ALONE, trained(dtype), OptimConfig(optim=name))


def test_paged_adamw_of_bitsandbytes_makes_a_step() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = nn.Linear(64, 64)
    optimizer = make_optimizer(ALONE, model, OptimConfig(optim="paged_adamw_8bit"))
    before = model.weight.detach().clone()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert is_made_by_flag(optimizer, "paged_adamw_8bit", model)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["adamw", "adamw_torch_8bit", "muon", "adafactor"])
def test_a_flag_knows_the_optimizer_that_it_makes(name: str) -> None:
    model = build_gpt(GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=8), 64)
    optimizers = {
        other: make_optimizer(ALONE, model, OptimConfig(optim=other))
        for other in ("adamw", "adamw_torch_8bit", "muon", "adafactor")
    }
    matching = [o for o in optimizers if is_made_by_flag(optimizers[o], name, model)]
    assert matching == [name]
