"""The significance test gives the numbers that R and the literature give."""

import numpy as np
import pytest
from scipy import stats

from llmtrain.lab.significance import paired_test

# Hours of sleep that two drugs added in ten patients: Student, The probable error of a mean, 1908.
FIRST_DRUG = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND_DRUG = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
SLEEP = [b - a for a, b in zip(FIRST_DRUG, SECOND_DRUG, strict=True)]


def test_students_own_example_has_the_numbers_of_r() -> None:
    result = paired_test(SLEEP)

    # t.test(extra ~ group, data = sleep, paired = TRUE)
    assert result.difference == pytest.approx(1.58)
    assert result.p == pytest.approx(0.002833, abs=5e-7)
    assert result.low == pytest.approx(0.7001142, abs=5e-8)
    assert result.high == pytest.approx(2.4598858, abs=5e-8)
    assert result.is_decided


def test_two_pairs_rarely_decide() -> None:
    result = paired_test([1.0, 2.0])

    # With one degree of freedom, t is Cauchy's: P(|t| > 3) = 1 - 2 atan(3) / pi.
    assert result.p == pytest.approx(0.2048327646991335)
    assert not result.is_decided


def test_differences_that_do_not_vary_are_decided_unless_they_are_zero() -> None:
    assert paired_test([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0, 0.0, True, 0)
    assert paired_test([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0, 1.0, 1.0, False, None)


@pytest.mark.parametrize("looks", [1, 30])
@pytest.mark.parametrize("level", [0.01, 0.05])
def test_the_interval_and_p_are_those_of_scipy_at_every_level(level: float, looks: int) -> None:
    paired = stats.ttest_rel(SECOND_DRUG, FIRST_DRUG)
    interval = paired.confidence_interval(1 - level / looks)

    result = paired_test(SLEEP, level=level, looks=looks)

    assert (result.low, result.high) == pytest.approx(interval)
    assert result.adjusted_p == pytest.approx(min(1, looks * paired.pvalue))
    assert result.is_decided == (not interval.low <= 0 <= interval.high)


def test_so_many_more_seeds_decide_and_one_less_does_not() -> None:
    more_seeds = paired_test(SLEEP, level=0.01, looks=30).more_seeds
    assert more_seeds is not None

    for missing, is_enough in ((0, True), (1, False)):
        # As many values of the same mean and deviation.
        values = np.linspace(-1, 1, len(SLEEP) + more_seeds - missing)
        values = np.mean(SLEEP) + np.std(SLEEP, ddof=1) * values / np.std(values, ddof=1)
        assert (30 * stats.ttest_1samp(values, 0).pvalue <= 0.01) == is_enough

    assert paired_test([1.0, -1.0, 1e-9]).more_seeds is None


def test_looks_that_fall_with_each_decision_reject_no_more_than_holms_method() -> None:
    """Holm needs all p-values. A search decides about each before it knows the next ones."""
    draw = np.random.default_rng(0)
    decisions = 0
    for _ in range(100):
        families = draw.normal(size=(6, 5)) + draw.choice([0, 0, 2, 4], size=(6, 1))
        rejected = set()
        for i, differences in enumerate(families):
            looks = 6 - len(rejected)
            if paired_test(differences.tolist(), level=0.05, looks=looks).is_decided:
                rejected.add(i)

        p_values = stats.ttest_1samp(families, 0, axis=1).pvalue
        holm = set()
        for place, i in enumerate(np.argsort(p_values).tolist()):
            if p_values[i] > 0.05 / (6 - place):
                break
            holm.add(i)
        assert rejected <= holm
        decisions += len(rejected)
    assert decisions > 30
