"""Several sources in fixed proportions: which of their rows stands at which place of the whole run."""

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
        """``sizes``: rows of each source, which are numbered through; ``weights``: their proportions, of any sum."""
        self.sizes = sizes
        self.first_row = np.cumsum([0, *sizes])
        self.deal = _dealt(parts_of(weights))
        # of each source: how many of its rows come in the deal before each place
        self.earlier = [np.cumsum(self.deal == source) - (self.deal == source) for source in range(len(sizes))]

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Row numbers (int64) at ``positions`` (int64) of the run. Each source has epochs and an order of its own."""
        rounds, places = np.divmod(positions, len(self.deal))
        rows = np.empty(len(positions), np.int64)
        for source, size in enumerate(self.sizes):
            here = self.deal[places] == source
            drawn = rounds[here] * int((self.deal == source).sum()) + self.earlier[source][places[here]]
            epochs, order = np.divmod(drawn, size)
            found = np.empty(len(drawn), np.int64)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                found[now] = permute(order[now], size, key_of(seed, epoch, source + 1))
            rows[here] = self.first_row[source] + found
        return rows


def parts_of(weights: Sequence[float]) -> list[int]:
    """How many places of one deal each source has. Raises :class:`UserError` where one would have none."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    if min(shares) < Fraction(1, _FINEST):
        raise UserError(f"--mixture {' '.join(map(str, weights))}: a share below one in {_FINEST} cannot be drawn.")
    period = min(lcm(*(share.denominator for share in shares)), _FINEST)
    parts = [int(share * period) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * period)
    for i in by_remainder[: period - sum(parts)]:
        parts[i] += 1
    return parts


def _dealt(parts: Sequence[int]) -> np.ndarray:
    """The source of each place of one deal: int64 [sum of parts]."""
    period, given = sum(parts), np.zeros(len(parts), np.int64)
    deal = []
    for place in range(1, period + 1):
        source = int(np.argmax(np.array(parts) * place - given * period))
        given[source] += 1
        deal.append(source)
    return np.array(deal)
