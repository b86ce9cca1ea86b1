"""AdamW with small state: the steps of torch's AdamW, within the rounding of its state."""

import copy

import pytest
import torch
from torch import nn

from llmtrain.training import adamw
from llmtrain.training.adamw import CompactAdamW, EightBitAdamW
from llmtrain.training.compensation import update_weights
from llmtrain.training.eight_bit import (
    blocks_per_row,
    is_eight_bit,
    positive_codebook,
    signed_codebook,
)

CPU = torch.device("cpu")
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = [(64, 300), (8, 16, 40), (300,), ()]


def parameters_of(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    tensors = [0.02 * torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def make_steps(
    optimizer: torch.optim.Optimizer, first: int, count: int, scale: float = 1.0
) -> None:
    """Make steps whose gradients have a mean and noise, and differ by rows as in an embedding."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            noise = torch.randn(p.shape, generator=generator)
            row_scale = torch.rand([*p.shape[:1], *[1 for _ in p.shape[1:]]], generator=generator)
            p.grad = (scale * row_scale * (0.3 + noise) * 1e-3).to(p.dtype)
        optimizer.step()


def distance(optimizer: CompactAdamW, reference: torch.optim.Optimizer) -> float:
    """Return how far the weights are apart, as a share of how far they have moved."""
    start = parameters_of(torch.float32)
    apart = 0.0
    moved = 0.0
    pairs = zip(
        start,
        optimizer.param_groups[0]["params"],
        reference.param_groups[0]["params"],
        strict=True,
    )
    for initial, p, expected in pairs:
        weights = p.detach().double()
        if "compensation" in optimizer.state[p]:
            weights = weights + optimizer.state[p]["compensation"].double()
        apart += (weights - expected.detach().double()).square().sum().item()
        moved += (expected.detach() - initial.detach().to(p.dtype)).square().sum().item()
    return (apart / moved) ** 0.5


@pytest.mark.parametrize(
    ("dtype", "optimizer_class", "bound"),
    [
        (torch.float32, CompactAdamW, 1e-5),
        (torch.bfloat16, CompactAdamW, 0.01),
        (torch.float32, EightBitAdamW, 0.1),
        (torch.bfloat16, EightBitAdamW, 0.1),
    ],
)
def test_its_steps_are_those_of_torch(
    dtype: torch.dtype, optimizer_class: type[CompactAdamW], bound: float
) -> None:
    optimizer = optimizer_class(parameters_of(dtype), **SETTINGS)
    # The reference gets the same gradients, and begins with the same weights, in float64.
    start = [nn.Parameter(p.detach().double()) for p in parameters_of(dtype)]
    reference = torch.optim.AdamW(start, **SETTINGS)
    make_steps(optimizer, first=0, count=30)
    for step in range(30):
        optimizer_of_step = CompactAdamW(parameters_of(dtype), **SETTINGS)
        make_steps(optimizer_of_step, first=step, count=1)
        for p, q in zip(optimizer_of_step.param_groups[0]["params"], start, strict=True):
            q.grad = p.grad.double()
        reference.step()

    assert distance(optimizer, reference) < bound


def test_small_updates_of_bfloat16_weights_are_not_lost() -> None:
    weights = torch.ones(1000, dtype=torch.bfloat16)
    compensation = torch.zeros_like(weights)
    for _ in range(1000):
        update_weights(weights, torch.full((1000,), -1e-4), decay=1.0, compensation=compensation)
    torch.testing.assert_close(
        weights.float() + compensation.float(), torch.full((1000,), 0.9), atol=1e-3, rtol=0
    )

    # Without the compensation, every one of them is.
    weights.fill_(1)
    for _ in range(1000):
        update_weights(weights, torch.full((1000,), -1e-4), decay=1.0, compensation=None)
    assert (weights == 1).all()


def test_a_code_is_the_nearest_value_but_for_the_rounding_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    fractions = torch.rand(16, 256, generator=generator) ** 4
    fractions[:, 0] = 1  # the scale of every block
    for codebook, numbers in (
        (signed_codebook(CPU), fractions * torch.sign(torch.randn(16, 256, generator=generator))),
        (positive_codebook(CPU), fractions),
    ):
        numbers[:, 0] = 1
        codes, scales = codebook.encode(numbers)
        decoded = codebook.decode(codes, scales)
        errors = (decoded - numbers).abs()
        smallest = (codebook.values[:, None, None] - numbers).abs().amin(0)
        assert (errors <= smallest + numbers.abs() / 128).all()
        assert torch.equal(decoded[:, 0], torch.ones(16))


def test_a_second_moment_never_becomes_zero() -> None:
    numbers = torch.full((1, 256), 1e-12)
    numbers[0, 0] = 1.0
    codebook = positive_codebook(CPU)
    assert (codebook.decode(*codebook.encode(numbers)) > 0).all()
    # A block of zeros stays one.
    zeros = torch.zeros(1, 256)
    assert torch.equal(codebook.decode(*codebook.encode(zeros)), zeros)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 64), True),
        ((63, 65), False),
        ((4096,), False),
        ((4096, 8), False),
        ((2, 3, 999), True),
    ],
)
def test_the_full_shape_decides_what_is_in_8_bits(shape: tuple[int, ...], expected: bool) -> None:
    assert is_eight_bit(shape) == expected
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.zeros(shape)
    optimizer = EightBitAdamW([p], **SETTINGS)
    optimizer.step()
    state = optimizer.state[p]
    assert (state["exp_avg"].dtype == torch.uint8) == expected
    if expected:
        assert state["exp_avg_scales"].shape == (shape[0], blocks_per_row(shape))


def test_some_rows_at_a_time_have_the_bits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = EightBitAdamW(parameters_of(torch.bfloat16), **SETTINGS)
    make_steps(at_once, first=0, count=3)
    monkeypatch.setitem(adamw.CHUNK_NUMEL, "cpu", 1000)  # three rows
    by_rows = EightBitAdamW(parameters_of(torch.bfloat16), **SETTINGS)
    make_steps(by_rows, first=0, count=3)
    for p, q in zip(
        at_once.param_groups[0]["params"], by_rows.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(p, q)
        for name, tensor in at_once.state[p].items():
            assert torch.equal(tensor, by_rows.state[q][name]), name


@pytest.mark.parametrize("optimizer_class", [CompactAdamW, EightBitAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_found_inf_changes_nothing(
    dtype: torch.dtype, optimizer_class: type[CompactAdamW]
) -> None:
    optimizer = optimizer_class(parameters_of(dtype), **SETTINGS)
    make_steps(optimizer, first=0, count=2)
    parameters = optimizer.param_groups[0]["params"]
    weights = copy.deepcopy(parameters)
    states = copy.deepcopy([optimizer.state[p] for p in parameters])

    optimizer.found_inf = torch.ones(())
    make_steps(optimizer, first=2, count=1, scale=float("nan"))
    for p, before, state in zip(parameters, weights, states, strict=True):
        assert torch.equal(p, before)
        for name, tensor in state.items():
            assert torch.equal(optimizer.state[p][name], tensor), name

    optimizer.found_inf = torch.zeros(())
    optimizer.grad_scale = torch.tensor(1024.0)
    make_steps(optimizer, first=2, count=1, scale=1024.0)
    scaled = copy.deepcopy(parameters)
    plain = optimizer_class(weights, **SETTINGS)
    for p, state in zip(weights, states, strict=True):
        plain.state[p] = state
    make_steps(plain, first=2, count=1)
    for p, expected in zip(scaled, weights, strict=True):
        torch.testing.assert_close(p, expected)


def test_it_is_as_near_to_adamw_as_that_of_torchao() -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    shape = (64, 512)
    distances = []
    for make in (
        lambda p: EightBitAdamW([p], **SETTINGS),
        lambda p: torchao.AdamW8bit([p], **SETTINGS),
    ):
        weights = nn.Parameter(torch.zeros(shape))
        expected = nn.Parameter(torch.zeros(shape))
        optimizer = make(weights)
        reference = torch.optim.AdamW([expected], **SETTINGS)
        generator = torch.Generator().manual_seed(3)
        for _ in range(30):
            weights.grad = torch.randn(shape, generator=generator) * 1e-3
            expected.grad = weights.grad.clone()
            optimizer.step()
            reference.step()
        distances.append(((weights - expected).norm() / expected.norm()).item())
    ours, theirs = distances
    assert ours < 1.2 * theirs
