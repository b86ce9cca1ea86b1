"""The order of an epoch is a bijection that can be entered anywhere and looks like a shuffle."""

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from scipy import stats

from llmtrain.data import order
from llmtrain.data.order import permute
from llmtrain.seeds import key_of

# --- orders that never change: they are part of every run's fingerprint


@pytest.mark.parametrize(
    ("n", "key", "rows"),
    [
        (1, 0, [0]),
        (10, 12035550249420947055, [6, 8, 4, 2, 3, 1, 9, 0]),
        (10, 3069472533636442495, [6, 0, 9, 1, 7, 5, 3, 8]),
        (65, 3, [4, 24, 31, 30, 18, 37, 52, 35]),
        (1000, 13608149317741381227, [774, 225, 680, 45, 655, 145, 582, 764]),
        (10**9 + 7, 17670481865470212032, [835871604, 213055772, 937545444, 811617177]),
        (2**40, 11, [292531921451, 663399835455, 233243256784, 11401880584]),
    ],
)
def test_orders_never_change_between_versions(n, key, rows):
    assert permute(np.arange(len(rows)), n, key).tolist() == rows


# --- a bijection


def test_an_epoch_has_every_row_once():
    for n in [*range(1, 601), 1023, 1024, 1025, 65537, 99_991]:
        order = permute(np.arange(n), n, key_of(5, n))
        assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**32 + 1, 10**12])
def test_a_huge_epoch_has_no_row_twice_and_rows_from_everywhere(n):
    positions = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    rows = permute(positions, n, key_of(1, 2))
    assert rows.dtype == np.int64
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(np.unique(rows)) == len(positions)

    rows_per_tenth, _ = np.histogram(rows, bins=10, range=(0, n))
    assert rows_per_tenth.min() > 0.95 * len(rows) / 10


# --- positions of any shape


@pytest.mark.parametrize("n", [1, 5, 100, 10**9 + 7])
def test_the_row_at_a_position_depends_on_nothing_else(n):
    positions = np.arange(min(n, 60))
    rows = permute(positions, n, key=9)
    assert permute(positions[::-1], n, key=9).tolist() == rows.tolist()[::-1]
    assert permute(positions.astype(np.int32), n, key=9).tolist() == rows.tolist()
    for position, row in zip(positions, rows, strict=True):
        assert permute(position[None], n, key=9).tolist() == [row]
        assert permute(position, n, key=9).shape == ()

    column = permute(positions[:, None], n, key=9)
    assert column.shape == (len(positions), 1)
    assert column[:, 0].tolist() == rows.tolist()
    assert permute(positions[:0], n, key=9).shape == (0,)
    assert positions.tolist() == list(range(len(positions))), "they stay as they are"


# --- chance


def feistel_orders(n: int, count: int) -> np.ndarray:
    """Return the orders of many epochs, [count, n], with seeds and epochs as in runs."""
    return np.stack([permute(np.arange(n), n, key_of(i % 7, i // 7)) for i in range(count)])


def torch_orders(n: int, count: int) -> np.ndarray:
    """Return orders from ``torch.randperm``, [count, n]."""
    generator = torch.Generator().manual_seed(0)
    return np.stack([torch.randperm(n, generator=generator).numpy() for _ in range(count)])


def z_score(counts: np.ndarray, degrees_of_freedom: int) -> float:
    """Return how unlikely unequal counts are by chance, as a score of the normal distribution.

    It is large if the counts are too unequal, and negative if they are too equal.
    """
    expected = counts.mean()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    distribution = stats.chi2(degrees_of_freedom)
    if chi_square > distribution.mean():
        return stats.norm.isf(distribution.sf(chi_square))
    return stats.norm.ppf(distribution.cdf(chi_square))


def z_scores(orders: np.ndarray) -> dict[str, float]:
    """Compare how often orders, [count, n], have each outcome of equal chance."""
    n = orders.shape[1]
    position_of_row_0 = np.bincount(np.argmax(orders == 0, axis=1), minlength=n)
    rows_by_position = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    scores = {
        "the position of row 0": z_score(position_of_row_0, n - 1),
        "the position of each row": z_score(rows_by_position, (n - 1) ** 2),
    }
    if n == 4:
        orders_seen = Counter(map(tuple, orders.tolist()))
        counts = np.array([orders_seen[order] for order in permutations(range(4))])
        scores["the order"] = z_score(counts, len(counts) - 1)
    if n == 5:
        first_pairs = Counter(map(tuple, orders[:, :2].tolist()))
        counts = np.array([first_pairs[pair] for pair in permutations(range(5), 2)])
        scores["the first two rows"] = z_score(counts, len(counts) - 1)
    return scores


@pytest.mark.parametrize("orders_of", [feistel_orders, torch_orders])
@pytest.mark.parametrize(("n", "count"), [(4, 480), (5, 500), (17, 510), (100, 1000)])
def test_every_row_is_equally_likely_at_every_position(orders_of, n, count):
    scores = z_scores(orders_of(n, count))
    assert max(scores.values()) < 3.5, scores  # one in 4,000; the keys are fixed
    assert min(scores.values()) > -3.5, f"too even to be chance: {scores}"


@pytest.mark.parametrize("n", [4, 17])
def test_the_check_of_chance_rejects_a_network_of_two_rounds(monkeypatch, n):
    monkeypatch.setattr(order, "_ROUNDS", 2)
    assert max(z_scores(feistel_orders(n, 480)).values()) > 5


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return abs(stats.pearsonr(a, b).statistic)


def adjacent_neighbours(order: np.ndarray) -> int:
    """Count how often two rows that are stored side by side are drawn one after the other."""
    return int((np.abs(np.diff(order)) == 1).sum())


@pytest.mark.parametrize(("n", "epoch"), [(1000, 0), (1000, 1), (10_000, 2), (16_384, 3)])
def test_rows_that_are_stored_side_by_side_are_drawn_apart(n, epoch):
    order = permute(np.arange(n), n, key_of(0, epoch))
    assert correlation(order[:-1], order[1:]) < 4 / n**0.5
    assert adjacent_neighbours(order) < 10  # a shuffle has 2 on average


def test_the_check_of_neighbours_rejects_a_rotation():
    order = np.roll(np.arange(10_000), 1234)
    assert correlation(order[:-1], order[1:]) > 0.04
    assert adjacent_neighbours(order) > 10


def test_orders_of_epochs_and_seeds_are_independent():
    n = 10_000
    orders = [np.arange(n)]
    for seed in range(3):
        orders += [permute(np.arange(n), n, key_of(seed, epoch)) for epoch in range(3)]
    for first, second in combinations(orders, 2):
        assert correlation(first, second) < 4 / n**0.5
        assert (first == second).sum() < 9  # 1 on average
