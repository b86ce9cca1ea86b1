import copy
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from llmtrain.data.config import DataConfig
from llmtrain.data.loader import eval_loader
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel import bitwise
from llmtrain.parallel.bitwise import BitwiseEngine, tree_sum
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.layout import Layout
from tests.engines import split


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1000, generator=generator) * 10.0**i
        for i in torch.linspace(-3, 3, count).tolist()
    ]


def by_recursion(terms: list[torch.Tensor]) -> torch.Tensor:
    half = len(terms) // 2
    return by_recursion(terms[:half]) + by_recursion(terms[half:]) if half else terms[0]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_terms_are_added_as_a_balanced_tree_with_few_of_them_held(count: int) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def made() -> Iterator[torch.Tensor]:
        for leaf in leaves(count):
            assert sum(one() is not None for one in held) < count.bit_length()
            term = leaf.clone()
            held.append(weakref.ref(term))
            yield term
            del term

    assert torch.equal(tree_sum(made(), count), by_recursion(leaves(count)))
    assert len(held) == count


def test_halves_added_apart_are_the_whole_bit_for_bit_and_a_running_sum_is_not() -> None:
    def total(terms: list[torch.Tensor]) -> torch.Tensor:
        return tree_sum((term.clone() for term in terms), len(terms))

    terms = leaves(16)
    assert torch.equal(total(terms), total(terms[:8]) + total(terms[8:]))
    assert not torch.equal(total(terms), sum(terms[1:], terms[0]))


def test_a_number_of_terms_that_is_no_power_of_two_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="no power of two"):
        tree_sum(iter(leaves(3)), 3)


def test_the_loss_of_weights_in_bfloat16_is_not_rounded(accelerator: Accelerator) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8), 30).bfloat16()
    ids = torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(1))
    batches = split({"input_ids": ids, "labels": ids}, micro_batch=2)
    engine = BitwiseEngine(Ranks(accelerator), accelerator.prepare(model))
    expected = sum(engine.loss(batch).loss.item() for batch in batches)
    sums = engine.forward_backward(batches, engine.count(batches))
    assert sums.loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_the_gradient_is_the_ordinary_one_but_for_rounding(accelerator: Accelerator) -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8), 30).double()
    ids = torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(1))
    batches = split({"input_ids": ids, "labels": ids}, micro_batch=2)
    ordinary = ReplicatedEngine(Ranks(accelerator), accelerator.prepare(copy.deepcopy(model)))
    bitwise = BitwiseEngine(Ranks(accelerator), accelerator.prepare(model))
    totals = ordinary.count(batches)
    expected_sums = ordinary.forward_backward(batches, totals)
    sums = bitwise.forward_backward(batches, totals)
    assert float(sums.loss) == pytest.approx(float(expected_sums.loss), rel=1e-6)
    parameters = zip(bitwise.model.parameters(), ordinary.model.parameters(), strict=True)
    for parameter, expected in parameters:
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_micro_batches_of_an_evaluation_are_the_same_on_any_number_of_ranks(
    processes: int,
) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 30})
    loader = eval_loader(rows, processes, 8, source_rows=[21, 9], bitwise=True)
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    for batch in loader:
        # Accelerate gives each rank a slice of the batch; a slice of empty slots adds zero.
        for rank_rows in batch.rows.view(processes, -1).tolist():
            if max(rank_rows) >= 0:
                found[batch.source].append(rank_rows)
    empty = -1
    assert found == {
        0: [[*range(8)], [*range(8, 16)], [*range(16, 21), *[empty] * 3]],
        1: [[*range(21, 29)], [29, *[empty] * 7]],
    }


class SimulatedRanks:
    """Ranks of one process, one thread each, that exchange tensors with each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.sent: dict[int, torch.Tensor] = {}
        self.local = threading.local()

    def swap_with(self, peer: int, tensor: torch.Tensor) -> torch.Tensor:
        self.sent[self.local.rank] = tensor.clone()
        self.barrier.wait()
        received = self.sent[peer]
        self.barrier.wait()
        return received

    def sum_of_micro_batches(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self.local.rank = rank
        ranks = SimpleNamespace(rank=rank, world_size=self.count)
        engine: Any = SimpleNamespace(ranks=ranks)
        return BitwiseEngine.sum_of_micro_batches(engine, values)


def test_sums_of_an_evaluation_have_the_same_bits_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms = torch.stack(leaves(13))
    totals = []
    for count in (1, 2, 4, 8):
        ranks = SimulatedRanks(count)
        monkeypatch.setattr(bitwise, "swap_with", ranks.swap_with)
        padded = torch.cat([terms, terms.new_zeros(-len(terms) % count, terms.shape[1])])
        shares = [padded[rank::count] for rank in range(count)]
        with ThreadPoolExecutor(count) as pool:
            totals += pool.map(ranks.sum_of_micro_batches, range(count), shares)
    assert len(totals) == 15
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert torch.allclose(totals[0], terms.sum(0))


@pytest.mark.parametrize(
    ("rows", "micro", "processes", "says"),
    [
        (24, 2, 2, "works with 8 or 16 micro-batches of 2 rows, not 12"),
        (24, 4, 3, "works with 2 or 4 processes, not 3"),
        (8, 4, 4, "set it to 2 or less"),
    ],
)
def test_what_a_tree_cannot_add_is_refused_in_one_line(
    rows: int, micro: int, processes: int, says: str
) -> None:
    data = DataConfig(global_batch_size=rows, per_device_train_batch_size=micro)
    Layout.of(data, processes)
    with pytest.raises(UserError, match=says):
        Layout.of(data, processes, bitwise=True)
