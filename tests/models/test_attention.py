"""Attention in blocks, beside PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from llmtrain.models import attention
from llmtrain.models.attention import causal_attention

LENGTHS = [1, 63, 64, 65, 200]  # a block has 64 queries

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key and value as views of one projection, as a model has them; [B, H, T, D]."""
    drawn = torch.randn(2, length, 3, 3, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return [part.transpose(1, 2) for part in (2 * drawn).to(dtype).unbind(2)]


def outcome(function: Attention, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What comes out, and the gradients."""
    leaves = [part.detach().requires_grad_() for part in parts]
    out = function(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def blockwise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = causal_attention(q, k, v)
    assert type(out.grad_fn).__name__ == "_BlockwiseBackward"
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_are_those_of_pytorch(length: int) -> None:
    for found, expected in zip(outcome(blockwise, inputs(length)), outcome(theirs, inputs(length)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_the_truth_as_pytorch(dtype: torch.dtype) -> None:
    rounded = inputs(200, dtype)
    truth = outcome(theirs, [part.double() for part in rounded])

    def errors(function: Attention) -> list[float]:
        found = outcome(function, rounded)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]

    for ours, pytorchs in zip(errors(blockwise), errors(theirs), strict=True):
        assert ours < 1.5 * pytorchs + torch.finfo(dtype).eps / 4


def test_no_position_sees_a_later_one() -> None:
    parts = inputs(130)
    changed = [part.clone() for part in parts]
    for part in changed:
        part[:, :, 100:] += 1
    one, other = (blockwise(*(p.requires_grad_() for p in some)) for some in (parts, changed))
    assert torch.equal(one[:, :, :100], other[:, :, :100])
    assert not torch.equal(one[:, :, 100:], other[:, :, 100:])


def test_long_rows_and_evaluation_are_pytorchs() -> None:
    for length in (attention._LONGEST, attention._LONGEST + 1):
        out = causal_attention(*(part.requires_grad_() for part in inputs(length)))
        assert (type(out.grad_fn).__name__ == "_BlockwiseBackward") == (length == attention._LONGEST)
    with torch.no_grad():
        assert torch.equal(causal_attention(*inputs(64)), theirs(*inputs(64)))
