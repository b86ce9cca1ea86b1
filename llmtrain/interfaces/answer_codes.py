"""The codes in the column ``answers`` of preference data.

The code of a position says to which answer it belongs. Its lowest bit is 1 for the second answer of
a pair. The next bit is 1 if the first answer of the pair is undesirable. The bits above are the
number of the pair in its row. Padding has the code -1. A row with two pairs may have

    code    0 0 0   1 1   6 6   7 7 7   -1 -1
    pair    0 0 0   0 0   1 1   1 1 1

The first answer of pair 1 is undesirable.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

PADDING = -1
# The functions below take one code, or an array of codes of any shape.
Codes = TypeVar("Codes", int, "np.ndarray", "torch.Tensor")


def answer_code(pair: int, is_second: bool, is_undesirable: bool) -> int:
    """Return the code of an answer.

    Args:
        pair: the number of its pair in the row.
        is_second: whether it is the second answer of the pair.
        is_undesirable: whether the first answer of the pair is undesirable.
    """
    return 4 * pair + 2 * is_undesirable + is_second


def pair_of(codes: Codes) -> Codes:
    """Return the number of the pair in its row; -1 for padding."""
    return codes >> 2


def is_second(codes: Codes) -> Codes:
    """Return whether codes, which are not padding, belong to the second answer of a pair."""
    return codes & 1 > 0


def is_undesirable(codes: Codes) -> Codes:
    """Return whether codes, which are not padding, belong to a pair with an undesirable answer."""
    return codes & 2 > 0


def answer_of(codes: Codes) -> Codes:
    """Return the number of the answer in its row, as pairs have two; -1 for padding."""
    answers: Codes = 2 * pair_of(codes) + (codes & 1)
    return answers
