"""Tests of a difference beside scipy's, and that they find a true difference as often as they should."""

import math
import random
import re

import pytest
from scipy import stats

from llmtrain.lab.significance import (
    Sample,
    paired_test,
    t_quantile,
    two_sided_p,
    unpaired_test,
)
from tests.launching import ROOT


def losses(n: int, mean: float = 2.0, deviation: float = 0.1, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(n)]


def test_the_paired_test_is_that_of_scipy() -> None:
    for n in range(2, 41):
        first = losses(n, seed=n)
        second = losses(n, mean=1.97, seed=1000 + n)
        result = paired_test([b - a for a, b in zip(first, second, strict=True)])
        expected = stats.ttest_rel(second, first)
        interval = expected.confidence_interval(0.95)
        assert result.p == pytest.approx(expected.pvalue, rel=1e-9), n
        assert (result.low, result.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_the_unpaired_test_is_that_of_scipy_also_for_groups_of_different_size() -> None:
    for n in range(2, 41):
        first = losses(n, seed=n)
        second = losses(2 + n // 3, mean=1.9, deviation=0.3, seed=1000 + n)
        result = unpaired_test(first, second)
        expected = stats.ttest_ind(second, first, equal_var=False)
        interval = expected.confidence_interval(0.95)
        assert result.p == pytest.approx(expected.pvalue, rel=1e-9), n
        assert (result.low, result.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4.5, 9, 39, 200, 2000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.3, 1.0, 2.5, 8.0, 60.0])
def test_p_values_keep_their_digits_also_far_out(t: float, degrees: float) -> None:
    expected = 2 * stats.t.sf(t, degrees)
    assert two_sided_p(t, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-300)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@pytest.mark.parametrize("degrees", [1, 2, 7.3, 39, 999])
def test_quantiles_are_those_of_scipy(degrees: float) -> None:
    assert t_quantile(0.05, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


def smallest_n(difference: float, deviation: float) -> int:
    for n in range(2, 1001):
        if stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n) < abs(difference):
            return n
    raise AssertionError


@pytest.mark.parametrize("seed", range(10))
def test_more_seeds_are_as_many_as_it_takes_with_the_same_mean_and_deviation(seed: int) -> None:
    differences = losses(4, mean=0.02, deviation=0.05, seed=seed)
    result = paired_test(differences)
    sample = Sample.of(differences)
    assert sample.deviation is not None
    needed = smallest_n(sample.mean, sample.deviation)
    assert result.is_decided == (needed <= 4)
    assert result.more_seeds == max(0, needed - 4)


def test_more_seeds_of_two_unpaired_groups_are_counted_for_the_smaller_one() -> None:
    first = losses(5, mean=2.0, seed=1)
    second = losses(3, mean=1.9, seed=4)
    result = unpaired_test(first, second)
    assert not result.is_decided
    assert result.more_seeds is not None
    variances = [stats.tvar(sample) for sample in (first, second)]
    difference = abs(result.difference)

    def is_enough(n: int) -> bool:
        error = math.sqrt(sum(variances) / n)
        degrees = (n - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
        return bool(stats.t.ppf(0.975, degrees) * error < difference)

    n = 3 + result.more_seeds
    assert is_enough(n)
    assert not is_enough(n - 1)


def test_what_does_not_vary_is_decided_and_what_does_not_differ_never_is() -> None:
    assert paired_test([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0, 0)
    assert paired_test([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0, 1.0, None)
    assert paired_test([0.1, -0.1]).more_seeds is None
    assert unpaired_test([2.0, 2.0], [1.0, 1.0]) == (-1.0, -1.0, -1.0, 0.0, 0)


def test_an_interval_covers_the_true_difference_19_times_of_20() -> None:
    """One-sided quantiles, or n instead of n - 1, cover it too rarely for n = 5."""
    truth = -0.03
    trials = 300
    covered = 0
    for trial in range(trials):
        result = paired_test(losses(5, mean=truth, deviation=0.05, seed=trial))
        covered += result.low <= truth <= result.high
    assert 0.93 <= covered / trials <= 0.97


def test_a_single_number_has_no_deviation() -> None:
    assert Sample.of([2.5]) == (1, 2.5, None)


def test_the_guide_says_how_many_seeds_find_a_difference_in_four_of_five_cases() -> None:
    page = (ROOT / "docs" / "guides" / "compare-seeds.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for ratio, seeds in rows:
        n = int(seeds)
        assert power(n, float(ratio)) >= 0.8 > power(n - 1, float(ratio))
    assert power(5, 2.0) == pytest.approx(0.9, abs=0.02)


def power(n: int, ratio: float) -> float:
    """How often n pairs decide a true difference of ``ratio`` deviations."""
    limit = stats.t.ppf(0.975, n - 1)
    center = ratio * math.sqrt(n)
    return float(stats.nct.sf(limit, n - 1, center) + stats.nct.cdf(-limit, n - 1, center))
