"""Whether a number differs between pairs of runs by more than noise: Student's paired t-test.

The *deviation* of a sample is always the sample standard deviation, with ``n - 1`` below the sum of
squares. The test is two-sided.
"""

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.errors import UserError

_MOST_PAIRS = 10_000  # that are searched for the number that would decide


class MeanDifference(NamedTuple):
    """A mean difference, and what a t-test says about it.

    Attributes:
        difference: the mean difference.
        low: the lower end of its confidence interval, which excludes 0 if the test has decided.
        high: the upper end.
        p: the probability of a difference this far from 0, up or down, if there is only noise.
        adjusted_p: ``p`` times the number of comparisons, at most 1: the first step of Holm's
            method.
        is_decided: whether ``adjusted_p`` is at most the level.
        more_seeds: how many more pairs, one for each seed, would decide if the mean and the
            deviation stayed the same; 0 if the test has decided, ``None`` if 10,000 would not.
    """

    difference: float
    low: float
    high: float
    p: float
    adjusted_p: float
    is_decided: bool
    more_seeds: int | None


def paired_test(
    differences: Sequence[float], *, level: float = 0.05, looks: int = 1
) -> MeanDifference:
    """Test whether the mean of paired differences is 0, by Student's paired t-test.

    Args:
        differences: one for each pair, at least two.
        level: the probability of a wrong decision, in all comparisons together, if there is only
            noise.
        looks: the number of comparisons.

    Raises:
        UserError: if scipy is not installed.
    """
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise UserError("comparing runs needs scipy: pip install 'llmtrain[lab]'.") from None

    pairs = len(differences)
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences)
    if deviation == 0:
        p = 1.0 if mean == 0 else 0.0
        more_seeds = None if mean == 0 else 0
        return MeanDifference(mean, mean, mean, p, p, p == 0, more_seeds)

    def p_with(pairs: int) -> float:
        t = abs(mean) / deviation * math.sqrt(pairs)
        return 2 * float(stats.t.sf(t, df=pairs - 1))

    deciding = bisect.bisect_left(
        range(_MOST_PAIRS + 1), True, lo=pairs, key=lambda count: p_with(count) * looks <= level
    )
    p = p_with(pairs)
    adjusted_p = min(1.0, p * looks)
    quantile = float(stats.t.isf(level / looks / 2, df=pairs - 1))
    half_width = quantile * deviation / math.sqrt(pairs)
    return MeanDifference(
        difference=mean,
        low=mean - half_width,
        high=mean + half_width,
        p=p,
        adjusted_p=adjusted_p,
        is_decided=adjusted_p <= level,
        more_seeds=deciding - pairs if deciding <= _MOST_PAIRS else None,
    )
