"""Whether a number differs between pairs of runs by more than noise: Student's paired t-test.

The *deviation* of a sample is always the sample standard deviation, with ``n - 1`` below the sum of
squares. The test is two-sided.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95  # of the intervals
_FRACTION_TERMS = 80  # of the continued fraction; it needs about the root of the degrees of freedom
_BISECTIONS = 50


class MeanDifference(NamedTuple):
    """A mean difference, and what a t-test says about it.

    Attributes:
        difference: the mean difference.
        low: the lower end of its 95 % confidence interval.
        high: the upper end.
        p: the probability of a difference this far from 0, up or down, if there is only noise.
    """

    difference: float
    low: float
    high: float
    p: float

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.p < 1 - CONFIDENCE


def paired_test(differences: Sequence[float]) -> MeanDifference:
    """Test whether the mean of paired differences is 0, by Student's paired t-test.

    Args:
        differences: one for each pair, at least two.
    """
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return MeanDifference(mean, low=mean, high=mean, p=1.0 if mean == 0 else 0.0)

    degrees = len(differences) - 1
    margin = error * t_quantile(1 - CONFIDENCE, degrees)
    p = two_sided_p(mean / error, degrees)
    return MeanDifference(mean, low=mean - margin, high=mean + margin, p=p)


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
