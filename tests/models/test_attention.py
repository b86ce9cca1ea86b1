"""Attention in blocks, beside PyTorch's own."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from llmtrain.models import attention_cpu, attention_gpu
from llmtrain.models.attention import ATTENTION_NAME, causal_attention, register
from llmtrain.models.documents import Documents

LENGTHS = [1, 63, 64, 65, 200]  # a block has 64 queries

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key and value as views of one projection, as a model has them; [B, H, T, D]."""
    drawn = torch.randn(
        2, length, 3, 3, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64
    )
    return [part.transpose(1, 2) for part in (2 * drawn).to(dtype).unbind(2)]


def outcome(function: Attention, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What comes out, and the gradients."""
    leaves = [part.detach().requires_grad_() for part in parts]
    out = function(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def in_blocks(out: torch.Tensor) -> bool:
    return type(out.grad_fn).__name__ == "_BlockwiseAttentionBackward"


def blockwise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(attention_cpu, "MIN_LENGTH", 0):
        out = causal_attention(q, k, v)
    assert in_blocks(out)
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_are_those_of_pytorch(length: int) -> None:
    for found, expected in zip(
        outcome(blockwise, inputs(length)), outcome(theirs, inputs(length)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_the_truth_as_pytorch(dtype: torch.dtype) -> None:
    rounded = inputs(200, dtype)
    truth = outcome(theirs, [part.double() for part in rounded])

    def errors(function: Attention) -> list[float]:
        found = outcome(function, rounded)
        return [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
        ]

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


@pytest.mark.parametrize("length", LENGTHS)
def test_documents_that_fill_their_rows_change_nothing(length: int) -> None:
    parts = inputs(length)
    torch.testing.assert_close(causal_attention(*parts, Documents()), theirs(*parts))


def test_autocast_does_not_round_the_scores() -> None:
    parts = [2 * part for part in inputs(200, torch.float32)]
    expected = outcome(blockwise, [part.bfloat16() for part in parts])[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(blockwise(*(part.requires_grad_() for part in parts)), expected)


@pytest.mark.parametrize(
    ("dtype", "length", "expected"),
    [
        (torch.float32, attention_cpu.MIN_LENGTH - 1, False),
        (torch.float32, attention_cpu.MIN_LENGTH, True),
        (torch.float32, attention_cpu.MAX_LENGTH, True),
        (torch.float32, attention_cpu.MAX_LENGTH + 1, False),
        (torch.bfloat16, 1, True),
        (torch.bfloat16, attention_cpu.MAX_LENGTH + 1, False),
    ],
)
def test_whole_rows_go_in_blocks_where_that_is_faster(
    dtype: torch.dtype, length: int, expected: bool
) -> None:
    leaves = [part.requires_grad_() for part in inputs(length, dtype)]
    assert in_blocks(causal_attention(*leaves)) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert in_blocks(causal_attention(*leaves)) == (length <= attention_cpu.MAX_LENGTH)
    not_in_blocks = mock.patch.object(attention_cpu, "attend_in_blocks", side_effect=AssertionError)
    with torch.no_grad(), not_in_blocks:
        causal_attention(*leaves)


class Module:
    is_causal = True


def positions_of(length: int, *borders: int) -> torch.Tensor:
    """Of documents that begin at ``borders`` in the first row, and a little later in the second; [B, T]."""
    places, rows = torch.arange(length), []
    for shift in (0, 5):
        begins = torch.tensor([0, *(border + shift for border in borders)])
        rows.append(places - begins[torch.searchsorted(begins, places, right=True) - 1])
    return torch.stack(rows)


@pytest.fixture
def theirs_and_ours() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    register()
    return sdpa_attention_forward, ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]


PACKED = {"text": None, "packed": positions_of(130, 43), "many": positions_of(200, 60, 128, 140)}


@pytest.mark.parametrize("positions", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_transformers_models_compute_what_they_computed(
    theirs_and_ours, positions: torch.Tensor | None, heads: int, rows: int
) -> None:
    length = 130 if positions is None else positions.shape[-1]
    module, documents = (
        Module(),
        Documents() if positions is None else Documents.of(positions[:rows]),
    )
    module.num_key_value_groups = 3 // heads

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        some = q[:rows], k[:rows, :heads], v[:rows, :heads]
        return theirs_and_ours[1](module, *some, None, documents=documents, scaling=0.2)[0]

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        some = q[:rows], k[:rows, :heads], v[:rows, :heads]
        return theirs_and_ours[0](module, *some, documents.mask(), scaling=0.2)[0]

    graph = ours(*(part.requires_grad_() for part in inputs(length))).grad_fn
    while type(graph).__name__ != "_BlockwiseAttentionBackward":
        graph = graph.next_functions[0][0]  # to the end, if transformers' own has computed it
    found, expected = (outcome(function, inputs(length)) for function in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 3])
def test_flex_attention_computes_the_same(
    heads: int,
) -> None:  # its reference: a CPU has no backward
    q, k, v = (part[:, : heads if i else 3] for i, part in enumerate(inputs(200, torch.float32)))
    documents = Documents.of(PACKED["many"])
    block_mask = attention_gpu.flex_block_mask(documents.starts)
    found = attention_gpu.attend_with_flex(q, k, v, scale=0.2, block_mask=block_mask)
    mask = documents.mask()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    blocks = Documents.of(positions_of(200, 60, 128, 140)).blocks
    assert blocks[0][:3] == (slice(0, 2), slice(0, 64), slice(0, 64))  # alike in both rows
    seen = {
        (row, queries.start): keys
        for rows, queries, keys, _ in blocks
        for row in range(rows.start, rows.stop)
    }
    assert [seen[0, start].start for start in (0, 64, 128, 192)] == [0, 0, 128, 128]
    assert [seen[1, start].start for start in (0, 64, 128, 192)] == [
        0,
        0,
        64,
        128,
    ]  # documents begin 5 later
    assert [seen[1, start].stop for start in (0, 64, 128, 192)] == [64, 128, 192, 200]


def test_borders_have_shapes_that_recur_on_a_gpu() -> None:
    positions = positions_of(200, 60, 128, 140)
    expected = [0, 60, 128, 140, 200, 265, 333, 345, 400]
    assert Documents.of(positions).borders.tolist() == expected
    recurring = Documents.of(positions, on_gpu=True).borders
    assert recurring.dtype == torch.int32
    assert recurring.tolist() == expected + [400] * (64 - len(expected))


def test_what_blocks_cannot_do_is_left_to_transformers(theirs_and_ours) -> None:
    q, k, v = (part.requires_grad_() for part in inputs(20))
    packed = Documents.of(positions_of(20, 7))
    for more in (
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1, 1, 20, 20, dtype=torch.float64)},
    ):
        torch.manual_seed(0)
        one = theirs_and_ours[0](Module(), q, k, v, packed.mask(), **more)[0]
        torch.manual_seed(0)
        other = theirs_and_ours[1](Module(), q, k, v, None, documents=packed, **more)[0]
        assert torch.equal(one, other), more
    for mask in (None, packed.mask()):  # that somebody else has made
        assert torch.equal(*(function(Module(), q, k, v, mask)[0] for function in theirs_and_ours))
    last = q[:, :, -1:]  # with the earlier keys from a cache
    assert torch.equal(*(function(Module(), last, k, v, None)[0] for function in theirs_and_ours))


def many_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seq_q: torch.Tensor, **how: Any
) -> Any:
    """What torch's kernel does on a GPU; [B * T, H, D]."""
    places = torch.arange(len(q))
    documents = torch.searchsorted(cu_seq_q.long(), places, right=True)
    mask = (documents[:, None] == documents) & (places <= places[:, None])
    parts = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(
        *parts, attn_mask=mask, scale=how["scale"], enable_gqa=True
    )
    return out[0].transpose(0, 1)


def as_one_document(*given: Any, cu_seq_q: torch.Tensor, **how: Any) -> Any:
    return many_lengths(*given, cu_seq_q=cu_seq_q[:1], **how)


def of_an_older_torch(*given: Any, is_causal: bool) -> Any:
    raise AssertionError


@pytest.mark.parametrize("kernel", [many_lengths, as_one_document, of_an_older_torch])
def test_a_kernel_for_many_lengths_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    monkeypatch.setattr(attention_gpu, "varlen_attn", kernel)
    for dtype in (torch.float16, torch.bfloat16):
        is_correct = attention_gpu._varlen_is_correct(torch.device("cpu"), dtype)
        assert is_correct == (kernel is many_lengths)


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_gpu, "_varlen_is_correct", lambda device, dtype: right)
    can_use_varlen = attention_gpu.can_use_varlen.__wrapped__  # without its cache
    assert can_use_varlen(torch.bfloat16) == right
    assert not can_use_varlen(torch.float32)
