"""The loss of a linear head in bounded memory computes what torch computes from all logits."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from llmtrain.interfaces.batches import IGNORED, padded_size
from llmtrain.models import loss
from llmtrain.models.loss import linear_nll, matmul_dtype, target_positions_of

WIDTH = 6
VOCABULARY = 78
CHUNK = 7  # positions of a chunk, in these tests
INCOMING_GRADIENT = 0.37
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # up to the order of float64 sums


def change_limits(monkeypatch: pytest.MonkeyPatch, chunk: int, tile: int) -> None:
    monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setitem(loss.TILE_LOGITS, "cpu", tile)


@pytest.fixture(autouse=True, params=["one chunk", "as compiled", "chunks"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the loss be computed in one of its ways: all tests run with each of them.

    What a GPU compiles runs uncompiled here.
    """
    chunk = CHUNK * VOCABULARY if request.param == "chunks" else 10**9
    change_limits(monkeypatch, chunk=chunk, tile=3 * VOCABULARY)
    if request.param == "as compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return request.param


class Example(NamedTuple):
    """Arguments of the loss.

    Attributes:
        hidden: hidden states [B, T, C].
        weight: of the head [V, C].
        targets: tokens or IGNORED [B, T].
        bias: of the head [V].
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None

    @property
    def differentiable(self) -> dict[str, torch.Tensor]:
        tensors = {"hidden": self.hidden, "weight": self.weight}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}

    def to(self, dtype: torch.dtype) -> "Example":
        """Return the same numbers in another dtype."""
        tensors = self.differentiable.items()
        copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in tensors}
        return self._replace(**copies).requiring_grad()

    def requiring_grad(self) -> "Example":
        for tensor in self.differentiable.values():
            tensor.requires_grad_()
        return self


def make_example(
    vocabulary: int = VOCABULARY,
    *,
    bias: bool = False,
    ignored: float = 0.3,
    rows: int = 3,
    width: int = WIDTH,
) -> Example:
    """Return confident and doubtful predictions, in float64, of every token of the vocabulary."""
    generator = torch.Generator().manual_seed(vocabulary)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    targets = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)])
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    example = Example(
        hidden=2 * normal(*targets.shape, width),
        weight=normal(vocabulary, width),
        targets=targets,
        bias=normal(vocabulary) if bias else None,
    )
    return example.requiring_grad()


def torch_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute the loss with torch from all logits, as a model of transformers does."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def loss_and_gradients(
    function: Callable[..., torch.Tensor], example: Example, *options: Any
) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients that it causes, for an incoming gradient other than 1."""
    for tensor in example.differentiable.values():
        tensor.grad = None
    nll = function(*example, *options)
    nll.backward(nll.new_tensor(INCOMING_GRADIENT))

    tensors = example.differentiable.items()
    gradients = {name: tensor.grad for name, tensor in tensors if tensor.grad is not None}
    return {"loss": nll.detach(), **gradients}


def relative_errors(
    results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the error of each result, relative to its norm."""
    assert results.keys() == exact.keys()
    return {
        name: float((result.double() - exact[name]).norm() / exact[name].norm())
        for name, result in results.items()
    }


def check_as_accurate(errors: dict[str, float], errors_of_torch: dict[str, float]) -> None:
    """Check that the gradients are about as accurate as torch's.

    The loss is a single number, in which roundings may cancel, so it has a limit of its own.
    """
    assert errors["loss"] < 5e-4
    for name in errors.keys() - {"loss"}:
        assert errors[name] < 1.1 * errors_of_torch[name], name


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class RecordedOperations(TorchDispatchMode):
    """Records the operations of torch that run inside.

    Attributes:
        largest: the number of elements of the largest result.
        product_dtypes: the dtype of each matrix product.
        operations: the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.product_dtypes: list[torch.dtype] = []
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
        self.operations.add(func.overloadpacket)
        if func.overloadpacket in _PRODUCTS:
            self.product_dtypes.append(args[-1].dtype)
        return results


with_and_without_softcap = pytest.mark.parametrize(
    "softcap", [pytest.param(None, id="no softcap"), pytest.param(1.5, id="softcap")]
)
with_and_without_bias = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])


# --- the loss and its gradients are torch's


@with_and_without_softcap
@with_and_without_bias
@pytest.mark.parametrize("vocabulary", [13, VOCABULARY])
def test_loss_and_gradients_are_those_of_torch(
    vocabulary: int, bias: bool, softcap: float | None
) -> None:
    example = make_example(vocabulary, bias=bias)
    expected = loss_and_gradients(torch_nll, example, softcap)

    results = loss_and_gradients(linear_nll, example, softcap)
    assert_close(results, expected, **EXACT)

    float32_example = example.to(torch.float32)
    float32_results = loss_and_gradients(linear_nll, float32_example, softcap)
    assert_close(float32_results, loss_and_gradients(torch_nll, float32_example, softcap))
    assert max(relative_errors(float32_results, expected).values()) < 1e-6


def test_a_tied_head_gets_the_gradients_of_both_uses() -> None:
    ids = torch.randint(VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(0))
    targets = torch.roll(ids, -1, 1)
    embedding = make_example().weight

    gradients = {}
    for nll in (torch_nll, linear_nll):
        embedding.grad = None
        hidden = torch.tanh(F.embedding(ids, embedding))
        nll(hidden, embedding, targets).backward()
        gradients[nll] = embedding.grad
    assert_close(gradients[linear_nll], gradients[torch_nll], **EXACT)

    embedding.grad = None
    linear_nll(hidden.detach(), embedding, targets).backward()
    assert not torch.allclose(embedding.grad, gradients[linear_nll]), "the gradient of the head"


@with_and_without_softcap
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_a_target_the_gradients_are_zero(softcap: float | None, dtype: torch.dtype) -> None:
    example = make_example(bias=True, ignored=1.1).to(dtype)

    results = loss_and_gradients(linear_nll, example, softcap)

    assert results.keys() == {"loss", "hidden", "weight", "bias"}
    assert results["loss"] == 0
    for name, tensor in example.differentiable.items():
        assert_close(results[name], torch.zeros_like(tensor), rtol=0, atol=0)


def test_the_bits_are_the_same_each_time() -> None:
    example = make_example(bias=True).to(torch.float32)
    first = loss_and_gradients(linear_nll, example, 1.5)
    second = loss_and_gradients(linear_nll, example, 1.5)
    assert_close(second, first, rtol=0, atol=0)


def test_a_second_backward_pass_is_refused() -> None:
    nll = linear_nll(*make_example(bias=True))
    nll.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|one backward pass"):
        nll.backward()


@with_and_without_softcap
def test_each_target_may_have_its_own_gradient(softcap: float | None) -> None:
    """Preference losses need that."""
    example = make_example(bias=True)
    weights = torch.linspace(-1, 2, example.targets.numel(), dtype=torch.float64)

    def weighted(*arguments: Any) -> torch.Tensor:
        hidden, weight, targets, bias = arguments
        nll = linear_nll(hidden, weight, targets, bias, softcap, per_target=True)
        return (nll * weights).sum()

    def weighted_by_torch(*arguments: Any) -> torch.Tensor:
        hidden, weight, targets, bias = arguments
        logits = F.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        nll = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return (nll * weights).sum()

    results = loss_and_gradients(weighted, example)
    assert_close(results, loss_and_gradients(weighted_by_torch, example), **EXACT)


def test_recomputation_changes_no_bit() -> None:
    example = make_example(bias=True)
    expected = loss_and_gradients(linear_nll, example)
    recomputed = loss_and_gradients(
        lambda *tensors: checkpoint(linear_nll, *tensors, use_reentrant=False), example
    )
    assert_close(recomputed, expected, rtol=0, atol=0)


# --- positions without a target


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@with_and_without_softcap
def test_positions_without_a_target_need_not_meet_the_head(
    softcap: float | None, padded: bool
) -> None:
    example = make_example(bias=True)
    expected = loss_and_gradients(linear_nll, example, softcap)

    labels = F.pad(example.targets, (1, 0))
    positions = target_positions_of(labels, padded)
    count = int((example.targets != IGNORED).sum())
    assert len(positions) == (padded_size(count) if padded else count)
    assert len(positions) < example.targets.numel()

    results = loss_and_gradients(linear_nll, example, softcap, positions)
    assert_close(results, expected, **EXACT)


def test_ignored_positions_never_meet_the_head() -> None:
    example = make_example()
    expected = loss_and_gradients(torch_nll, example)
    is_ignored = example.targets == IGNORED
    with torch.no_grad():
        example.hidden[is_ignored] = torch.nan

    positions = target_positions_of(F.pad(example.targets, (1, 0)))
    results = loss_and_gradients(linear_nll, example, None, positions)

    assert_close(results, expected, **EXACT)
    assert not results["hidden"][is_ignored].any()


# --- lower precision is as accurate as with all logits


def autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run a function with products in bfloat16. Backward runs outside, as in a training loop."""
    return torch.autocast("cpu", torch.bfloat16)(function)


def many_tokens() -> Example:
    """Return an example with sums over many tokens, whose roundings would show."""
    return make_example(640, bias=True, rows=1, width=64)


@pytest.mark.parametrize(
    "softcap", [pytest.param(None, id="no softcap"), pytest.param(20.0, id="softcap")]
)
def test_autocast_is_as_accurate_as_with_all_logits(softcap: float | None) -> None:
    example = many_tokens()
    exact = loss_and_gradients(torch_nll, example, softcap)
    float32_example = example.to(torch.float32)
    results_of_torch = loss_and_gradients(autocast(torch_nll), float32_example, softcap)
    errors_of_torch = relative_errors(results_of_torch, exact)

    with RecordedOperations() as recorded:
        results = loss_and_gradients(autocast(linear_nll), float32_example, softcap)

    assert {tensor.dtype for tensor in results.values()} == {torch.float32}
    assert set(recorded.product_dtypes) == {torch.bfloat16}
    check_as_accurate(relative_errors(results, exact), errors_of_torch)
    assert min(errors_of_torch[name] for name in ("hidden", "weight", "bias")) > 1e-3, (
        "these are the errors of bfloat16"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_with_all_logits(dtype: torch.dtype) -> None:
    example = many_tokens().to(dtype)
    exact = loss_and_gradients(torch_nll, example.to(torch.float64))
    errors_of_torch = relative_errors(loss_and_gradients(torch_nll, example), exact)

    results = loss_and_gradients(linear_nll, example)

    dtypes = {name: result.dtype for name, result in results.items()}
    assert dtypes == {"loss": torch.float32, "hidden": dtype, "weight": dtype, "bias": dtype}
    check_as_accurate(relative_errors(results, exact), errors_of_torch)


def test_the_loss_scale_of_fp16_is_applied_before_gradients_are_rounded() -> None:
    loss_scale = 2**14
    weight = torch.zeros(17, WIDTH)
    # The last token has a probability of 2e-9, which is 0 in half precision.
    weight[-1] = -18 / WIDTH
    example = Example(
        hidden=torch.ones(1, 4, WIDTH),
        weight=weight,
        targets=torch.zeros(1, 4, dtype=torch.int64),
        bias=None,
    ).requiring_grad()
    exact = example.to(torch.float64)
    torch_nll(*exact).backward()

    with torch.autocast("cpu", torch.float16):
        nll = linear_nll(*example)
    (nll * loss_scale).backward()

    gradient = example.weight.grad.double() / loss_scale
    assert_close(gradient, exact.weight.grad, rtol=1e-2, atol=0)
    assert gradient[-1].all()


# --- how many logits are in memory, and how much is computed


@pytest.mark.parametrize("method", ["chunks"], indirect=True)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_there_are_never_more_logits_than_those_of_a_chunk(precision: str, method: str) -> None:
    example = make_example(bias=True).to(torch.float32)
    logits = example.targets.numel() * VOCABULARY

    largest = {}
    for nll in (torch_nll, linear_nll):
        function = autocast(nll) if precision == "autocast" else nll
        with RecordedOperations() as recorded:
            function(*example, 1.5).backward()
        largest[nll] = recorded.largest

    assert largest[torch_nll] == logits
    assert largest[linear_nll] <= max(CHUNK * VOCABULARY, example.hidden.numel())


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_a_frozen_tensor_gets_no_gradient_and_costs_no_product(trained: str, method: str) -> None:
    example = make_example(bias=True)
    expected = loss_and_gradients(torch_nll, example)
    for name, tensor in example.differentiable.items():
        tensor.requires_grad_(name == trained)

    with RecordedOperations() as recorded:
        results = loss_and_gradients(linear_nll, example)

    assert results.keys() == {"loss", trained}
    assert_close(results[trained], expected[trained], **EXACT)
    chunks = math.ceil(example.targets.numel() / CHUNK) if method == "chunks" else 1
    gradient_products = 0 if trained == "bias" else chunks  # that of the bias is a sum
    assert len(recorded.product_dtypes) == chunks + gradient_products


def test_evaluation_computes_no_gradient(method: str) -> None:
    example = make_example()
    expected = loss_and_gradients(linear_nll, example)

    with torch.no_grad(), RecordedOperations() as recorded:
        loss = linear_nll(*example)

    assert not loss.requires_grad
    assert torch.equal(loss, expected["loss"])
    chunks = math.ceil(example.targets.numel() / CHUNK) if method == "chunks" else 1
    assert len(recorded.product_dtypes) == chunks
    assert torch.ops.aten.scatter_add_ not in recorded.operations


# --- heads on a GPU


BFLOAT16_ON_GPU: Any = SimpleNamespace(is_cuda=True, element_size=lambda: 2, dtype=torch.bfloat16)


@with_and_without_softcap
@with_and_without_bias
def test_a_padded_head_has_the_same_loss_and_gradients(
    bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = make_example(501, bias=bias)
    cast_and_padded = loss._cast_and_padded

    def padded(values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return cast_and_padded(values, BFLOAT16_ON_GPU).to(hidden.dtype)

    monkeypatch.setattr(loss, "_cast_and_padded", padded)
    rounded = example._replace(
        **{name: t.detach().bfloat16().double() for name, t in example.differentiable.items()}
    ).requiring_grad()
    expected = loss_and_gradients(torch_nll, rounded, softcap)
    results = loss_and_gradients(linear_nll, rounded, softcap)
    assert_close(results, expected, **EXACT)


def test_a_gpu_pads_a_head_whose_rows_of_logits_are_not_aligned() -> None:
    padded_sizes = {50_257: 50_304, 50_304: 50_304, 50_264: 50_264, 257: 384}
    for vocabulary, rows in padded_sizes.items():
        weight = torch.ones(vocabulary, 2)
        padded = loss._cast_and_padded(weight, BFLOAT16_ON_GPU)
        assert padded.shape == (rows, 2)
        assert padded.float().sum() == 2 * vocabulary
        assert loss._cast_and_padded(weight, torch.zeros(1)) is weight


# --- the dtype of products


def test_autocast_leaves_float64_as_it_is() -> None:
    cpu = torch.device("cpu")
    assert matmul_dtype(cpu, torch.float32) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul_dtype(cpu, torch.float32) == torch.bfloat16
        assert matmul_dtype(cpu, torch.float64) == torch.float64
