"""Lengths of conversations: which ``--max_length`` holds most of them."""

from typing import NamedTuple

import numpy as np

from llmtrain.console import is_or_are
from llmtrain.errors import UserError

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


class OverlongLengths(NamedTuple):
    """How long the conversations are that do not fit in a row."""

    shortest: int
    median: int
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray, max_length: int) -> "OverlongLengths | None":
        """Summarise the lengths above ``max_length``; ``None`` if there are none.

        Args:
            lengths: int [conversations], the smallest ``--max_length`` that holds each.
            max_length: the value of ``--max_length``.
        """
        overlong = np.sort(lengths[lengths > max_length])
        if not len(overlong):
            return None
        median = overlong[len(overlong) // 2]
        return cls(shortest=int(overlong[0]), median=int(median), longest=int(overlong[-1]))

    def describe_lengths(self) -> str:
        """Return the lengths in words."""
        if self.shortest == self.longest:
            return f"{self.shortest:,} tokens"
        return f"{self.shortest:,} to {self.longest:,} tokens, median {self.median:,}"

    def describe(self, max_positions: int | None = None) -> str:
        """Return the lengths in words, and the ``--max_length`` that holds all of them.

        Args:
            max_positions: the number of positions of the model; ``None`` if there is no limit.
        """
        text = self.describe_lengths()
        if max_positions is not None and self.longest > max_positions:
            return f"{text}; the model has {max_positions:,} positions"
        return f"{text}; --max_length {self.longest} holds all of them"


def describe_overlong_count(lengths: np.ndarray, max_length: int, max_positions: int | None) -> str:
    """Return how many conversations are overlong, and which ``--max_length`` would hold them.

    Args:
        lengths: int [conversations], the smallest ``--max_length`` that holds each.
        max_length: the value of ``--max_length``.
        max_positions: the number of positions of the model; ``None`` if there is no limit.
    """
    overlong = OverlongLengths.of(lengths, max_length)
    if overlong is None:
        return "0 are overlong"
    count = int((lengths > max_length).sum())
    return f"{count:,} {is_or_are(count)} overlong: {overlong.describe(max_positions)}"


def check_not_all_overlong(
    lengths: np.ndarray,
    *,
    name: str,
    unit: str,
    max_length: int,
    max_positions: int | None,
) -> None:
    """Raise :class:`UserError` if all training conversations are overlong, and thus dropped.

    Args:
        lengths: int [conversations], the smallest ``--max_length`` that holds each.
        name: the data set, as it is named in ``--dataset``.
        unit: a word for what the lengths are of, in the singular.
        max_length: the value of ``--max_length``.
        max_positions: the number of positions of the model; ``None`` if there is no limit.
    """
    overlong = OverlongLengths.of(lengths, max_length)
    if overlong is None or (lengths <= max_length).any():
        return
    if len(lengths) == 1:
        units_are = f"the only {unit} is"
        units = unit
        all_of_them = "it"
    else:
        units_are = f"all {len(lengths):,} {unit}s are"
        units = f"{unit}s"
        all_of_them = "all of them"

    limit = f"--max_length {max_length}"
    if max_positions is not None and overlong.shortest > max_positions:
        limit = f"the model's {max_positions:,} positions"
        advice = (
            f"shorten the {units}, set --overlong truncate, or train a model with more positions"
        )
    elif max_positions is not None and overlong.longest > max_positions:
        advice = (
            f"set --max_length {max_positions}, all positions of the model, or --overlong truncate"
        )
    else:
        advice = f"set --max_length {overlong.longest}, which holds {all_of_them}"
    raise UserError(
        f"--dataset {name}: {units_are} longer than {limit} "
        f"({overlong.describe_lengths()}); {advice}."
    )


def ways_to_fit(length: int, max_positions: int | None) -> str:
    """Return what to do about an overlong conversation, besides leaving it out.

    Args:
        length: the smallest ``--max_length`` that holds it.
        max_positions: the number of positions of the model; ``None`` if there is no limit.
    """
    if max_positions is None or length <= max_positions:
        return "raise it"
    return f"the model has {max_positions:,} positions: shorten the record"


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
