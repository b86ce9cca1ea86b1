"""AdamW with a small state makes the steps of torch's AdamW, up to the rounding of its state."""

import pytest
import torch
from torch import nn

from llmtrain.training import adamw
from llmtrain.training.adamw import (
    CompactAdamW,
    EightBitAdamW,
    blocks_per_row,
    is_eight_bit,
    positive_codebook,
    signed_codebook,
    update_weights,
)

CPU = torch.device("cpu")
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = [(64, 300), (8, 16, 40), (300,), ()]


def initial_weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    tensors = [0.02 * torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def gradients_of_step(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return gradients with a mean and noise, whose rows differ in size as in an embedding."""
    generator = torch.Generator().manual_seed(step)
    gradients = []
    for shape in SHAPES:
        noise = torch.randn(shape, generator=generator)
        row_shape = [*shape[:1], *(1 for _ in shape[1:])]
        row_scale = torch.rand(row_shape, generator=generator)
        gradients.append((row_scale * (0.3 + noise) * 1e-3).to(dtype))
    return gradients


def make_step(
    optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor], scale: float = 1.0
) -> None:
    for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
        parameter.grad = (scale * gradient).to(parameter.dtype)
    optimizer.step()


# --- the steps of torch


def relative_distance(
    optimizer: CompactAdamW, reference: torch.optim.Optimizer, start: list[torch.Tensor]
) -> float:
    """Return how far the weights are from those of a reference, relative to their way so far."""
    squared_distance = 0.0
    squared_way = 0.0
    for parameter, expected, initial in zip(
        parameters_of(optimizer), parameters_of(reference), start, strict=True
    ):
        weights = parameter.detach().double()
        if "compensation" in optimizer.state[parameter]:
            weights += optimizer.state[parameter]["compensation"].double()
        squared_distance += (weights - expected.detach()).square().sum().item()
        squared_way += (expected.detach() - initial).square().sum().item()
    return (squared_distance / squared_way) ** 0.5


@pytest.mark.parametrize(
    ("dtype", "optimizer_class", "largest_distance"),
    [
        (torch.float32, CompactAdamW, 1e-5),
        (torch.bfloat16, CompactAdamW, 0.01),
        (torch.float32, EightBitAdamW, 0.1),
        (torch.bfloat16, EightBitAdamW, 0.1),
    ],
)
def test_its_steps_are_those_of_torch_in_float64(
    dtype: torch.dtype, optimizer_class: type[CompactAdamW], largest_distance: float
) -> None:
    """The reference has the same gradients, and begins with the same weights."""
    start = [parameter.detach().double() for parameter in initial_weights(dtype)]
    optimizer = optimizer_class(initial_weights(dtype), **SETTINGS)
    reference = torch.optim.AdamW([nn.Parameter(tensor.clone()) for tensor in start], **SETTINGS)

    for step in range(30):
        gradients = gradients_of_step(step, dtype)
        make_step(optimizer, gradients)
        make_step(reference, [gradient.double() for gradient in gradients])

    assert relative_distance(optimizer, reference, start) < largest_distance


def test_a_step_for_some_rows_at_a_time_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer_after_three_steps() -> EightBitAdamW:
        optimizer = EightBitAdamW(initial_weights(torch.bfloat16), **SETTINGS)
        for step in range(3):
            make_step(optimizer, gradients_of_step(step, torch.bfloat16))
        return optimizer

    all_rows = optimizer_after_three_steps()
    monkeypatch.setitem(adamw.CHUNK_NUMEL, "cpu", 1000)  # three rows
    some_rows = optimizer_after_three_steps()

    pairs = zip(parameters_of(all_rows), parameters_of(some_rows), strict=True)
    for expected, parameter in pairs:
        assert torch.equal(parameter, expected)
        for name, tensor in all_rows.state[expected].items():
            assert torch.equal(some_rows.state[parameter][name], tensor), name


# --- weights in bfloat16


def test_the_compensation_keeps_small_changes_of_bfloat16_weights() -> None:
    weights = torch.ones(1000, dtype=torch.bfloat16)
    compensation = torch.zeros_like(weights)
    uncompensated = torch.ones_like(weights)
    change = torch.full((1000,), -1e-4)

    for _ in range(1000):
        update_weights(weights, change, decay=1.0, compensation=compensation)
        update_weights(uncompensated, change, decay=1.0, compensation=None)

    total = weights.float() + compensation.float()
    torch.testing.assert_close(total, torch.full((1000,), 0.9), atol=1e-3, rtol=0)
    assert (uncompensated == 1).all(), "the changes are lost"


# --- moments in 8 bits


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_code_is_the_nearest_value_up_to_the_rounding_to_bfloat16(is_signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(16, 256, generator=generator) ** 4
    if is_signed:
        numbers *= torch.sign(torch.randn(16, 256, generator=generator))
    numbers[:, 0] = 1  # the scale of every block
    codebook = signed_codebook(CPU) if is_signed else positive_codebook(CPU)

    decoded = codebook.decode(*codebook.encode(numbers))

    smallest_errors = (codebook.values[:, None, None] - numbers).abs().amin(0)
    errors = (decoded - numbers).abs()
    assert (errors <= smallest_errors + numbers.abs() / 128).all()
    assert torch.equal(decoded[:, 0], torch.ones(16))


def test_a_second_moment_never_becomes_zero_but_a_block_of_zeros_stays() -> None:
    numbers = torch.full((1, 256), 1e-12)
    numbers[0, 0] = 1.0
    zeros = torch.zeros(1, 256)
    codebook = positive_codebook(CPU)

    assert (codebook.decode(*codebook.encode(numbers)) > 0).all()
    assert torch.equal(codebook.decode(*codebook.encode(zeros)), zeros)


@pytest.mark.parametrize(
    ("shape", "has_codes"),
    [((64, 64), True), ((63, 65), False), ((4096,), False), ((2, 3, 999), True)],
)
def test_the_shape_of_a_parameter_decides_whether_its_moments_have_8_bits(
    shape: tuple[int, ...], has_codes: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    optimizer = EightBitAdamW([parameter], **SETTINGS)

    optimizer.step()

    assert is_eight_bit(shape) == has_codes
    state = optimizer.state[parameter]
    assert (state["exp_avg"].dtype == torch.uint8) == has_codes
    if has_codes:
        assert state["exp_avg_scales"].shape == (shape[0], blocks_per_row(shape))


# --- loss scaling


def trained(optimizer_class: type[CompactAdamW]) -> CompactAdamW:
    """Return an optimizer after two steps."""
    optimizer = optimizer_class(initial_weights(torch.bfloat16), **SETTINGS)
    for step in range(2):
        make_step(optimizer, gradients_of_step(step, torch.bfloat16))
    return optimizer


@pytest.mark.parametrize("optimizer_class", [CompactAdamW, EightBitAdamW])
def test_a_step_divides_gradients_by_the_loss_scale(optimizer_class: type[CompactAdamW]) -> None:
    optimizer = trained(optimizer_class)
    without_scale = trained(optimizer_class)
    make_step(without_scale, gradients_of_step(2, torch.bfloat16))

    optimizer.found_inf = torch.zeros(())
    optimizer.grad_scale = torch.tensor(1024.0)
    make_step(optimizer, gradients_of_step(2, torch.bfloat16), scale=1024.0)

    torch.testing.assert_close(parameters_of(optimizer), parameters_of(without_scale))
