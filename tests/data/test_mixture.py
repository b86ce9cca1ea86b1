"""Mixtures: the proportions hold everywhere in a run, and the position alone decides which row stands there."""

from fractions import Fraction

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.loader import train_loader
from llmtrain.data.samplers import GlobalBatchSampler, slots_of
from llmtrain.data.shuffle import Mixture
from llmtrain.errors import UserError
from tests.data.test_loader import micro_batches_of, shares_of_steps

WEIGHTS = [
    *([1], [1, 1], [7, 3], [1, 99], [0.999, 0.001], [39, 40]),
    *([1, 1, 1], [5, 3, 2], [1, 16, 16], [16, 1, 10], [0.5, 0.25, 0.25]),
    *(
        [1, 1, 1, 1, 1],
        [1, 1, 1, 6, 6],
        [5, 5, 5, 5, 6],
        [224, 1, 1, 143, 21],
        [500, 250, 125, 100, 25],
    ),
]


def sources_of(mixture: Mixture, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(mixture.first_row, rows, side="right") - 1


def dealt(mixture: Mixture, start: int, count: int) -> np.ndarray:
    """The source of each of ``count`` places, as the rows tell it."""
    return sources_of(mixture, mixture.rows_at(np.arange(start, start + count), seed=0))


def mixed(weights: list[float]) -> Mixture:
    return Mixture([10**6 + i for i in range(len(weights))], weights)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 17, 10**9])
def test_a_whole_deal_holds_the_proportions_exactly(weights, start):
    mixture = mixed(weights)
    period = len(mixture.source_at)
    counts = np.bincount(dealt(mixture, start, period), minlength=len(weights))
    exact = [Fraction(str(weight)) for weight in weights]
    assert counts.tolist() == [share / sum(exact) * period for share in exact]


def surplus(mixture: Mixture) -> np.ndarray:
    """Of each source after each place of two deals: rows that it has had beyond its share. [places + 1, sources]"""
    period = len(mixture.source_at)
    had = np.cumsum(np.eye(len(mixture.sizes), dtype=int)[dealt(mixture, 0, 2 * period)], axis=0)
    share = had[period - 1]  # of a deal
    places = np.arange(1, 2 * period + 1)[:, None]
    return np.vstack([0 * share, had - places * share / period])


def check_bounds(mixture: Mixture) -> None:
    """No source is ever more than 1 - 1/n ahead, since the one furthest behind is behind by 1/n at least; nor more than
    1/2 + 1/3 + ... + 1/n behind, since of any k of them one is served before they fall further. A stretch may hold
    both: 1 row for two sources, 1.5 for three, 2.1 for five."""
    n, beyond = len(mixture.sizes), surplus(mixture)
    behind = sum(1 / k for k in range(2, n + 1))
    assert beyond.max() <= 1 - 1 / n + 1e-9
    assert -beyond.min() <= behind + 1e-9
    assert np.ptp(beyond, axis=0).max() <= 1 - 1 / n + behind + 1e-9


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_no_stretch_of_a_run_is_off_by_more_than_a_row_or_two(weights):
    check_bounds(mixed(weights))


@pytest.mark.parametrize("n", [2, 3, 5])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_proportions_are_off_by_more(n, data):
    check_bounds(mixed(data.draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))))


def test_the_check_of_proportions_catches_sources_that_take_turns_in_blocks():
    mixture = mixed([5, 3, 2])
    mixture.source_at = np.sort(mixture.source_at)
    mixture.rows_before = np.concatenate([np.arange(count) for count in mixture.counts])
    with pytest.raises(AssertionError):
        check_bounds(mixture)


@pytest.mark.parametrize(
    "same",
    [
        [[7, 3], [0.7, 0.3], [70, 30], [7e-5, 3e-5], [7.0, 3]],
        [[1, 1, 1], [0.1, 0.1, 0.1], [333.3, 333.3, 333.3]],
        [[1, 6], [0.1, 0.6], [0.7, 4.2]],
        [[1, 2, 1], [0.25, 0.5, 0.25]],
        [[1e-3, 0.999], [1, 999], [0.5, 499.5]],
    ],
    ids=str,
)
def test_proportions_are_the_same_deal_whatever_their_sum(same):
    first, *others = (mixed(weights) for weights in same)
    positions = np.arange(1, 3000, 2)
    for other in others:
        assert other.rows_at(positions, 0).tolist() == first.rows_at(positions, 0).tolist()


def test_thirds_take_turns():
    assert dealt(mixed([1, 1, 1]), 0, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "weights", [[1, 2**0.5], [1 / 3, 2 / 3], [0.12345, 0.6, 0.27655], [1, 998.5], [3, 1001]]
)
def test_odd_proportions_are_met_to_a_thousandth(weights):
    counts = np.bincount(dealt(mixed(weights), 0, 1000), minlength=len(weights))
    np.testing.assert_allclose(counts / 1000, np.array(weights) / sum(weights), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "weights", [[0.9999, 0.0001], [1, 1000], [1000, 1], [0.5, 0.4993, 0.0007], [1e-9, 1]]
)
def test_a_share_finer_than_a_thousandth_is_an_error(weights):
    with pytest.raises(UserError) as caught:
        mixed(weights)
    assert str(caught.value) == (
        f"--mixture {' '.join(map(str, weights))}: a data set has a share below one in 1000, "
        "which is too small; give it a larger number, or leave it out."
    )


SIZES, SHARES = [16, 3, 23], [0.5, 0.2, 0.3]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 2**64 - 1))
def test_a_position_has_its_row_whatever_it_is_asked_with(positions, seed):
    mixture = Mixture(SIZES, SHARES)
    together = mixture.rows_at(np.array(positions, np.int64), seed)
    assert together.dtype == np.int64
    assert [
        mixture.rows_at(np.array([position]), seed).item() for position in positions
    ] == together.tolist()
    backwards = Mixture(SIZES, SHARES).rows_at(np.array(positions[::-1], np.int64), seed)
    assert backwards.tolist() == together[::-1].tolist()


def epochs_of(mixture: Mixture, seed: int, places: int = 400) -> list[np.ndarray]:
    """Of each source: [epochs, size], its rows, from 0 on, in the order in which a run draws them."""
    rows = mixture.rows_at(np.arange(places), seed)
    found = []
    for source, (first, size) in enumerate(zip(mixture.first_row, mixture.sizes, strict=False)):
        own = rows[sources_of(mixture, rows) == source] - first
        found.append(own[: len(own) // size * size].reshape(-1, size))
    return found


@pytest.mark.parametrize(
    ("sizes", "weights"), [([5, 1, 23], [0.5, 0.2, 0.3]), ([20, 65], [1, 4]), ([40], [1])]
)
def test_every_row_comes_once_in_each_epoch_of_its_source(sizes, weights):
    for size, epochs in zip(sizes, epochs_of(Mixture(sizes, weights), seed=1), strict=True):
        assert len(epochs) >= 3
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (len(epochs), 1)))


def test_epochs_and_seeds_and_sources_have_orders_of_their_own():
    found = [epochs for seed in range(4) for epochs in epochs_of(Mixture([24, 24], [1, 3]), seed)]
    orders = {tuple(order) for epochs in found for order in epochs[:4].tolist()}
    assert len(orders) == 4 * 2 * 4


def test_what_a_source_shows_does_not_depend_on_the_others():
    """Its rows come in the same order, whatever is beside it and in whatever proportion."""
    few, many = (
        epochs_of(Mixture([24, *sizes], weights), 0)[0]
        for sizes, weights in [([9], [1, 1]), ([3, 4], SHARES)]
    )
    assert few[:8].tolist() == many[:8].tolist()


def test_a_place_far_into_a_huge_run_costs_nothing_and_overflows_nothing():
    mixture = Mixture([10**12, 10**11], [3, 7])
    start = 10**17
    rows = mixture.rows_at(np.arange(start, start + 1000), seed=0)
    assert np.bincount(sources_of(mixture, rows)).tolist() == [300, 700]
    assert rows.min() >= 0
    assert len(set(rows.tolist())) == 1000


def test_the_rows_of_a_mixture_are_known_forever():
    mixture = Mixture([5, 3, 20], [5, 3, 2])
    assert mixture.source_at.tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
    assert mixture.rows_at(np.arange(12), 0).tolist() == [4, 5, 15, 1, 2, 6, 3, 10, 7, 0, 2, 6]


# --- through the loader ---


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    """Row i holds i*10 to i*10 + 4."""
    return datasets.Dataset.from_dict(
        {"input_ids": (np.arange(23)[:, None] * 10 + np.arange(5)).tolist()}
    )


MIXTURE = Mixture([4, 10, 9], [2, 1, 1])


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 3), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_every_layout_computes_the_same_rows_in_the_same_step(rows, processes, micro):
    loader = train_loader(rows, 8, micro, range(9), seed=5, dropout_seed=6, mixture=MIXTURE)
    steps = shares_of_steps(loader, processes)
    assert len(steps) == 9
    for step, shares in enumerate(steps):
        batches = micro_batches_of(shares)
        assert all(len(batch["labels"]) <= micro for batch in batches)
        expected = MIXTURE.rows_at(np.arange(8 * step, 8 * step + 8), 5)
        assert torch.cat([share.rows for share in shares]).tolist() == expected.tolist()
        for name in ("input_ids", "labels"):
            column = torch.cat([batch[name] for batch in batches])
            assert column.tolist() == rows[expected]["input_ids"]
        targets = torch.cat([share.targets for share in shares])
        assert targets.tolist() == [4] * 8, "no slot is empty"


def test_dropout_keys_do_not_know_that_there_is_a_mixture(rows):
    def dropout_keys(mixture: Mixture | None) -> list[list[int]]:
        loader = train_loader(rows, 8, 4, range(3), seed=5, dropout_seed=6, mixture=mixture)
        return [batch["dropout_keys"].tolist() for batch in micro_batches_of(loader)]

    assert dropout_keys(None) == dropout_keys(MIXTURE)


@pytest.mark.parametrize("start", [0, 1, 7, 9])
def test_training_starts_at_any_step_with_what_an_unbroken_run_would_see(rows, start):
    unbroken = list(train_loader(rows, 8, 2, range(10), seed=5, dropout_seed=5, mixture=MIXTURE))
    resumed = list(
        train_loader(rows, 8, 2, range(start, 10), seed=5, dropout_seed=5, mixture=MIXTURE)
    )
    assert len(resumed) == 10 - start
    for local_batch, again in zip(unbroken[start:], resumed, strict=True):
        assert local_batch.rows.tolist() == again.rows.tolist()
        for batch, same in zip(local_batch.batches, again.batches, strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[name], same[name]) for name in batch)


@pytest.mark.parametrize("size", [1, 7, 8])
def test_the_global_batch_decides_where_a_step_ends_and_nothing_else(size):
    slots = [
        slot
        for batch in GlobalBatchSampler(23, size, range(56 // size), 5, MIXTURE)
        for slot in batch
    ]
    assert [slot.position for slot in slots] == list(range(56))
    assert [slot.row for slot in slots] == MIXTURE.rows_at(np.arange(56), 5).tolist()
    assert all(type(slot.row) is int for slot in slots_of(3, 23, size, 5, MIXTURE))
