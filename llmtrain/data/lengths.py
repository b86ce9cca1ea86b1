"""Lengths of conversations: which ``--max_length`` holds most of them."""

from typing import NamedTuple

import numpy as np

# --max_length auto holds this share of the conversations. A larger --max_length is suggested if the
# chosen one holds fewer.
_COVERED_SHARE = 0.995
_MULTIPLE = 64  # that --max_length auto is rounded up to
_SMALLEST_BIN = 64  # the histogram's first bin ends here; each further bin is twice as long


class LengthSummary(NamedTuple):
    """How long the training conversations are, or the answers with their prompts.

    Attributes:
        covering: the smallest multiple of 64 that is long enough for 99.5 % of them.
        histogram: how many there are in each bin. The first bin ends at 64 tokens, and each
            further bin at twice the length.
    """

    covering: int = 0
    histogram: tuple[int, ...] = ()

    @property
    def conversations(self) -> int:
        """The number of conversations."""
        return sum(self.histogram)

    def describe(self) -> str:
        """Return the histogram in words."""
        shares = []
        for i, count in enumerate(self.histogram):
            if count:
                shares.append(f"{count / self.conversations:.1%} up to {_SMALLEST_BIN << i:,}")
        return ", ".join(shares)

    def advice(self, overlong: int, max_length: int, max_positions: int | None) -> str | None:
        """Return a line that names a better ``--max_length``, if too many are longer.

        Args:
            overlong: how many conversations are longer than ``max_length``.
            max_length: the value of ``--max_length``.
            max_positions: the number of positions of the model; ``None`` if there is no limit.
        """
        if overlong <= (1 - _COVERED_SHARE) * self.conversations:
            return None
        if max_positions is None or self.covering <= max_positions:
            better = f"--max_length {self.covering} holds {_COVERED_SHARE:.1%} of them"
        elif max_length < max_positions:
            better = f"--max_length {max_positions}, all positions of the model, holds more"
        else:
            better = "the model has no more positions"
        return (
            f"{overlong / self.conversations:.1%} are longer than --max_length {max_length:,}; "
            f"{better}; {self.describe()} tokens"
        )


def describe_overlong_count(overlong: int, covering_length: int) -> str:
    """Return how many conversations are overlong, and which ``--max_length`` would hold them.

    Args:
        overlong: how many there are.
        covering_length: the value of ``--max_length`` that would hold almost all conversations.
    """
    if not overlong:
        return "0 are overlong"
    return f"{overlong:,} are overlong, for which --max_length {covering_length} would do"


def summarize_lengths(lengths: np.ndarray) -> LengthSummary:
    """Summarise the lengths of conversations.

    Args:
        lengths: int [conversations], the smallest ``--max_length`` that holds each.
    """
    if not len(lengths):
        return LengthSummary()
    index = int(np.ceil(len(lengths) * _COVERED_SHARE)) - 1
    quantile = int(np.partition(lengths, index)[index])
    covering = -(-max(quantile, 1) // _MULTIPLE) * _MULTIPLE

    bins = np.ceil(np.log2(np.maximum(lengths, 1) / _SMALLEST_BIN)).clip(0).astype(np.int64)
    return LengthSummary(covering, tuple(np.bincount(bins).tolist()))
