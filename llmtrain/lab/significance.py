"""Whether a number differs between pairs of runs by more than noise: Student's paired t-test.

The *deviation* of a sample is always the sample standard deviation, with ``n - 1`` below the sum of
squares. The test is two-sided.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.errors import UserError

CONFIDENCE = 0.95  # of the intervals


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

    Raises:
        UserError: if scipy is not installed.
    """
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise UserError("comparing runs needs scipy: pip install 'llmtrain[lab]'.") from None

    mean = statistics.fmean(differences)
    if statistics.stdev(differences) == 0:
        return MeanDifference(mean, low=mean, high=mean, p=1.0 if mean == 0 else 0.0)

    test = stats.ttest_1samp(differences, popmean=0)
    interval = test.confidence_interval(CONFIDENCE)
    return MeanDifference(mean, low=interval.low, high=interval.high, p=float(test.pvalue))
