"""The order of the rows of an epoch, and of several sources: permutations that can be entered anywhere.

The order is a keyed bijection of ``range(n)`` rather than a shuffled list, so that position ``p`` of epoch ``e`` costs
the same at any ``p``, needs no memory and is the same on every machine.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from llmtrain.errors import UserError

# Half of a block: 2**3 values at least, so that the smallest permutations too are drawn from a rich enough family.
_MIN_HALF_BITS = 3
_ROUNDS = 8
_U64 = np.uint64
_FINEST = 1000  # the longest deal before it repeats: proportions are exact to a thousandth


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea & Flood 2014, OOPSLA): every input bit reaches every output bit."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    x = x ^ (x >> _U64(31))
    return x


def key_of(*numbers: int) -> int:
    """Return one 64-bit key from several integers, such as (seed, epoch)."""
    state = np.zeros(1, _U64)
    for number in numbers:
        state = mix(state + _U64(0x9E3779B97F4A7C15) + np.array([number & (2**64 - 1)], _U64))
    return int(state[0])


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the rows at ``positions`` of the permutation of ``range(n)`` that ``key`` chooses.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the next power of four; positions that land outside
    ``range(n)`` are sent through again until they fall inside (cycle walking: Black & Rogaway 2002, CT-RSA), which
    keeps it a bijection.

    Args:
        positions: integers in ``range(n)``, any shape.
    Returns:
        int64, the same shape.
    """
    half = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    mask, shift = _U64((1 << half) - 1), _U64(half)
    round_keys = [_U64(key_of(key, i)) for i in range(_ROUNDS)]

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        x = (left << shift) | right
        return x

    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        rows = feistel(np.atleast_1d(positions).astype(_U64))
        while (outside := rows >= n).any():
            rows[outside] = feistel(rows[outside])
    return rows.astype(np.int64).reshape(np.shape(positions))


class Mixture:
    """The places of a run dealt to its sources by error diffusion.

    Each place goes to the source that is furthest behind its share, so that any stretch of the run holds the
    proportions to a row or two.

    The deal repeats after as many places as the shares have for a common denominator, so any place is found without
    dealing the ones before it: by its position in the run alone, on any layout.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """Deal the places of a run to sources.

        Args:
            sizes: the rows of each source, which are numbered through.
            weights: the proportions of the sources, of any sum.
        """
        self.sizes = sizes
        self.first_row = np.cumsum([0, *sizes])
        self.counts = counts_of(weights)
        period, given = sum(self.counts), np.zeros(len(self.counts), np.int64)
        self.deal = np.zeros(period, np.int64)  # the source of each place
        self.earlier = np.zeros(period, np.int64)  # how many of its rows come before
        for place in range(period):
            source = self.deal[place] = np.argmax(
                np.array(self.counts) * (place + 1) - given * period
            )
            self.earlier[place] = given[source]
            given[source] += 1

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the row numbers (int64) at ``positions`` (int64) of the run.

        Each source has epochs and an order of its own.
        """
        rounds, places = np.divmod(positions, len(self.deal))
        rows = np.empty(len(positions), np.int64)
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            here = self.deal[places] == source
            epochs, order = np.divmod(rounds[here] * count + self.earlier[places[here]], size)
            found = np.empty(len(order), np.int64)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                found[now] = permute(order[now], size, key_of(seed, epoch, source + 1))
            rows[here] = self.first_row[source] + found
        return rows


def counts_of(weights: Sequence[float]) -> list[int]:
    """Return how many places of one deal each source has. Raises :class:`UserError` where one would have none."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    if min(shares) < Fraction(1, _FINEST):
        raise UserError(
            f"--mixture {' '.join(map(str, weights))}: a share below one in {_FINEST} cannot be drawn."
        )
    period = min(lcm(*(share.denominator for share in shares)), _FINEST)
    counts = [int(share * period) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    return counts
