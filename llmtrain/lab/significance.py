"""Whether two samples of a number differ by more than noise: Student's and Welch's t-test.

The *deviation* of a sample is always the sample standard deviation, with ``n - 1`` below the sum of
squares. All tests are two-sided.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95  # of the intervals
_MAX_SEEDS = 1000  # more are not searched for
_FRACTION_TERMS = 80  # of the continued fraction; it needs about the root of the degrees of freedom
_BISECTIONS = 50


class Sample(NamedTuple):
    """The size, the mean and the deviation of a sample.

    Attributes:
        n: how many numbers it has.
        mean: their mean.
        deviation: their sample standard deviation; ``None`` for a single number.
    """

    n: int
    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Describe some numbers, at least one."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(n=len(values), mean=statistics.fmean(values), deviation=deviation)


class MeanDifference(NamedTuple):
    """A mean difference, and what a t-test says about it.

    Attributes:
        difference: the mean difference.
        low: the lower end of its 95 % confidence interval.
        high: the upper end.
        p: the probability of a difference this far from 0, up or down, if there is only noise.
        more_seeds: how many more seeds would move 0 out of the interval, if means and deviations
            stayed the same. It is 0 if the interval excludes 0 already, and ``None`` if more than
            1,000 seeds would be needed.
    """

    difference: float
    low: float
    high: float
    p: float
    more_seeds: int | None

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.more_seeds == 0


def paired_test(differences: Sequence[float]) -> MeanDifference:
    """Test whether the mean of paired differences is 0, by Student's paired t-test.

    Args:
        differences: one for each pair, at least two.
    """
    sample = Sample.of(differences)
    assert sample.deviation is not None, "a test needs two pairs"
    deviation = sample.deviation

    def errors_with(n: int) -> "_StandardError":
        return _StandardError(size=deviation / math.sqrt(n), degrees=n - 1)

    return _result(sample.mean, errors_with, sample.n, errors_with(sample.n))


def unpaired_test(first: Sequence[float], second: Sequence[float]) -> MeanDifference:
    """Test whether two means are the same, by Welch's t-test.

    It does not assume that both samples vary equally much. B. L. Welch, "The generalization of
    'Student's' problem when several different population variances are involved", Biometrika 34,
    1947. M. Delacre, D. Lakens and C. Leys, "Why psychologists should by default use Welch's t-test
    instead of Student's t-test", International Review of Social Psychology 30, 2017, compare it
    with the test of pooled variances.

    Args:
        first: a sample of at least two numbers.
        second: another one. The difference is its mean minus that of the first.
    """
    a = Sample.of(first)
    b = Sample.of(second)

    def errors_with(n: int) -> "_StandardError":
        return _welch_error(a._replace(n=n), b._replace(n=n))

    return _result(b.mean - a.mean, errors_with, min(a.n, b.n), _welch_error(a, b))


class _StandardError(NamedTuple):
    """The standard error of a mean difference, and its degrees of freedom."""

    size: float
    degrees: float


def _welch_error(a: Sample, b: Sample) -> _StandardError:
    """Return the standard error of the difference of two means, after Welch and Satterthwaite."""
    assert a.deviation is not None, "a test needs two numbers"
    assert b.deviation is not None, "a test needs two numbers"
    a_variance = a.deviation**2 / a.n
    b_variance = b.deviation**2 / b.n
    variance = a_variance + b_variance
    if variance == 0:
        return _StandardError(size=0.0, degrees=a.n + b.n - 2)

    degrees = variance**2 / (a_variance**2 / (a.n - 1) + b_variance**2 / (b.n - 1))
    return _StandardError(size=math.sqrt(variance), degrees=degrees)


def _result(
    difference: float,
    errors_with: Callable[[int], _StandardError],
    n: int,
    error: _StandardError,
) -> MeanDifference:
    """Return the result of a test.

    Args:
        difference: the mean difference.
        errors_with: returns the standard error that so many seeds would have.
        n: how many seeds there are; of two unequal groups, those of the smaller one.
        error: the standard error.
    """
    margin = error.size * t_quantile(1 - CONFIDENCE, error.degrees)
    p = _p_of(difference, error)
    return MeanDifference(
        difference=difference,
        low=difference - margin,
        high=difference + margin,
        p=p,
        more_seeds=0 if p < 1 - CONFIDENCE else _more_seeds(difference, errors_with, n),
    )


def _more_seeds(
    difference: float, errors_with: Callable[[int], _StandardError], n: int
) -> int | None:
    """Return how many more than ``n`` seeds decide; ``None`` if that is more than 1,000."""
    for more_seeds in range(1, _MAX_SEEDS - n + 1):
        # The interval excludes 0 exactly if the p-value is below 5 %.
        if _p_of(difference, errors_with(n + more_seeds)) < 1 - CONFIDENCE:
            return more_seeds
    return None


def _p_of(difference: float, error: _StandardError) -> float:
    """Return the p-value of a mean difference."""
    if error.size > 0:
        return two_sided_p(difference / error.size, error.degrees)
    return 1.0 if difference == 0 else 0.0


def t_quantile(p: float, degrees: float) -> float:
    """Return the t whose two-sided p-value is ``p``.

    Args:
        p: a probability above 0 and below 1, such as 0.05 for an interval of 95 %.
        degrees: the degrees of freedom, above 0.
    """
    low = 0.0
    high = 1.0
    while two_sided_p(high, degrees) > p:
        low = high
        high *= 2

    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if two_sided_p(middle, degrees) > p:
            low = middle
        else:
            high = middle
    return high


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that Student's t is at least this far from 0, up or down.

    M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions, 1964, equations
    26.5.27 and 26.7.1.

    Args:
        t: the statistic.
        degrees: the degrees of freedom, above 0, whole or not.
    """
    # If t is small, 1 - x would lose the digits of t, so both are computed from t.
    x = degrees / (degrees + t * t)
    complement = t * t / (degrees + t * t)
    if x > (degrees / 2 + 1) / (degrees / 2 + 2.5):
        return 1 - _incomplete_beta(complement, 0.5, degrees / 2)
    return _incomplete_beta(x, degrees / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), for x up to (a + 1) / (a + b + 2).

    By the continued fraction 8.17.22 of the NIST Digital Library of Mathematical Functions, which
    converges quickly for such x. For a larger one, I_x(a, b) = 1 - I_{1-x}(b, a).
    """
    if x <= 0:
        return 0.0

    fraction = 1.0
    for term in range(_FRACTION_TERMS, 0, -1):
        m = term // 2
        if term % 2:
            numerator = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + numerator * x / fraction
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    log_front = a * math.log(x) + b * math.log1p(-x) - log_beta
    return math.exp(log_front) / (a * fraction)
