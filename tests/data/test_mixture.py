"""Mixtures have the right proportions everywhere in a run; the position alone decides the row."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.order import GlobalBatchSampler, Mixture
from llmtrain.errors import UserError

WEIGHTS = [
    *([1], [1, 99], [0.999, 0.001], [39, 40], [5, 3, 2], [16, 1, 10]),
    *([1, 1, 1, 1, 1], [224, 1, 1, 143, 21]),
]


def large_mixture(weights: list[float]) -> Mixture:
    """A mixture of sources that are too large to end in a test."""
    return Mixture([10**6 + i for i in range(len(weights))], weights)


def sources_of_rows(mixture: Mixture, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(mixture.first_row, rows, side="right") - 1


def sources_at(mixture: Mixture, start: int, count: int) -> np.ndarray:
    """Return the source of each of ``count`` positions, from the numbers of their rows."""
    rows = mixture.rows_at(np.arange(start, start + count), seed=0)
    return sources_of_rows(mixture, rows)


# --- proportions


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("start", [0, 17, 10**9])
def test_each_period_has_the_proportions_exactly(weights, start):
    mixture = large_mixture(weights)
    period = len(mixture.source_at)
    counts = np.bincount(sources_at(mixture, start, period), minlength=len(weights))
    exact_weights = [Fraction(str(weight)) for weight in weights]
    assert counts.tolist() == [weight / sum(exact_weights) * period for weight in exact_weights]


def lead_of_sources(mixture: Mixture) -> np.ndarray:
    """Return how many rows each source is ahead of its share, [positions + 1, sources].

    The positions are those of two periods, each with the rows up to and including it.
    """
    period = len(mixture.source_at)
    is_source = np.eye(len(mixture.sizes), dtype=int)[sources_at(mixture, 0, 2 * period)]
    rows = np.cumsum(is_source, axis=0)
    rows_per_period = rows[period - 1]
    positions = np.arange(1, 2 * period + 1)[:, None]
    lead = rows - positions * rows_per_period / period
    return np.vstack([np.zeros_like(rows_per_period), lead])


def check_bounds(mixture: Mixture) -> None:
    """Check how far sources are ahead of their shares, and how far behind.

    With n sources, the source that is furthest behind lags by 1/n at least, so none is ever more
    than 1 - 1/n ahead. None lags by more than 1/2 + 1/3 + ... + 1/n, because one of any k sources
    is served before they fall further behind. A stretch of the run may have both errors: 1 row for
    two sources, 1.5 rows for three, 2.1 rows for five.
    """
    n = len(mixture.sizes)
    lead = lead_of_sources(mixture)
    most_ahead = 1 - 1 / n
    most_behind = sum(1 / k for k in range(2, n + 1))
    assert lead.max() <= most_ahead + 1e-9
    assert -lead.min() <= most_behind + 1e-9
    assert np.ptp(lead, axis=0).max() <= most_ahead + most_behind + 1e-9


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_stretch_of_a_run_has_the_proportions_to_a_row_or_two(weights):
    check_bounds(large_mixture(weights))


@pytest.mark.parametrize("n", [2, 3, 5])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_proportions_hold_to_a_row_or_two(n, data):
    weights = data.draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    check_bounds(large_mixture(weights))


def test_the_check_of_proportions_rejects_sources_in_blocks():
    mixture = large_mixture([5, 3, 2])
    mixture.source_at = np.sort(mixture.source_at)
    mixture.rows_before = np.concatenate([np.arange(count) for count in mixture.counts])
    with pytest.raises(AssertionError):
        check_bounds(mixture)


@pytest.mark.parametrize(
    ("weights", "equal_weights"),
    [([7, 3], [7e-5, 3e-5]), ([1, 1, 1], [333.3, 333.3, 333.3]), ([1, 999], [1e-3, 0.999])],
)
def test_the_sum_of_the_weights_does_not_matter(weights, equal_weights):
    positions = np.arange(1, 3000, 2)
    expected = large_mixture(weights).rows_at(positions, seed=0).tolist()
    assert large_mixture(equal_weights).rows_at(positions, seed=0).tolist() == expected


@pytest.mark.parametrize("weights", [[1, 2**0.5], [0.12345, 0.6, 0.27655], [1, 998.5]])
def test_other_weights_are_exact_to_a_thousandth(weights):
    counts = np.bincount(sources_at(large_mixture(weights), 0, 1000), minlength=len(weights))
    assert counts / 1000 == pytest.approx(np.array(weights) / sum(weights), rel=0, abs=1e-3)


@pytest.mark.parametrize("weights", [[0.9999, 0.0001], [1000, 1], [0.5, 0.4993, 0.0007]])
def test_a_share_below_a_thousandth_is_an_error(weights):
    with pytest.raises(UserError, match=f"--mixture {' '.join(map(str, weights))}: .* 1000"):
        large_mixture(weights)


# --- the row at a position


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 2**64 - 1))
def test_the_row_at_a_position_does_not_depend_on_other_positions(positions, seed):
    def rows_at(positions: list[int]) -> np.ndarray:
        mixture = Mixture([16, 3, 23], [0.5, 0.2, 0.3])
        return mixture.rows_at(np.array(positions, np.int64), seed)

    rows = rows_at(positions)
    assert rows.dtype == np.int64
    assert rows_at(positions[::-1]).tolist() == rows.tolist()[::-1]
    for position, row in zip(positions, rows.tolist(), strict=True):
        assert rows_at([position]).tolist() == [row]


def epochs_of(mixture: Mixture, source: int, rows: np.ndarray) -> np.ndarray:
    """Return the complete epochs of a source in a run, [epochs, size].

    Args:
        mixture: the mixture.
        source: the number of the source. In the result its rows are numbered from 0.
        rows: the rows at all positions of the run.
    """
    is_source = sources_of_rows(mixture, rows) == source
    rows_of_source = rows[is_source] - mixture.first_row[source]
    size = mixture.sizes[source]
    epochs = len(rows_of_source) // size
    return rows_of_source[: epochs * size].reshape(epochs, size)


@pytest.mark.parametrize(("sizes", "weights"), [([5, 1, 23], [0.5, 0.2, 0.3]), ([40], [1])])
def test_each_epoch_of_a_source_has_each_of_its_rows_once(sizes, weights):
    mixture = Mixture(sizes, weights)
    rows = mixture.rows_at(np.arange(400), seed=1)
    for source, size in enumerate(sizes):
        epochs = epochs_of(mixture, source, rows)
        assert len(epochs) >= 3
        for epoch in epochs.tolist():
            assert sorted(epoch) == list(range(size))


def test_epochs_seeds_and_sources_have_different_orders():
    mixture = Mixture([24, 24], [1, 3])
    orders = set()
    for seed in range(4):
        rows = mixture.rows_at(np.arange(400), seed)
        for source in range(2):
            orders.update(map(tuple, epochs_of(mixture, source, rows)[:4].tolist()))
    assert len(orders) == 4 * 2 * 4


def test_the_order_of_a_source_does_not_depend_on_other_sources():
    def first_source(mixture: Mixture) -> list[list[int]]:
        rows = mixture.rows_at(np.arange(400), seed=0)
        return epochs_of(mixture, 0, rows)[:8].tolist()

    two_sources = Mixture([24, 9], [1, 1])
    three_sources = Mixture([24, 3, 4], [0.5, 0.2, 0.3])
    assert first_source(two_sources) == first_source(three_sources)


def test_late_positions_of_a_huge_run_do_not_overflow():
    mixture = Mixture([10**12, 10**11], [3, 7])
    start = 10**17
    rows = mixture.rows_at(np.arange(start, start + 1000), seed=0)
    assert np.bincount(sources_of_rows(mixture, rows)).tolist() == [300, 700]
    assert rows.min() >= 0
    assert len(np.unique(rows)) == 1000


def test_the_rows_of_a_mixture_never_change_between_versions():
    mixture = Mixture([5, 3, 20], [5, 3, 2])
    assert mixture.source_at.tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
    assert mixture.rows_at(np.arange(12), 0).tolist() == [4, 5, 15, 1, 2, 6, 3, 10, 7, 0, 2, 6]


# --- batches of a mixture

MIXTURE = Mixture([4, 10, 9], [2, 1, 1])


@pytest.mark.parametrize("size", [1, 7])
def test_the_size_of_the_global_batch_does_not_change_the_order(size):
    sampler = GlobalBatchSampler(23, size, range(56 // size), seed=5, mixture=MIXTURE)
    slots = [slot for batch in sampler for slot in batch]
    assert [slot.position for slot in slots] == list(range(56))
    assert [slot.row for slot in slots] == MIXTURE.rows_at(np.arange(56), seed=5).tolist()
    assert {type(slot.row) for slot in slots} == {int}
