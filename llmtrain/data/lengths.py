"""Lengths of examples: how many are overlong, and which ``--max_length`` holds most of them."""

import numpy as np

from llmtrain.console import is_or_are
from llmtrain.errors import UserError

# --max_length auto holds this share of the examples. A larger --max_length is suggested if the
# chosen one holds fewer.
COVERED_SHARE = 0.995
_MULTIPLE = 64  # that --max_length auto is rounded up to


def covering_length(lengths: np.ndarray) -> int:
    """Return the smallest multiple of 64 that holds 99.5 % of the examples; 0 if there are none.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
    """
    if not len(lengths):
        return 0
    index = int(np.ceil(len(lengths) * COVERED_SHARE)) - 1
    quantile = int(np.partition(lengths, index)[index])
    return -(-max(quantile, 1) // _MULTIPLE) * _MULTIPLE


def describe_overlong(lengths: np.ndarray, max_length: int) -> str:
    """Return how many examples are overlong, and which ``--max_length`` holds most of them.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
        max_length: the value of ``--max_length``.
    """
    overlong = int((lengths > max_length).sum())
    if not overlong:
        return "0 are overlong"
    return overlong_sentence(overlong, len(lengths), max_length, covering_length(lengths))


def overlong_sentence(overlong: int, examples: int, max_length: int, covering: int) -> str:
    """Return how many examples are overlong, and which ``--max_length`` holds most of them."""
    return (
        f"{overlong:,} of {examples:,} {is_or_are(overlong)} longer than --max_length "
        f"{max_length:,}; --max_length {covering} holds {COVERED_SHARE:.1%}"
    )


def check_not_all_overlong(lengths: np.ndarray, name: str, unit: str, max_length: int) -> None:
    """Raise :class:`UserError` if all training examples are overlong, and thus dropped.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
        name: the data set, as it is named in ``--dataset``.
        unit: a word for an example, in the singular.
        max_length: the value of ``--max_length``.
    """
    if not len(lengths) or (lengths <= max_length).any():
        return
    units_are = f"the only {unit} is" if len(lengths) == 1 else f"all {len(lengths):,} {unit}s are"
    raise UserError(
        f"--dataset {name}: {units_are} longer than --max_length {max_length}; set --max_length "
        f"{covering_length(lengths)}, or --overlong truncate."
    )
