"""Attention in blocks and with the kernel for packed rows computes PyTorch's."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.models import attention, attention_cpu
from llmtrain.models.attention import ATTENTION_NAME, causal_attention, register
from llmtrain.models.documents import Documents

BLOCK = 64  # queries
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 200]
HEADS = 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # up to the order of float64 sums

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Inputs:
    """Queries, keys and values, which are views of one projection, as in a model: [B, H, T, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def random(cls, length: int, dtype: torch.dtype = torch.float64) -> "Inputs":
        generator = torch.Generator().manual_seed(length)
        shape = (2, length, 3, HEADS, 8)
        projection = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        query, key, value = projection.to(dtype).unbind(2)
        return cls(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        return Inputs(function(self.query), function(self.key), function(self.value))

    def requiring_grad(self) -> "Inputs":
        return self.map(lambda tensor: tensor.detach().requires_grad_())


def attend(function: Attention, inputs: Inputs) -> torch.Tensor:
    return function(inputs.query, inputs.key, inputs.value)


def output_and_gradients(function: Attention, inputs: Inputs) -> dict[str, torch.Tensor]:
    leaves = inputs.requiring_grad()
    output = attend(function, leaves)
    incoming_gradient = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
    output.backward(incoming_gradient.view_as(output))
    gradients = {name: tensor.grad for name, tensor in vars(leaves).items()}
    return {"output": output.detach(), **gradients}


def pytorch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def is_blockwise(output: torch.Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_BlockwiseAttentionBackward"


def blockwise_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    with mock.patch.object(attention_cpu, "MIN_LENGTH", 0):
        output = causal_attention(query, key, value)
    assert is_blockwise(output)
    return output


# --- rows of one document


@pytest.mark.parametrize("length", LENGTHS)
def test_blockwise_output_and_gradients_are_those_of_pytorch(length: int) -> None:
    inputs = Inputs.random(length)
    results = output_and_gradients(blockwise_attention, inputs)
    assert_close(results, output_and_gradients(pytorch_attention, inputs), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_blockwise_attention_is_about_as_accurate_as_pytorch(dtype: torch.dtype) -> None:
    inputs = Inputs.random(200, dtype)
    exact = output_and_gradients(pytorch_attention, inputs.map(torch.Tensor.double))
    results = output_and_gradients(blockwise_attention, inputs)
    pytorch_results = output_and_gradients(pytorch_attention, inputs)

    for name, expected in exact.items():
        error = (results[name] - expected).norm() / expected.norm()
        pytorch_error = (pytorch_results[name] - expected).norm() / expected.norm()
        assert error < 1.5 * pytorch_error + torch.finfo(dtype).eps / 4, name


def test_no_position_sees_a_later_one() -> None:
    inputs = Inputs.random(130)
    changed = inputs.map(torch.clone)
    for tensor in vars(changed).values():
        tensor[:, :, 100:] += 1

    output = attend(blockwise_attention, inputs.requiring_grad())
    changed_output = attend(blockwise_attention, changed.requiring_grad())

    assert torch.equal(output[:, :, :100], changed_output[:, :, :100])
    assert not torch.equal(output[:, :, 100:], changed_output[:, :, 100:])


def test_autocast_rounds_the_inputs_and_not_the_scores() -> None:
    inputs = Inputs.random(200, torch.float32).map(lambda tensor: 2 * tensor)
    expected = attend(blockwise_attention, inputs.map(torch.Tensor.bfloat16).requiring_grad())
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(blockwise_attention, inputs.requiring_grad())
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("dtype", "length", "expected"),
    [
        (torch.float32, attention_cpu.MIN_LENGTH - 1, False),
        (torch.float32, attention_cpu.MIN_LENGTH, True),
        (torch.float32, attention_cpu.MAX_LENGTH + 1, False),
        (torch.bfloat16, 1, True),
        (torch.bfloat16, attention_cpu.MAX_LENGTH + 1, False),
    ],
)
def test_rows_are_computed_in_blocks_if_that_is_faster(
    dtype: torch.dtype, length: int, expected: bool
) -> None:
    inputs = Inputs.random(length, dtype).requiring_grad()
    assert is_blockwise(attend(causal_attention, inputs)) == expected
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(causal_attention, inputs)
    assert is_blockwise(output) == (length <= attention_cpu.MAX_LENGTH)


@torch.no_grad()
def test_rows_are_not_computed_in_blocks_without_gradients() -> None:
    inputs = Inputs.random(attention_cpu.MIN_LENGTH, torch.float32).requiring_grad()
    with mock.patch.object(attention_cpu, "attend_in_blocks", side_effect=AssertionError):
        assert attend(causal_attention, inputs).isfinite().all()


# --- packed rows


def packed_positions(length: int, *borders: int) -> torch.Tensor:
    """Return positions of two rows. In the second, each border is 5 positions later; [2, T]."""
    rows = []
    for shift in (0, 5):
        stops = [*(border + shift for border in borders), length]
        starts = [0, *stops[:-1]]
        documents = zip(starts, stops, strict=True)
        rows.append(torch.cat([torch.arange(stop - start) for start, stop in documents]))
    return torch.stack(rows)


BORDERS = (60, 128, 140)
PACKED = {
    "one document": None,
    "two documents": packed_positions(130, 43),
    "four documents": packed_positions(200, *BORDERS),
}


def transformers_module(key_value_heads: int = HEADS) -> Any:
    """Return the attributes of an attention module of transformers that its functions read."""
    return SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // key_value_heads)


@pytest.fixture
def registered_attention() -> Callable[..., Any]:
    register()
    register()  # as a second model does
    return ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]


@pytest.mark.parametrize("positions", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("heads", [1, HEADS], ids=["grouped heads", "a key for each head"])
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_in_transformers_computes_what_sdpa_computes_with_a_mask(
    registered_attention, positions: torch.Tensor | None, heads: int, rows: int
) -> None:
    documents = Documents() if positions is None else Documents.of(positions[:rows])
    inputs = Inputs.random(130 if positions is None else positions.shape[-1])
    module = transformers_module(heads)

    def with_documents(query, key, value):
        return registered_attention(
            module,
            query[:rows],
            key[:rows, :heads],
            value[:rows, :heads],
            None,
            documents=documents,
            scaling=0.2,
        )[0]

    def with_mask(query, key, value):
        return sdpa_attention_forward(
            module,
            query[:rows],
            key[:rows, :heads],
            value[:rows, :heads],
            documents.mask(),
            scaling=0.2,
        )[0]

    output = attend(with_documents, inputs.requiring_grad())
    assert "_BlockwiseAttentionBackward" in graph_of(output)
    results = output_and_gradients(with_documents, inputs)
    assert_close(results, output_and_gradients(with_mask, inputs), **EXACT)


def graph_of(tensor: torch.Tensor) -> list[str]:
    """Return the names of the operations that made a tensor, from the last, along first inputs."""
    names = []
    function = tensor.grad_fn
    while function is not None:
        names.append(type(function).__name__)
        inputs = function.next_functions
        function = inputs[0][0] if inputs else None
    return names


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    keys_of_blocks = {}
    for rows, queries, keys, _ in Documents.of(packed_positions(200, *BORDERS)).blocks:
        for row in range(rows.start, rows.stop):
            keys_of_blocks[row, queries.start] = (keys.start, keys.stop)

    # Borders at 60, 128 and 140. The first query of a block sees keys back to its document's start.
    first_row = [keys_of_blocks[0, start] for start in (0, 64, 128, 192)]
    assert first_row == [(0, 64), (0, 128), (128, 192), (128, 200)]
    # Borders at 65, 133 and 145.
    second_row = [keys_of_blocks[1, start] for start in (0, 64, 128, 192)]
    assert second_row == [(0, 64), (0, 128), (64, 192), (128, 200)]


def test_borders_have_recurring_shapes_on_a_gpu() -> None:
    positions = packed_positions(200, *BORDERS)
    end = 2 * 200
    expected = [0, 60, 128, 140, 200, 265, 333, 345, end]
    assert Documents.of(positions).borders.tolist() == expected

    borders = Documents.of(positions, on_gpu=True).borders
    assert borders.dtype == torch.int32
    assert borders.tolist() == expected + [end] * (64 - len(expected))


# --- rows that are left to transformers


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dropout": 0.1}, id="dropout"),
        pytest.param(
            {"position_bias": torch.zeros(1, 1, 20, 20, dtype=torch.float64)}, id="position bias"
        ),
    ],
)
def test_packed_rows_with_special_options_are_left_to_transformers(
    registered_attention, options: dict[str, Any]
) -> None:
    inputs = Inputs.random(20).requiring_grad()
    documents = Documents.of(packed_positions(20, 7))

    def output_of(function: Callable[..., Any], mask: torch.Tensor | None, **more: Any) -> Any:
        torch.manual_seed(0)
        module = transformers_module()
        arguments = (inputs.query, inputs.key, inputs.value)
        return function(module, *arguments, mask, **more, **options)[0]

    output = output_of(registered_attention, None, documents=documents)
    assert torch.equal(output, output_of(sdpa_attention_forward, documents.mask()))


@pytest.mark.parametrize(
    ("queries", "mask"),
    [
        pytest.param(slice(None), None, id="no mask"),
        pytest.param(slice(None), Documents.of(packed_positions(20, 7)).mask(), id="a mask"),
        pytest.param(slice(-1, None), None, id="one query, with earlier keys from a cache"),
    ],
)
def test_rows_without_documents_are_left_to_transformers(
    registered_attention, queries: slice, mask: torch.Tensor | None
) -> None:
    inputs = Inputs.random(20).requiring_grad()
    arguments = (inputs.query[:, :, queries], inputs.key, inputs.value, mask)
    output, _ = registered_attention(transformers_module(), *arguments)
    expected, _ = sdpa_attention_forward(transformers_module(), *arguments)
    assert torch.equal(output, expected)


# --- the kernel for packed rows on a GPU


def correct_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_q: torch.Tensor,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> torch.Tensor:
    """Compute what ``torch.nn.attention.varlen.varlen_attn`` documents; [B * T, H, D].

    ``window_size`` is (-1, 0) for causal attention, and (-1, -1) for that of all to all.
    """
    assert options.keys() <= inspect.signature(varlen_attn).parameters.keys()
    places = torch.arange(len(query))
    documents = torch.searchsorted(cu_seq_q.long(), places, right=True)
    mask = documents[:, None] == documents
    if window_size == (-1, 0):
        mask &= places <= places[:, None]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def kernel_without_borders(*arguments: Any, cu_seq_q: torch.Tensor, **options: Any) -> torch.Tensor:
    return correct_kernel(*arguments, cu_seq_q=cu_seq_q[:1], **options)


def kernel_of_an_older_torch(*arguments: Any, is_causal: bool) -> torch.Tensor:
    raise AssertionError("its arguments have other names")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (correct_kernel, True),
        (kernel_without_borders, False),
        (kernel_of_an_older_torch, False),
    ],
)
def test_a_trial_tells_whether_the_kernel_is_correct(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, expected: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    is_correct = attention._varlen_is_correct(torch.device("cpu"), dtype)
    assert is_correct == expected


@pytest.mark.parametrize("is_correct", [True, False])
def test_only_a_correct_kernel_is_used_and_only_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, is_correct: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention, "_varlen_is_correct", lambda device, dtype: is_correct)
    can_use_varlen = attention.can_use_varlen.__wrapped__  # without its cache
    assert can_use_varlen(torch.bfloat16) == is_correct
    assert not can_use_varlen(torch.float32)
