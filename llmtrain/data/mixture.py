"""The rows of several sources in fixed proportions, at every place of the whole run."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from llmtrain.data.order import key_of, permute
from llmtrain.errors import UserError

_FINEST = 1000  # the longest deal before it repeats: proportions are exact to a thousandth


class Mixture:
    """The places of a run dealt to its sources by error diffusion: each place goes to the source that is furthest
    behind its share, so that any stretch of the run holds the proportions to a row or two.

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
            source = self.deal[place] = np.argmax(np.array(self.counts) * (place + 1) - given * period)
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
        raise UserError(f"--mixture {' '.join(map(str, weights))}: a share below one in {_FINEST} cannot be drawn.")
    period = min(lcm(*(share.denominator for share in shares)), _FINEST)
    counts = [int(share * period) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    return counts
