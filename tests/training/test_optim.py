"""Weight decay is for matrices. Muon trains the hidden matrices, and AdamW the other parameters."""

from types import SimpleNamespace
from typing import Any, get_args

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
)

import llmtrain.training.muon as muon_module
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.lfm2 import build_gpt
from llmtrain.training.muon import Muon
from llmtrain.training.optim import (
    OPTIMIZERS,
    decayed_parameters,
    hidden_matrices,
    is_made_by_flag,
    make_optimizer,
)
from llmtrain.training.settings import OptimConfig


def one_process(mixed_precision: str = "no") -> Any:
    """Stand for the accelerator of a single process."""
    return SimpleNamespace(
        mixed_precision=mixed_precision, ddp_handler=None, state=None, num_processes=1
    )


def names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """Return the names of the parameters of each group."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        groups.append({name_of[parameter] for parameter in group["params"]})
    return groups


def all_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


# --- adamW


class ManyShapes(nn.Module):
    """A model with parameters of every number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.cube = nn.Parameter(torch.ones(2, 2, 2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_adamw_has_the_flags_and_decays_parameters_of_two_or_more_dimensions() -> None:
    model = ManyShapes()
    config = OptimConfig(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-6)

    optimizer = make_optimizer(one_process(), model, config)

    decay_of_groups = [group["weight_decay"] for group in optimizer.param_groups]
    assert dict(zip(decay_of_groups, names_by_group(model, optimizer), strict=True)) == {
        0.3: {"table.weight", "linear.weight", "cube"},
        0.0: {"linear.bias", "norm.weight", "norm.bias", "scale"},
    }
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.7)
        assert group["eps"] == 1e-6


# --- which parameters Muon trains


SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


def small_gpt(architecture: Any) -> nn.Module:
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, architecture=architecture)
    return build_gpt(config, 30)


def of_transformers(family: str, auto_model: Any = AutoModelForCausalLM) -> nn.Module:
    return auto_model.from_config(AutoConfig.for_model(family, **SIZES, num_labels=1))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(small_gpt("gpt2"), id="GPT"),
        pytest.param(small_gpt("lfm2"), id="LFM2"),
        pytest.param(of_transformers("llama"), id="llama"),
        pytest.param(of_transformers("gpt_neox"), id="gpt_neox"),
        pytest.param(of_transformers("llama", AutoModelForSequenceClassification), id="reward"),
    ],
)
def test_muon_trains_the_hidden_matrices_and_adamw_the_other_parameters(model: nn.Module) -> None:
    optimizer = make_optimizer(one_process(), model, OptimConfig(optim="muon"))

    muon, *adamw = names_by_group(model, optimizer)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    outer = {id(weight) for weight in embeddings}
    hidden = set()
    for name, parameter in model.named_parameters():
        is_head = name in ("score.weight", "lm_head.weight", "embed_out.weight")
        if parameter.dim() == 2 and id(parameter) not in outer and not is_head:
            hidden.add(name)
    assert muon == hidden
    assert len(hidden) >= 4
    assert muon | set.union(*adamw) == all_names(model)


# Two-dimensional parameters that are no matrices: biases, norms, tables and states.
NO_MATRICES = {
    "cohere": ({"use_qk_norm": True}, ["q_norm.weight", "k_norm.weight"]),
    "gpt_oss": ({"num_local_experts": 2}, ["gate_up_proj_bias", "down_proj_bias"]),
    "mamba": ({}, ["A_log"]),
    "recurrent_gemma": ({}, ["input_gate_bias", "recurrent_gate_bias"]),
}


@pytest.mark.parametrize("family", NO_MATRICES)
def test_biases_norms_and_states_of_two_dimensions_neither_decay_nor_go_to_muon(
    family: str,
) -> None:
    settings, names = NO_MATRICES[family]
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **SIZES, **settings)
        model = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    no_matrices = {
        id(parameter) for name, parameter in parameters.items() if name.endswith(tuple(names))
    }
    decayed = {id(parameter) for _, parameter in decayed_parameters(model)}
    of_trainer = {
        id(model.get_parameter(name)) for name in Trainer.get_decay_parameter_names(None, model)
    }
    muon = {id(parameter) for parameter in hidden_matrices(model)}

    assert no_matrices
    assert not no_matrices & decayed
    assert muon < decayed
    assert decayed <= of_trainer


def test_muon_does_not_train_an_adapter_of_an_embedding_or_of_the_head() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    targets = ["embed_tokens", "lm_head", "q_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))

    muon = hidden_matrices(model)

    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.split(".lora_")[0].split(".")[-1] for name in names} == {*targets}
    assert {id(parameter) for parameter in muon} == {
        id(adapted.get_parameter(name)) for name in names if "q_proj" in name
    }


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", None), ("fp16", None), ("bf16", torch.bfloat16)]
)
def test_muon_has_the_precision_of_the_run_and_the_momentum_of_the_flag(
    precision: str, dtype: torch.dtype | None
) -> None:
    config = OptimConfig(optim="muon", adam_beta1=0.7)
    model = GPT(GPTConfig(n_embd=16), 30)

    muon, _ = make_optimizer(one_process(precision), model, config).optimizers

    (group,) = muon.param_groups
    assert group["dtype"] == dtype
    assert group["momentum"] == 0.7


# --- the steps of Muon


def random_matrices(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    """Return the same matrices with gradients at each call."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape, generator=generator)
    return matrices


SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (16, 16)]


def test_muon_makes_the_steps_of_torch_except_for_the_rounding_to_bfloat16() -> None:
    matrices = random_matrices(SHAPES)
    expected_matrices = random_matrices(SHAPES)
    muon = Muon(matrices, lr=0.1, weight_decay=0.2, momentum=0.95)
    reference = torch.optim.Muon(
        expected_matrices, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    generator = torch.Generator().manual_seed(1)
    bfloat16_error = 0.05

    for _ in range(3):
        for matrix, expected in zip(matrices, expected_matrices, strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=generator)
            expected.grad = matrix.grad
        before = [matrix.detach().clone() for matrix in expected_matrices]

        muon.step()
        reference.step()

        for matrix, expected, old in zip(matrices, expected_matrices, before, strict=True):
            assert (matrix - expected).norm() < bfloat16_error * (expected - old).norm()
            matrix.data.copy_(expected)  # so that errors do not add up


def test_muon_makes_the_same_steps_for_one_matrix_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_batches = random_matrices(SHAPES)
    Muon(in_batches, lr=0.1, weight_decay=0.0).step()

    monkeypatch.setitem(muon_module._BATCH_NUMBERS, "cpu", 1)
    one_by_one = random_matrices(SHAPES)
    Muon(one_by_one, lr=0.1, weight_decay=0.0).step()

    torch.testing.assert_close(in_batches, one_by_one)


def direction_of_step(
    matrix: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the orthogonal matrix that a step of Muon subtracts, in float64."""
    parameter = nn.Parameter(matrix.clone())
    parameter.grad = gradient.to(matrix.dtype)
    Muon([parameter], lr=1.0, weight_decay=0.0, dtype=dtype).step()
    return (matrix - parameter.detach()).double() / (0.2 * max(matrix.shape) ** 0.5)


def newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    """Apply five steps of Muon's polynomial to the singular values, in float64.

    The coefficients are those of Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/.
    """
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize(
    ("dtype", "largest_error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_muon_computes_in_the_precision_of_the_gradients_or_in_bfloat16(
    dtype: torch.dtype, largest_error: float
) -> None:
    (parameter,) = random_matrices([(8, 24)])
    matrix = parameter.detach().to(dtype)
    exact = newton_schulz(parameter.grad)

    def relative_error(direction: torch.Tensor) -> float:
        return ((direction - exact).norm() / exact.norm()).item()

    assert relative_error(direction_of_step(matrix, parameter.grad)) < largest_error
    in_bfloat16 = direction_of_step(matrix, parameter.grad, dtype=torch.bfloat16)
    assert 1e-3 < relative_error(in_bfloat16) < 0.03


# --- flags


def test_each_choice_of_the_flag_has_a_row_in_the_table() -> None:
    assert get_args(OptimConfig.__annotations__["optim"]) == tuple(OPTIMIZERS)


WITHOUT_BITSANDBYTES = ["adamw", "adamw_torch_8bit", "muon"]


@pytest.mark.parametrize("optim", WITHOUT_BITSANDBYTES)
def test_an_optimizer_is_recognised_as_that_of_its_flag_only(optim: str) -> None:
    model = build_gpt(GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=8), 64)

    optimizer = make_optimizer(one_process(), model, OptimConfig(optim=optim))

    assert [name for name in WITHOUT_BITSANDBYTES if is_made_by_flag(optimizer, name, model)] == [
        optim
    ]
