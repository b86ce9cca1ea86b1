"""The order of the rows in an epoch, and the mixture of several data sets.

The order is a keyed bijection of ``range(n)`` instead of a shuffled list. So looking up the row at
position ``p`` of epoch ``e`` takes the same time for any ``p``, needs no memory, and gives the same
row on every machine.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from llmtrain.errors import UserError
from llmtrain.seeds import key_of, mix

# Half of the bits that the smallest permutation works on: 2**3 values for each half, because with
# fewer the key would choose among too few permutations.
_MIN_HALF_BITS = 3
_ROUNDS = 8
_U64 = np.uint64
# The largest number of positions after which a mixture repeats. Weights are exact to a thousandth.
_MAX_PERIOD = 1000


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the rows at some positions of a permutation of ``range(n)``.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the integers below the next power of
    four. A result outside ``range(n)`` goes through the network again until it is inside (cycle
    walking: Black & Rogaway 2002, CT-RSA), so the function stays a bijection.

    Args:
        positions: integers in ``range(n)``, any shape.
        n: the number of rows.
        key: chooses the permutation.

    Returns:
        int64, the same shape.
    """
    half_bits = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    shift = _U64(half_bits)
    mask = _U64((1 << half_bits) - 1)
    round_keys = [_U64(key_of(key, i)) for i in range(_ROUNDS)]

    def feistel(x: np.ndarray) -> np.ndarray:
        left = x >> shift
        right = x & mask
        for round_key in round_keys:
            mixed = mix(right ^ round_key) & mask
            left, right = right, left ^ mixed
        x = (left << shift) | right
        return x

    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        rows = feistel(np.atleast_1d(positions).astype(_U64))
        outside = rows >= n
        while outside.any():
            rows[outside] = feistel(rows[outside])
            outside = rows >= n
    return rows.astype(np.int64).reshape(np.shape(positions))


class Mixture:
    """Assigns each position of a run to one of several sources, in proportion to their weights.

    Each position goes to the source that is furthest behind its share (error diffusion). So every
    stretch of the run has the right proportions, to a row or two.

    The assignment repeats. Its period is the common denominator of the shares, or ``_MAX_PERIOD``
    if that is smaller. So the source and the row of a position follow from the position alone, on
    any parallel layout, and nothing before it has to be computed.

    Args:
        sizes: the number of rows of each source. The rows of all sources are numbered through.
        weights: the weight of each source. Their sum does not matter.

    Attributes:
        first_row: the number of each source's first row.
        counts: how many positions of a period each source has.
        source_at: int64 [period], the source of each position.
        rows_before: int64 [period], how many earlier positions of the period have the same source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self.sizes = sizes
        self.first_row = np.cumsum([0, *sizes])
        self.counts = counts_per_period(weights)
        period = sum(self.counts)
        self.source_at = np.zeros(period, np.int64)
        self.rows_before = np.zeros(period, np.int64)

        counts = np.array(self.counts)
        rows_so_far = np.zeros(len(counts), np.int64)
        for position in range(period):
            # How far each source is behind its share, times the period.
            deficits = counts * (position + 1) - rows_so_far * period
            source = np.argmax(deficits)
            self.source_at[position] = source
            self.rows_before[position] = rows_so_far[source]
            rows_so_far[source] += 1

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the numbers of the rows at some positions of the run.

        Each source has its own epochs and its own order.

        Args:
            positions: int64 [n].
            seed: chooses the orders.

        Returns:
            int64 [n].
        """
        periods, positions_in_period = np.divmod(positions, len(self.source_at))
        rows = np.empty(len(positions), np.int64)
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            is_source = self.source_at[positions_in_period] == source
            # How many rows of this source come before each position of the run.
            rows_before_in_period = self.rows_before[positions_in_period[is_source]]
            rows_before = periods[is_source] * count + rows_before_in_period
            epochs, positions_in_epoch = np.divmod(rows_before, size)

            rows_of_source = np.empty(len(rows_before), np.int64)
            for epoch in np.unique(epochs).tolist():
                is_epoch = epochs == epoch
                key = key_of(seed, epoch, source + 1)
                rows_of_source[is_epoch] = permute(positions_in_epoch[is_epoch], size, key)
            rows[is_source] = self.first_row[source] + rows_of_source
        return rows


def counts_per_period(weights: Sequence[float]) -> list[int]:
    """Return how many positions of one period of a mixture each source has.

    Raises:
        UserError: if a source would have none.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    if min(shares) < Fraction(1, _MAX_PERIOD):
        raise UserError(
            f"--mixture {' '.join(map(str, weights))}: a data set has a share below one in "
            f"{_MAX_PERIOD}, which is too small; give it a larger number, or leave it out."
        )

    period = min(lcm(*(share.denominator for share in shares)), _MAX_PERIOD)
    counts = [int(share * period) for share in shares]
    # The positions that rounding down has left over go to the sources that lost most by it.
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    return counts
