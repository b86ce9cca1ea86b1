"""The codes in the column ``answers``, which are stored on disk."""

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

each_code = pytest.mark.parametrize(
    ("code", "pair", "second", "undesirable"),
    [
        (0, 0, False, False),
        (1, 0, True, False),
        (2, 0, False, True),
        (3, 0, True, True),
        (4, 1, False, False),
        (23, 5, True, True),
    ],
)


@each_code
def test_a_code_has_the_pair_the_answer_and_the_label(code, pair, second, undesirable):
    assert answer_code(pair, is_second=second, is_undesirable=undesirable) == code

    assert pair_of(code) == pair
    assert is_second(code) == second
    assert is_undesirable(code) == undesirable
    assert answer_of(code) == 2 * pair + second


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_of_codes_are_read_like_single_codes(array):
    codes = array([[0, 1, 2], [3, 4, 23]])

    assert pair_of(codes).tolist() == [[0, 0, 0], [0, 1, 5]]
    assert answer_of(codes).tolist() == [[0, 1, 0], [1, 2, 11]]
    assert is_second(codes).tolist() == [[False, True, False], [True, False, True]]
    assert is_undesirable(codes).tolist() == [[False, False, True], [True, False, True]]


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_padding_belongs_to_no_pair(array):
    assert PADDING == -1

    padding = array([PADDING, PADDING])
    assert pair_of(padding).tolist() == [-1, -1]
    assert answer_of(padding).tolist() == [-1, -1]
