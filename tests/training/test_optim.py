"""The learning rate is a function of the step; weight decay is for matrices."""

import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
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
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.gpt_family import build_gpt
from llmtrain.record.resume import ResumePoint
from llmtrain.training.checks import say_changed_settings
from llmtrain.training.muon import Muon, orthogonal
from llmtrain.training.optim import lr_at, make_optimizer
from llmtrain.training.settings import LogConfig, OptimConfig

ALONE: Any = SimpleNamespace(mixed_precision="no", ddp_handler=None, state=None, num_processes=1)
SCHEDULES = ("cosine", "linear", "constant", "warmup_stable_decay")
FALLING = ("cosine", "linear", "warmup_stable_decay")


def rates(
    schedule: str, max_steps: int, warmup_steps: int, learning_rate: float = 1.0
) -> list[float]:
    config = OptimConfig(
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        lr_scheduler_type=schedule,
    )
    return [lr_at(step, config) for step in range(max_steps)]


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        ("linear", [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("warmup_stable_decay", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
        # (1 + cos(pi k / 8)) / 2
        (
            "cosine",
            [
                0.5,
                1,
                1,
                0.96193977,
                0.85355339,
                0.69134172,
                0.5,
                0.30865828,
                0.14644661,
                0.03806023,
            ],
        ),
    ],
)
def test_each_schedule_gives_its_known_learning_rates(schedule, golden):
    assert rates(schedule, 10, 2) == pytest.approx(golden, abs=1e-8)
    assert rates(schedule, 10, 2, 3e-4) == pytest.approx(
        [3e-4 * rate for rate in golden], abs=1e-11
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_the_rate_rises_to_the_peak_and_never_again(schedule, warmup):
    curve = rates(schedule, 400, warmup, 2e-3)
    rising, rest = curve[:warmup], curve[warmup:]
    assert rising == sorted(set(rising))
    assert all(rate > 0 for rate in curve)
    assert max(curve) == pytest.approx(2e-3, rel=1e-12)
    assert curve[max(warmup - 1, 0)] == pytest.approx(2e-3, rel=1e-12)
    assert all(later <= earlier for earlier, later in pairwise(rest))


@pytest.mark.parametrize("schedule", FALLING)
def test_a_falling_schedule_ends_next_to_zero(schedule):
    assert 0 < rates(schedule, 1000, 50)[-1] < 0.01
    assert lr_at(1000, OptimConfig(max_steps=1000, lr_scheduler_type=schedule)) == pytest.approx(
        0, abs=1e-12
    )


def test_the_stable_phase_holds_the_peak_until_the_last_fifth():
    curve = rates("warmup_stable_decay", 1000, 50)
    assert set(curve[50:801]) == {1.0}
    assert all(later < earlier for earlier, later in pairwise(curve[800:]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 1), (2, 2), (5, 9)])
def test_a_run_shorter_than_its_warm_up_only_rises(schedule, max_steps, warmup):
    curve = rates(schedule, max_steps, warmup)
    assert curve == sorted(curve)
    assert all(0 < rate <= 1 for rate in curve)


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
    optimizer = make_optimizer(ALONE, Parts(), OptimConfig(adam_beta1=0.8, adam_beta2=0.7))
    assert all(group["betas"] == (0.8, 0.7) for group in optimizer.param_groups)


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
    losses = []
    for step in range(30):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, OptimConfig(max_steps=30, warmup_steps=1, learning_rate=0.01))
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


def test_a_run_goes_on_though_it_was_begun_with_settings_that_are_no_more(
    capsys: pytest.CaptureFixture,
) -> None:
    before = {**asdict(OptimConfig(learning_rate=1e-3)), "gone": 1}
    settings = SimpleNamespace(log=LogConfig(), optim=OptimConfig(learning_rate=2e-3))
    run: Any = SimpleNamespace(
        step=3,
        settings=settings,
        resume_point=ResumePoint(Path(), named_fingerprint={"optimizer": before}),
    )
    say_changed_settings(run)
    assert "learning_rate 0.001 -> 0.002; the learning rate goes from" in capsys.readouterr().out
