"""The codes of answers, as they are on disk."""

import numpy as np
import pytest
import torch

from llmtrain.interfaces.answer_codes import (
    PADDING,
    answer_code,
    answer_of,
    is_second,
    is_undesirable,
    pair_of,
)

# Pair, whether it is the second answer, whether the first answer of the pair is undesirable: code.
CODES = {
    (0, False, False): 0,
    (0, True, False): 1,
    (0, False, True): 2,
    (0, True, True): 3,
    (1, False, False): 4,
    (5, True, True): 23,
}


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_code_holds_the_pair_the_answer_and_the_label(make):
    for (pair, second, undesirable), code in CODES.items():
        assert answer_code(pair, is_second=second, is_undesirable=undesirable) == code
        assert pair_of(code) == pair
        assert is_second(code) == second
        assert is_undesirable(code) == undesirable
        assert answer_of(code) == 2 * pair + second

    codes = make([*CODES.values()])
    assert [*zip(pair_of(codes), is_second(codes), is_undesirable(codes), strict=True)] == [*CODES]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_padding_belongs_to_no_pair(make):
    assert PADDING == -1
    assert pair_of(PADDING) == answer_of(PADDING) == -1
    assert (answer_of(make([PADDING, PADDING])) == -1).all()
