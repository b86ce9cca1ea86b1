"""The significance test agrees with scipy's."""

import random

import pytest
from scipy import stats

from llmtrain.lab.significance import paired_test, t_quantile, two_sided_p


def draw_losses(count: int, *, mean: float = 2.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, 0.1) for _ in range(count)]


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
    assert result.is_decided == (expected.pvalue < 0.05)


@pytest.mark.parametrize("degrees", [1, 4.5, 39, 2000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 1.0, 8.0, 60.0])
def test_p_values_are_those_of_scipy_even_if_they_are_tiny(t: float, degrees: float) -> None:
    expected = 2 * stats.t.sf(t, degrees)

    assert two_sided_p(t, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-300)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@pytest.mark.parametrize("degrees", [1, 7.3, 999])
def test_quantiles_are_those_of_scipy(degrees: float) -> None:
    assert t_quantile(0.05, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


# --- special cases


def test_differences_that_do_not_vary_are_decided_unless_they_are_zero() -> None:
    assert paired_test([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0)
    assert paired_test([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0, 1.0)
