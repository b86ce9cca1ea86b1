"""With --bitwise, sums have the same bits on any number of ranks."""

import copy
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from llmtrain.data.config import DataConfig
from llmtrain.data.loader import eval_loader
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel import bitwise
from llmtrain.parallel.bitwise import BitwiseEngine, tree_sum
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training.layout import Layout
from tests.engines import split


def random_terms(count: int) -> list[torch.Tensor]:
    """Return tensors of very different sizes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-3, 3, count).tolist()
    return [torch.randn(1000, generator=generator) * 10.0**exponent for exponent in exponents]


# --- the sum as a balanced tree


def sum_by_recursion(terms: list[torch.Tensor]) -> torch.Tensor:
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return sum_by_recursion(terms[:half]) + sum_by_recursion(terms[half:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_terms_are_added_as_a_balanced_tree(count: int) -> None:
    terms = random_terms(count)
    copies = (term.clone() for term in terms)

    assert torch.equal(tree_sum(copies, count), sum_by_recursion(terms))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_few_terms_are_in_memory_at_a_time(count: int) -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def make_terms() -> Iterator[torch.Tensor]:
        for _ in range(count):
            in_memory = sum(reference() is not None for reference in references)
            assert in_memory < count.bit_length()
            term = torch.ones(1)
            references.append(weakref.ref(term))
            yield term
            del term

    assert tree_sum(make_terms(), count).item() == count
    assert len(references) == count


def test_a_tree_sum_has_the_bits_of_the_sum_of_two_halves_and_a_running_sum_has_not() -> None:
    terms = random_terms(16)

    def total(part: list[torch.Tensor]) -> torch.Tensor:
        return tree_sum((term.clone() for term in part), len(part))

    assert torch.equal(total(terms), total(terms[:8]) + total(terms[8:]))
    assert not torch.equal(total(terms), sum(terms[1:], terms[0]))


def test_the_number_of_terms_must_be_a_power_of_two() -> None:
    with pytest.raises(AssertionError, match="no power of two"):
        tree_sum(iter(random_terms(3)), 3)


# --- gradients


def micro_batches() -> list[Batch]:
    ids = torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(1))
    return split({"input_ids": ids, "labels": ids}, micro_batch=2)


def new_gpt(layers: int) -> GPT:
    return GPT(GPTConfig(n_layer=layers, n_head=2, n_embd=16, block_size=8), 30)


def test_the_loss_of_weights_in_bfloat16_is_not_rounded(accelerator: Accelerator) -> None:
    model = new_gpt(layers=1).bfloat16()
    batches = micro_batches()
    engine = BitwiseEngine(ranks_of(accelerator), accelerator.prepare(model))
    expected = sum(engine.loss(batch).loss.item() for batch in batches)

    sums = engine.forward_backward(batches, engine.count(batches))

    assert sums.loss.item() == pytest.approx(expected, rel=1e-6)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.bfloat16


def test_loss_and_gradient_are_those_without_bitwise_except_for_rounding(
    accelerator: Accelerator,
) -> None:
    model = new_gpt(layers=2).double()
    ranks = ranks_of(accelerator)
    batches = micro_batches()
    ordinary_engine = ReplicatedEngine(ranks, accelerator.prepare(copy.deepcopy(model)))
    bitwise_engine = BitwiseEngine(ranks, accelerator.prepare(model))

    totals = ordinary_engine.count(batches)
    expected = ordinary_engine.forward_backward(batches, totals)
    sums = bitwise_engine.forward_backward(batches, totals)

    assert float(sums.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    expected_gradients = {n: p.grad for n, p in ordinary_engine.model.named_parameters()}
    for name, parameter in bitwise_engine.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], rtol=1e-10, atol=1e-13)


# --- evaluations


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_micro_batches_of_an_evaluation_do_not_depend_on_the_number_of_ranks(
    processes: int,
) -> None:
    rows = TokenRows([ArrayRows({"input_ids": np.array([[1, 2, 3]] * 30)})])
    loader = eval_loader(rows, processes, 8, source_rows=[21, 9], bitwise=True)

    rows_by_source: dict[int, list[list[int]]] = {0: [], 1: []}
    for batch in loader:
        # Accelerate gives each rank a slice of the batch. A slice without rows adds zero.
        for rows_of_rank in batch.rows.view(processes, -1).tolist():
            if max(rows_of_rank) >= 0:
                rows_by_source[batch.source].append(rows_of_rank)

    no_row = -1
    assert rows_by_source == {
        0: [[*range(8)], [*range(8, 16)], [*range(16, 21), *[no_row] * 3]],
        1: [[*range(21, 29)], [29, *[no_row] * 7]],
    }


class SimulatedRanks:
    """Threads that stand for ranks, and exchange tensors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.sent: dict[int, torch.Tensor] = {}
        self.thread = threading.local()

    def swap_with(self, peer: int, tensor: torch.Tensor) -> torch.Tensor:
        self.sent[self.thread.rank] = tensor.clone()
        self.barrier.wait()
        received = self.sent[peer]
        self.barrier.wait()
        return received

    def sum_of_micro_batches(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """Call the method of the engine, as a rank that has these values of its micro-batches."""
        self.thread.rank = rank
        ranks = SimpleNamespace(rank=rank, world_size=self.count)
        engine: Any = SimpleNamespace(ranks=ranks)
        return BitwiseEngine.sum_of_micro_batches(engine, values)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_sums_of_an_evaluation_have_the_same_bits_on_any_number_of_ranks(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = torch.stack(random_terms(13))
    on_one_rank = SimulatedRanks(1).sum_of_micro_batches(0, terms)
    in_float64 = terms.double().sum(0)
    torch.testing.assert_close(on_one_rank.double(), in_float64, rtol=0, atol=1e-3)

    ranks = SimulatedRanks(count)
    monkeypatch.setattr(bitwise, "swap_with", ranks.swap_with)
    padding = terms.new_zeros(-len(terms) % count, terms.shape[1])
    padded = torch.cat([terms, padding])
    values_of_ranks = [padded[rank::count] for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        totals = [*pool.map(ranks.sum_of_micro_batches, range(count), values_of_ranks)]

    assert len(totals) == count
    for total in totals:
        assert torch.equal(total, on_one_rank)


# --- layouts


@pytest.mark.parametrize(
    ("rows", "micro_batch", "processes", "message"),
    [
        (24, 2, 2, "powers of two, and a step has 2 processes and 12 micro-batches of 2 rows"),
        (24, 4, 3, "powers of two, and a step has 3 processes"),
        (8, 4, 4, "set it to 2 or less"),
    ],
)
def test_a_layout_that_a_tree_cannot_add_is_refused_only_with_bitwise(
    rows: int, micro_batch: int, processes: int, message: str
) -> None:
    config = DataConfig(global_batch_size=rows, per_device_train_batch_size=micro_batch)
    Layout.of(config, processes)

    with pytest.raises(UserError, match=message):
        Layout.of(config, processes, bitwise=True)
