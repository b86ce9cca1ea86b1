"""The significance test gives the numbers that R and the literature give."""

import pytest

from llmtrain.lab.significance import paired_test

# Hours of sleep that two drugs added in ten patients: Student, The probable error of a mean, 1908.
FIRST_DRUG = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND_DRUG = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def test_students_own_example_has_the_numbers_of_r() -> None:
    result = paired_test([b - a for a, b in zip(FIRST_DRUG, SECOND_DRUG, strict=True)])

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
    assert paired_test([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0)
    assert paired_test([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0, 1.0)
