"""The loss that never holds all logits, beside the one that does."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from llmtrain.interfaces.batches import IGNORED
from llmtrain.models import nll_kernels
from llmtrain.models.loss import linear_nll, summed_nll, target_positions_of
from llmtrain.padded_sizes import padded_size

ROWS = 16  # of the head in a block, in these tests
WIDTH = 6
VOCABULARIES = [
    ROWS - 3,
    ROWS,
    ROWS + 1,
    5 * ROWS - 2,
]  # fewer than a block, one block, one row more, many
INCOMING = 0.37


def limit(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    limits = nll_kernels.LOGIT_LIMITS
    monkeypatch.setitem(limits, "cpu", limits["cpu"]._replace(**changed))


@pytest.fixture(autouse=True, params=["in place", "in place, a GPU's", "blockwise"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the ways to compute the loss, the one that the test takes."""
    in_place = -1 if request.param == "blockwise" else 10**9
    limit(monkeypatch, block=1, in_place=in_place, tile=7)
    if request.param == "in place, a GPU's":
        limit(monkeypatch, tile=10**9)
        monkeypatch.setattr(nll_kernels, "_nll_and_gradient", nll_kernels._FusedKernel())
    monkeypatch.setattr(nll_kernels, "_BLOCK_MULTIPLE", ROWS)
    return str(request.param).partition(",")[0]


class Case(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers, as leaves of another dtype."""
        hidden, weight, bias = (
            None if x is None else x.detach().to(dtype, copy=True) for x in self._floats()
        )
        return case_of(hidden, weight, self.targets, bias)

    def _floats(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.hidden, self.weight, self.bias


def case_of(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> Case:
    for tensor in (hidden, weight, bias):
        if tensor is not None:
            tensor.requires_grad_()
    return Case(hidden, weight, targets, bias)


def case(
    vocabulary: int = VOCABULARIES[-1],
    bias: bool = False,
    ignored: float = 0.3,
    rows: int = 3,
    width: int = WIDTH,
) -> Case:
    """Confident and doubtful predictions, in float64; each row of the head is somewhere the target."""
    generator = torch.Generator().manual_seed(vocabulary)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    targets = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)])
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    hidden, weight = 2 * normal(*targets.shape, width), normal(vocabulary, width)
    return case_of(hidden, weight, targets, normal(vocabulary) if bias else None)


def whole_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return summed_nll(
        logits if softcap is None else softcap * torch.tanh(logits / softcap), targets
    )


def autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same with its products in bfloat16; backward is run outside, as loops do."""
    return torch.autocast("cpu", torch.bfloat16)(function)


def outcome(
    function: Callable[..., torch.Tensor], case: Case, *more: Any
) -> list[torch.Tensor | None]:
    """The loss and the gradients of hidden, weight and bias, for an incoming gradient that is not one."""
    for tensor in (case.hidden, case.weight, case.bias):
        if tensor is not None:
            tensor.grad = None
    nll = function(*case, *more)
    nll.backward(nll.new_tensor(INCOMING))
    return [
        nll.detach(),
        case.hidden.grad,
        case.weight.grad,
        None if case.bias is None else case.bias.grad,
    ]


def distance(found: list[torch.Tensor | None], exact: list[torch.Tensor | None]) -> list[float]:
    """Relative to the norm of each."""
    pairs = [(a, b) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def assert_as_near(ours: list[float], theirs: list[float]) -> None:
    """Of gradients, where many roundings make a norm; the loss is one number, and they may cancel."""
    assert ours[0] < 5e-4
    assert all(a < 1.1 * b for a, b in zip(ours[1:], theirs[1:], strict=True)), (ours, theirs)


class Operations(TorchDispatchMode):
    """Records what is run inside: the largest tensor that comes out, and the dtypes that matrix products take."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products, self.packets = 0, list[torch.dtype](), set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        sizes = [
            result.numel() for result in tree_leaves(results) if isinstance(result, torch.Tensor)
        ]
        self.largest = max([self.largest, *sizes])
        self.packets.add(func.overloadpacket)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.products.append(args[-1].dtype)
        return results


@pytest.mark.parametrize("way", ["in place", "in place, a GPU's"], indirect=True)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_that_is_filled_up_has_the_same_loss_and_gradients(
    bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = case(501, bias)
    expected = outcome(whole_logits, exact, softcap)
    monkeypatch.setattr(nll_kernels, "_rows_of_products", lambda *_: 512)
    operations = Operations()
    with operations:
        padded = outcome(linear_nll, exact, softcap)
    assert operations.largest % 512 == 0
    torch.testing.assert_close(padded, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(50_257, 50_304), (50_304, 50_304), (50_264, 50_264), (257, 384)]
)
def test_a_head_on_a_gpu_is_filled_up_if_its_rows_of_logits_are_not_aligned(
    vocabulary: int, rows: int
) -> None:
    on_gpu: Any = SimpleNamespace(is_cuda=True, element_size=lambda: 2)
    assert nll_kernels._rows_of_products(on_gpu, vocabulary) == rows
    assert nll_kernels._rows_of_products(torch.zeros(1), vocabulary) == vocabulary


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_loss_and_gradients_are_those_of_the_whole_logits(
    vocabulary: int, bias: bool, softcap: float | None
) -> None:
    exact = case(vocabulary, bias)
    expected = outcome(whole_logits, exact, softcap)
    found = outcome(linear_nll, exact, softcap)
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    single = outcome(linear_nll, exact.to(torch.float32), softcap)
    assert single[0].dtype == torch.float32
    torch.testing.assert_close(single, outcome(whole_logits, exact.to(torch.float32), softcap))
    assert max(distance(single, expected)) < 1e-6


@pytest.mark.parametrize("way", ["in place", "blockwise"], indirect=True)
def test_only_few_logits_are_held(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = case()
    limit(monkeypatch, in_place=some.targets.numel() * len(some.weight) - (way == "blockwise"))
    with Operations() as operations:
        linear_nll(*some)
    assert len(operations.products) == (1 if way == "in place" else -(-VOCABULARIES[-1] // ROWS))


def test_as_many_rows_of_the_head_at_a_time_as_make_a_block_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, block=10 * 4 * ROWS)
    tokens = {count: torch.empty(count, 1, dtype=torch.int8) for count in (0, 1, 10, 17, 10**6)}
    sizes = {
        count: [s.stop - s.start for s in nll_kernels._blocks(6 * ROWS + 1, some)]
        for count, some in tokens.items()
    }
    assert sizes[0] == sizes[1] == [6 * ROWS + 1]
    assert sizes[10] == [4 * ROWS, 2 * ROWS + 1]
    assert sizes[17] == [2 * ROWS] * 3 + [1]  # never more than a block
    assert sizes[10**6] == [ROWS] * 6 + [1]  # nor less than some rows
    found, expected = (outcome(function, case()) for function in (linear_nll, whole_logits))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_ignored_never_meets_the_head() -> None:
    some = case()
    ignored = some.targets == IGNORED
    expected = outcome(whole_logits, some)
    with torch.no_grad():
        some.hidden[ignored] = torch.nan
    positions = target_positions_of(F.pad(some.targets, (1, 0)))
    found = outcome(lambda *arguments: linear_nll(*arguments, target_positions=positions), some)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert float(found[1][ignored].abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_without_a_target_there_are_gradients_and_they_are_zero(
    softcap: float | None, dtype: torch.dtype
) -> None:
    none = case(bias=True, ignored=1.1).to(dtype)
    for found, like in zip(
        outcome(linear_nll, none, softcap), [None, *none._floats()], strict=True
    ):
        assert found is not None
        assert float(found.abs().max()) == 0
        assert like is None or (found.shape, found.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_costs_none(trained: str, way: str) -> None:
    every = case(bias=True)
    expected = dict(
        zip(("loss", "hidden", "weight", "bias"), outcome(whole_logits, every), strict=True)
    )
    for name in ("hidden", "weight", "bias"):
        getattr(every, name).requires_grad_(name == trained).grad = None
    with Operations() as operations:
        linear_nll(*every).backward(torch.tensor(INCOMING, dtype=torch.float64))
    torch.testing.assert_close(
        getattr(every, trained).grad, expected[trained], rtol=1e-12, atol=1e-12
    )
    assert all(
        getattr(every, name).grad is None
        for name in ("hidden", "weight", "bias")
        if name != trained
    )
    blocks = -(-VOCABULARIES[-1] // ROWS)
    logits = 1 if way == "in place" else 2 * blocks  # twice in blocks
    assert len(operations.products) == logits + (trained != "bias") * (
        1 if way == "in place" else blocks
    )


def test_a_tied_head_gets_both_gradients() -> None:
    ids = torch.randint(VOCABULARIES[-1], (3, 11), generator=torch.Generator().manual_seed(0))
    targets = torch.roll(ids, -1, 1)
    embedding = case().weight
    gradients = []
    for function in (whole_logits, linear_nll):
        embedding.grad = None
        function(torch.tanh(F.embedding(ids, embedding)), embedding, targets).backward()
        gradients.append(embedding.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    head_alone = outcome(
        linear_nll, case_of(F.embedding(ids, embedding).detach().tanh(), embedding, targets, None)
    )[2]
    assert not torch.allclose(gradients[1], head_alone / INCOMING)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_autocast_is_as_near_to_the_truth_as_with_the_whole_logits(softcap: float | None) -> None:
    exact = case(
        40 * ROWS, bias=True, rows=1, width=64
    )  # sums over many blocks, where their rounding would show
    expected = outcome(whole_logits, exact, softcap)
    single = exact.to(torch.float32)
    plain = distance(outcome(autocast(whole_logits), single, softcap), expected)
    with Operations() as operations:
        found = outcome(autocast(linear_nll), single, softcap)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert set(operations.products) == {torch.bfloat16}
    assert_as_near(distance(found, expected), plain)
    assert min(plain[1:]) > 1e-3  # it was bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_as_near_to_the_truth_as_with_the_whole_logits(
    dtype: torch.dtype,
) -> None:
    half = case(40 * ROWS, bias=True, rows=1, width=64).to(dtype)
    expected = outcome(whole_logits, half.to(torch.float64))
    found = outcome(linear_nll, half)
    assert [tensor.dtype for tensor in found] == [torch.float32, dtype, dtype, dtype]
    assert_as_near(distance(found, expected), distance(outcome(whole_logits, half), expected))


def test_the_loss_scale_of_fp16_comes_in_before_gradients_are_rounded() -> None:
    hidden = torch.ones(1, 4, WIDTH)
    weight = torch.zeros(ROWS + 1, WIDTH)
    weight[-1] = -18 / WIDTH  # a probability of 2e-9, of which half precision makes zero
    small = case_of(hidden, weight, torch.zeros(1, 4, dtype=torch.int64), None)
    exact = small.to(torch.float64)
    whole_logits(*exact).backward()
    with torch.autocast("cpu", torch.float16):
        nll = linear_nll(*small)
    (nll * 2**14).backward()
    torch.testing.assert_close(
        small.weight.grad.double() / 2**14, exact.weight.grad, rtol=1e-2, atol=0
    )
    assert float(small.weight.grad[-1].abs().min()) > 0


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_gradients_are_those_of_finite_differences(softcap: float | None) -> None:
    hidden, weight, targets, bias = case(ROWS + 1, bias=True, rows=1)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_nll(h, w, targets, b, softcap), (hidden, weight, bias)
    )


def test_evaluation_does_no_gradient_work(way: str) -> None:
    some = case()
    expected = outcome(linear_nll, some)[0]
    with torch.no_grad(), Operations() as operations:
        found = linear_nll(*some)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    assert len(operations.products) == (1 if way == "in place" else -(-VOCABULARIES[-1] // ROWS))
    assert torch.ops.aten.scatter_add_ not in operations.packets


def test_the_same_bits_each_time() -> None:
    single = case(bias=True).to(torch.float32)
    first = [tensor.clone() for tensor in outcome(linear_nll, single, 1.5)]
    assert all(
        torch.equal(a, b) for a, b in zip(first, outcome(linear_nll, single, 1.5), strict=True)
    )


def test_backward_can_be_repeated_and_recomputed() -> None:
    some = case(bias=True)
    once = outcome(linear_nll, some)
    recomputed = outcome(
        lambda *tensors: checkpoint(linear_nll, *tensors, use_reentrant=False), some
    )
    assert all(torch.equal(a, b) for a, b in zip(once, recomputed, strict=True))
    some.weight.grad = None
    nll = linear_nll(*some)
    for _ in range(2):
        nll.backward(nll.new_tensor(INCOMING), retain_graph=True)
    torch.testing.assert_close(some.weight.grad, 2 * once[2])


@pytest.mark.parametrize("way", ["blockwise"], indirect=True)
@pytest.mark.parametrize(
    "wrapper", [lambda function: function, autocast], ids=["float32", "autocast"]
)
def test_all_logits_never_exist(wrapper: Callable[..., Any]) -> None:
    some = case(14 * ROWS, bias=True).to(torch.float32)
    logits = some.targets.numel() * len(some.weight)
    largest = {}
    for function in (linear_nll, whole_logits):
        with Operations() as forward:
            nll = wrapper(function)(*some, 1.5)
        with Operations() as backward:
            nll.backward()
        largest[function] = forward.largest, backward.largest
    assert min(largest[whole_logits]) == logits  # what is not there can be seen
    assert max(largest[linear_nll]) <= some.targets.numel() * ROWS < logits / 10


@pytest.mark.parametrize("wrong", [-1, 5 * ROWS - 2])
def test_a_target_that_is_no_token_shows(wrong: int) -> None:
    hidden, weight, targets, _ = case()
    assert linear_nll(hidden, weight, targets.index_fill(1, torch.tensor([3]), wrong)).isnan()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_positions_that_are_not_trained_need_not_meet_the_head(
    softcap: float | None, padded: bool
) -> None:
    some = case(bias=True)
    labels = F.pad(some.targets, (1, 0))
    positions = target_positions_of(labels, padded)
    trained = int((some.targets != IGNORED).sum())
    assert len(positions) == (padded_size(trained) if padded else trained) < some.targets.numel()

    def there(*arguments: Any) -> torch.Tensor:
        return linear_nll(*arguments, target_positions=positions)

    for found, expected in zip(
        outcome(there, some, softcap), outcome(linear_nll, some, softcap), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_numbers_of_positions_recur() -> None:
    sizes = [padded_size(count) for count in range(5000)]
    assert all(count <= size <= max(64, 1.13 * count) for count, size in enumerate(sizes))
    assert len(set(sizes)) < 60


def test_targets_must_be_one_a_position() -> None:
    hidden, weight, targets, _ = case()
    with pytest.raises(IndexError):
        linear_nll(hidden, weight, targets[:, 1:])


@pytest.fixture
def gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that pretends to find a GPU; what it compiles says so."""

    def pretend_to_compile(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *_, **__: f"compiled {function}"

    real_zeros = torch.zeros

    def zeros_on_the_host(*shape: int, device: str) -> torch.Tensor:
        return real_zeros(*shape)

    monkeypatch.setattr(torch, "compile", pretend_to_compile)
    monkeypatch.setattr(torch, "zeros", zeros_on_the_host)
    nll_kernels._compile_for_gpu.cache_clear()
    yield
    nll_kernels._compile_for_gpu.cache_clear()
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("gpu_compiler")
def test_a_deterministic_run_has_no_compiled_kernel_though_an_earlier_run_compiled_one() -> None:
    for _ in range(2):
        torch.use_deterministic_algorithms(False)
        assert nll_kernels._compiled_kernel() is not None
        torch.use_deterministic_algorithms(True)
        assert nll_kernels._compiled_kernel() is None
