"""Significance tests agree with scipy's, and decide as often as they should."""

import math
import random

import pytest
from scipy import stats

from llmtrain.lab.significance import paired_test, t_quantile, two_sided_p, unpaired_test


def draw_losses(
    count: int, *, mean: float = 2.0, deviation: float = 0.1, seed: int = 0
) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(count)]


# --- the same as scipy


COUNTS = (2, 3, 5, 12, 40)


@pytest.mark.parametrize("count", COUNTS)
def test_the_paired_test_is_that_of_scipy(count: int) -> None:
    first = draw_losses(count, seed=count)
    second = draw_losses(count, mean=1.97, seed=1000 + count)

    result = paired_test([b - a for a, b in zip(first, second, strict=True)])

    expected = stats.ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert result.low == pytest.approx(interval.low, rel=1e-9)
    assert result.high == pytest.approx(interval.high, rel=1e-9)


@pytest.mark.parametrize("count", COUNTS)
def test_the_unpaired_test_is_the_one_of_welch_in_scipy(count: int) -> None:
    first = draw_losses(count, seed=count)
    second = draw_losses(2 + count // 3, mean=1.9, deviation=0.3, seed=1000 + count)

    result = unpaired_test(first, second)

    expected = stats.ttest_ind(second, first, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert result.low == pytest.approx(interval.low, rel=1e-9)
    assert result.high == pytest.approx(interval.high, rel=1e-9)


@pytest.mark.parametrize("degrees", [1, 4.5, 39, 2000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 1.0, 8.0, 60.0])
def test_p_values_are_those_of_scipy_even_if_they_are_tiny(t: float, degrees: float) -> None:
    expected = 2 * stats.t.sf(t, degrees)

    assert two_sided_p(t, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-300)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@pytest.mark.parametrize("degrees", [1, 7.3, 999])
def test_quantiles_are_those_of_scipy(degrees: float) -> None:
    assert t_quantile(0.05, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


# --- how many more seeds would decide


def pairs_needed(mean: float, deviation: float) -> int:
    """Return the smallest number of pairs whose interval excludes zero."""
    for count in range(2, 1001):
        half_width = stats.t.ppf(0.975, count - 1) * deviation / math.sqrt(count)
        if half_width < abs(mean):
            return count
    raise AssertionError("no number of pairs is enough")


@pytest.mark.parametrize("seed", range(4))
def test_more_pairs_are_asked_for_until_they_would_decide(seed: int) -> None:
    """It is assumed that the mean and the deviation of the differences stay the same."""
    differences = draw_losses(4, mean=0.02, deviation=0.05, seed=seed)

    result = paired_test(differences)

    needed = pairs_needed(stats.tmean(differences), stats.tstd(differences))
    assert result.is_decided == (needed <= 4)
    assert result.more_seeds == max(0, needed - 4)


# --- special cases


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.5, 0.5, 0.5], (0.5, 0.5, 0.5, 0.0, 0)),
        ([0.0, 0.0, 0.0], (0.0, 0.0, 0.0, 1.0, None)),
    ],
)
def test_differences_that_do_not_vary_are_decided_unless_they_are_zero(
    differences: list[float], expected: tuple
) -> None:
    assert paired_test(differences) == expected


def test_groups_that_do_not_vary_are_decided() -> None:
    assert unpaired_test([2.0, 2.0], [1.0, 1.0]) == (-1.0, -1.0, -1.0, 0.0, 0)
