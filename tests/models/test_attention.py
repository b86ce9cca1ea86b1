"""Attention in blocks, beside PyTorch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from llmtrain.models import attention
from llmtrain.models.attention import causal_attention, hasten_transformers

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


def test_autocast_does_not_round_the_scores() -> None:
    parts = [2 * part for part in inputs(200, torch.float32)]
    expected = outcome(blockwise, [part.bfloat16() for part in parts])[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(blockwise(*(part.requires_grad_() for part in parts)), expected)


def test_long_rows_are_pytorchs() -> None:
    for length in (attention.LONGEST, attention.LONGEST + 1):
        out = causal_attention(*(part.requires_grad_() for part in inputs(length)))
        assert (type(out.grad_fn).__name__ == "_BlockwiseBackward") == (length == attention.LONGEST)


class Module:
    is_causal = True


def packed(length: int, *borders: int) -> torch.Tensor:
    """Documents that begin at ``borders`` in the first row, and a little later in the second; [B, 1, T, T]."""
    places = torch.arange(length)
    rows = [sum((places >= border + shift).int() for border in borders or [length // 3]) for shift in (0, 5)]
    document = torch.stack([row * torch.ones(length) for row in rows])
    return ((document[:, :, None] == document[:, None]) & torch.ones(length, length).tril().bool())[:, None]


@pytest.fixture
def theirs_and_ours() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    hasten_transformers()
    hasten_transformers()
    return sdpa_attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]


MASKS = {"text": None, "packed": packed(130), "many": packed(200, 60, 128, 140), "alike": packed(130)[:1]}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_transformers_models_compute_what_they_computed(theirs_and_ours, mask, heads: int, rows: int) -> None:
    length = 130 if mask is None else mask.shape[-1]
    module = Module()
    module.num_key_value_groups = 3 // heads

    def attend(function: Callable[..., Any]) -> Attention:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen = None if mask is None else mask[:rows]
            return function(module, q[:rows], k[:rows, :heads], v[:rows, :heads], seen, scaling=0.2)[0]

        return run

    graph = attend(theirs_and_ours[1])(*(part.requires_grad_() for part in inputs(length))).grad_fn
    while type(graph).__name__ != "_BlockwiseBackward":
        graph = graph.next_functions[0][0]  # to the end, if transformers' own has computed it
    found, expected = (outcome(attend(function), inputs(length)) for function in reversed(theirs_and_ours))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    mask = packed(200, 60, 128, 140)
    known = WeakTensorKeyDictionary()
    blocks = attention._blocks_of(mask, known)
    assert blocks[0] == (slice(0, 2), slice(0, 64), slice(0, 64))  # alike in both rows
    seen = {(row, queries.start): keys for rows, queries, keys in blocks for row in range(rows.start, rows.stop)}
    assert [seen[0, start].start for start in (0, 64, 128, 192)] == [0, 0, 128, 128]
    assert [seen[1, start].start for start in (0, 64, 128, 192)] == [0, 0, 64, 128]  # documents begin 5 later
    assert [seen[1, start].stop for start in (0, 64, 128, 192)] == [64, 128, 192, 200]
    assert attention._blocks_of(mask, known) is blocks
    del mask
    assert not known


def test_what_blocks_cannot_do_is_left_to_transformers(theirs_and_ours) -> None:
    q, k, v = (part.requires_grad_() for part in inputs(20))
    sees_all = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    blind = packed(20).clone()
    blind[:, :, 3] = False
    for others in (
        {"dropout": 0.1},
        {"is_causal": False},
        {"attention_mask": sees_all},
        {"attention_mask": blind},
        {"attention_mask": torch.zeros(2, 1, 20, 20, dtype=torch.float64)},
        {"position_bias": torch.zeros(1, 1, 20, 20, dtype=torch.float64)},
    ):
        torch.manual_seed(0)
        one = theirs_and_ours[0](Module(), q, k, v, **{"attention_mask": None, **others})[0]
        torch.manual_seed(0)
        other = theirs_and_ours[1](Module(), q, k, v, **{"attention_mask": None, **others})[0]
        assert torch.equal(one, other), others
    last = q[:, :, -1:]  # with the earlier keys from a cache
    one, other = (function(Module(), last, k, v, None)[0] for function in theirs_and_ours)
    assert torch.equal(one, other)
