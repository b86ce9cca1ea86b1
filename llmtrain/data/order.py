"""Choose the rows of each step.

A slot is a position in the global batch. The row in slot ``j`` of step ``s`` depends only on (seed,
s, j). A sampler yields complete global batches, and knows neither ranks nor micro-batches. So the
parallel layout decides which rank computes a row, but never which rows a step holds.

The order of an epoch is a keyed bijection of ``range(n)`` instead of a shuffled list. So looking up
the row at position ``p`` of epoch ``e`` takes the same time for any ``p``, needs no memory, and
gives the same row on every machine.

Many shards are drawn in windows, so that few of them are open at a time: the shards come in a
random order, and only the rows of a window are mixed.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

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
# The number of batches whose rows are computed at once, and among which rows are grouped by length.
# More of them make the lengths in a batch more alike, and the batches of a small data set more
# similar from epoch to epoch.
BATCHES_PER_MEGABATCH = 50
WINDOW = 64  # the default number of shards whose rows are mixed


class Slot(NamedTuple):
    """A position in a global batch.

    Attributes:
        position: its number in the run: ``step * global_batch_size + j``.
        row: the number of its row. ``None`` after the end of an epoch: the slot is then padding,
            which has weight zero.
        source: in an evaluation, the number of the source whose rows the batch has.
        spare_row: the row that is read for padding, one of the same batch.
    """

    position: int
    row: int | None
    source: int = 0
    spare_row: int = 0


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

    rows = np.array(positions, _U64)
    outside = np.ones(rows.shape, bool)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        while outside.any():
            left = rows[outside] >> shift
            right = rows[outside] & mask
            for round_key in round_keys:
                mixed = mix(right ^ round_key) & mask
                left, right = right, left ^ mixed
            rows[outside] = (left << shift) | right
            outside = rows >= n
    return rows.astype(np.int64)


class Shuffle:
    """The order of rows in each epoch.

    With at most ``window`` shards, it is a permutation of all rows. Otherwise, the shards come in a
    random order and are divided evenly into windows of at most ``window`` shards. All rows of a
    window, in a random order, come before those of the next one.

    Args:
        shard_rows: the number of rows of each shard, in the stored order.
        window: the largest number of shards whose rows are mixed.
    """

    def __init__(self, shard_rows: Sequence[int] | np.ndarray, window: int) -> None:
        self.shard_rows = np.array(shard_rows)
        self.rows = int(self.shard_rows.sum())
        self.shards = len(shard_rows)
        self.windows = -(-self.shards // window)
        # How many shards come before each window.
        self._shards_before = np.arange(self.windows + 1) * self.shards // self.windows
        # Positions that are looked up together may be in two epochs.
        self._last_epochs = functools.lru_cache(maxsize=4)(self._windows_of)

    def rows_at(self, positions: np.ndarray, key: int) -> np.ndarray:
        """Return the rows at some positions of the epoch that has this key, both int64 [n]."""
        if self.windows == 1:
            return permute(positions, self.rows, key)

        borders, shard_ends, offsets, _ = self._last_epochs(key)
        windows = np.searchsorted(borders, positions, side="right") - 1
        rows = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            is_window = windows == window
            start, end = borders[window : window + 2].tolist()
            positions_in_window = positions[is_window] - start
            window_key = key_of(key, window + 1)
            rows[is_window] = start + permute(positions_in_window, end - start, window_key)
        rows += offsets[np.searchsorted(shard_ends, rows, side="right")]
        return rows

    def shards_at(self, position: int, key: int) -> list[int]:
        """Return the numbers of the shards of the window at a position of an epoch."""
        borders, _, _, order = self._last_epochs(key)
        window = int(np.searchsorted(borders, position, side="right")) - 1
        shards: list[int] = order[slice(*self._shards_before[window : window + 2])].tolist()
        return shards

    def _windows_of(self, key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Put the shards of an epoch in order, and divide them into windows.

        Returns:
            The position of the first row of each window, and the number of all rows. For each shard
            in this order, the position after its rows, and the number to add to the position of a
            row in this order to get its position in the stored order. The shards in this order.
        """
        order = permute(np.arange(self.shards), self.shards, key_of(key, 0))
        shard_ends = np.cumsum(self.shard_rows[order])
        offsets = np.cumsum(self.shard_rows)[order] - shard_ends
        return np.append(0, shard_ends)[self._shards_before], shard_ends, offsets, order


def shuffle_name(shard_counts: Sequence[int], window: int, by_length: bool) -> str:
    """Return a name for the order of shuffled rows, for the fingerprint of a run.

    Args:
        shard_counts: the number of shards of each source of a mixture, or of all sources together.
        window: the largest number of shards whose rows are mixed.
        by_length: whether rows are grouped by length.
    """
    windows = f" in windows of {window} shards" if max(shard_counts) > window else ""
    groups = f", grouped by length over {BATCHES_PER_MEGABATCH} batches" if by_length else ""
    return f"shuffled{windows}{groups}"


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
        shard_rows: the number of rows of each shard, in the stored order. A shard has rows of one
            source. Empty if each source is one shard.
        window: the largest number of shards of a source whose rows are mixed.

    Attributes:
        first_row: the number of each source's first row.
        shuffles: the order of each source's rows.
        counts: how many positions of a period each source has.
        source_at: int64 [period], the source of each position.
        rows_before: int64 [period], how many earlier positions of the period have the same source.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        shard_rows: Sequence[int] = (),
        window: int = WINDOW,
    ) -> None:
        self.sizes = sizes
        self.weights = [*weights]
        self.first_row = np.cumsum([0, *sizes])
        shard_rows = shard_rows or sizes
        shards_before = np.searchsorted(np.cumsum(shard_rows), self.first_row[1:-1], side="right")
        self.shuffles = [Shuffle(rows, window) for rows in np.split(shard_rows, shards_before)]
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
        """Return the rows at some positions of the run, int64 [n]; ``positions`` is int64 [n].

        Each source has its own epochs and, by the seed, its own order.
        """
        periods, positions_in_period = np.divmod(positions, len(self.source_at))
        rows = np.empty(len(positions), np.int64)
        for source, (shuffle, count) in enumerate(zip(self.shuffles, self.counts, strict=True)):
            is_source = self.source_at[positions_in_period] == source
            # How many rows of this source come before each position of the run.
            rows_before_in_period = self.rows_before[positions_in_period[is_source]]
            rows_before = periods[is_source] * count + rows_before_in_period
            epochs, positions_in_epoch = np.divmod(rows_before, shuffle.rows)

            rows_of_source = np.empty(len(rows_before), np.int64)
            for epoch in np.unique(epochs).tolist():
                is_epoch = epochs == epoch
                key = key_of(seed, epoch, source + 1)
                rows_of_source[is_epoch] = shuffle.rows_at(positions_in_epoch[is_epoch], key)
            rows[is_source] = self.first_row[source] + rows_of_source
        return rows

    def shards_at(self, position: int, seed: int) -> list[int]:
        """Return the numbers of the shards of each source's window at a position of the run."""
        period, position_in_period = divmod(position, len(self.source_at))
        shards = []
        first_shard = 0
        for source, (shuffle, count) in enumerate(zip(self.shuffles, self.counts, strict=True)):
            rows_before_in_period = (self.source_at[:position_in_period] == source).sum()
            rows_before = period * count + int(rows_before_in_period)
            epoch, position_in_epoch = divmod(rows_before, shuffle.rows)
            key = key_of(seed, epoch, source + 1)
            shards += [first_shard + shard for shard in shuffle.shards_at(position_in_epoch, key)]
            first_shard += shuffle.shards
        return shards


def counts_per_period(weights: Sequence[float]) -> list[int]:
    """Return how many positions of one period of a mixture each source has.

    Raises:
        UserError: if a weight is not a positive number, or if a source would have none.
    """
    exact = [Fraction(str(weight)) for weight in weights if 0 < weight < math.inf]
    if len(exact) < len(weights) or min(exact) * _MAX_PERIOD < sum(exact):
        raise UserError(
            f"--mixture {' '.join(map(str, weights))}: every number must be above 0, and at least "
            f"one in {_MAX_PERIOD} of their sum; give a larger one, or leave the data set out."
        )

    shares = [weight / sum(exact) for weight in exact]
    period = min(math.lcm(*(share.denominator for share in shares)), _MAX_PERIOD)
    counts = [int(share * period) for share in shares]
    # The positions that rounding down has left over go to the sources that lost most by it.
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    return counts


class GlobalBatchSampler:
    """Yields the global batch of every step in ``steps``.

    An epoch is ``ceil(n / global_batch_size)`` steps. Its last batch is filled up with empty slots.
    With a mixture, each source has its own epochs, which may end inside a batch, and no slot is
    empty.

    Args:
        n: the number of rows.
        global_batch_size: the number of slots.
        steps: the numbers of the steps, from 0.
        seed: chooses the order; ``None`` keeps the stored order.
        mixture: assigns positions of the run to sources. It needs a seed.
        lengths: int [n], the number of tokens in each unpacked row. With a seed, the rows of 50
            batches, a megabatch, are sorted by length, cut into batches, and these are drawn in a
            random order. The last megabatch of an epoch may have fewer batches.
        shard_rows: the number of rows of each shard, in the stored order; empty for one shard. A
            mixture has shards of its own.
        window: the largest number of shards whose rows are mixed.
        on_step: called with the number of each step before its batch is yielded, and at the end
            with ``None``.
    """

    drop_last = False  # Accelerate reads it

    def __init__(
        self,
        n: int,
        global_batch_size: int,
        steps: range,
        seed: int | None,
        mixture: Mixture | None = None,
        lengths: np.ndarray | None = None,
        shard_rows: Sequence[int] = (),
        window: int = WINDOW,
        on_step: Callable[["GlobalBatchSampler", int | None], None] | None = None,
    ) -> None:
        assert mixture is None or seed is not None, "a mixture is drawn at random, by a seed"
        self.n = n
        self.batch_size = global_batch_size
        self.steps = steps
        self.seed = seed
        self.mixture = mixture
        self.lengths = lengths
        self.on_step = on_step
        self.shuffle = Shuffle(shard_rows or [n], window)
        self._last_batches = functools.lru_cache(maxsize=1)(self._batches_of)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[Slot]]:
        for step in self.steps:
            if self.on_step is not None:
                self.on_step(self, step)
            yield self.slots_of(step)
        if self.on_step is not None:
            self.on_step(self, None)

    def slots_of(self, step: int) -> list[Slot]:
        """Return the global batch of a step."""
        epoch = 0
        step_of_epoch = step
        if self.mixture is None:
            steps_per_epoch = -(-self.n // self.batch_size)
            epoch, step_of_epoch = divmod(step, steps_per_epoch)

        megabatch, number = divmod(step_of_epoch, BATCHES_PER_MEGABATCH)
        rows: list[int | None] = self._last_batches(epoch, megabatch)[number].tolist()

        padding = [None] * (self.batch_size - len(rows))
        first_position = step * self.batch_size
        spare_row = rows[0]
        assert spare_row is not None, "a batch has a row"
        return [
            Slot(first_position + j, row, spare_row=spare_row)
            for j, row in enumerate([*rows, *padding])
        ]

    def shards_at(self, step: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the shards that a step may need, at its first and its last row.

        If rows are grouped by length, these are the rows of its megabatch.
        """
        assert self.seed is not None, "rows in their stored order have no windows"
        group = 1 if self.lengths is None else BATCHES_PER_MEGABATCH
        if self.mixture is not None:
            start = step // group * group * self.batch_size
            stop = start + group * self.batch_size
            return (
                self.mixture.shards_at(start, self.seed),
                self.mixture.shards_at(stop - 1, self.seed),
            )
        epoch, step_of_epoch = divmod(step, -(-self.n // self.batch_size))
        start = step_of_epoch // group * group * self.batch_size
        stop = min(start + group * self.batch_size, self.n)
        key = key_of(self.seed, epoch)
        return self.shuffle.shards_at(start, key), self.shuffle.shards_at(stop - 1, key)

    def _batches_of(self, epoch: int, megabatch: int) -> list[np.ndarray]:
        """Return the rows of each step of a megabatch; fewer ones at the end of an epoch."""
        size = BATCHES_PER_MEGABATCH * self.batch_size
        stop = (megabatch + 1) * size
        if self.mixture is None:
            stop = min(stop, self.n)
        positions = np.arange(megabatch * size, stop)
        borders = np.arange(self.batch_size, len(positions), self.batch_size)
        if self.seed is None:
            return np.split(positions, borders)

        if self.mixture is not None:
            rows = self.mixture.rows_at(positions, self.seed)
        else:
            rows = self.shuffle.rows_at(positions, key_of(self.seed, epoch))
        if self.lengths is None:
            return np.split(rows, borders)

        # The fourth value keeps this key distinct from those of the orders of rows, which have two
        # or three.
        key = key_of(self.seed, epoch, megabatch, len(borders) + 1)
        ascending = rows[np.argsort(self.lengths[rows], kind="stable")]
        count = -(-len(ascending) // self.batch_size)
        drawn = permute(np.arange(count), count, key)

        # Cut the sorted rows into batches, so that those of a micro-batch need little padding. The
        # batch that is drawn last has the rest of the rows. It is a random one: if it were always
        # cut from an end of the sorted rows, the last step of every epoch would have the shortest
        # or the longest rows.
        sizes = np.full(count, self.batch_size)
        sizes[drawn[-1]] = len(ascending) - (count - 1) * self.batch_size
        batches = np.split(ascending, np.cumsum(sizes)[:-1])

        # Every other batch is in descending order, so that no rank always has the longer rows.
        return [
            batches[number] if number % 2 == 0 else batches[number][::-1]
            for number in drawn.tolist()
        ]


class EvalSampler:
    """Yields every row once, in the stored order. No batch has rows of two sources.

    The position of a slot is the number of its row. Empty slots after the last row of a source
    count on from there, so the next source has the same positions again. Nothing depends on that:
    positions are for dropout, and an evaluation has none.

    Args:
        source_rows: the number of rows of each source.
        batch_size: the number of slots in a batch.
    """

    drop_last = False  # Accelerate reads it

    def __init__(self, source_rows: Sequence[int], batch_size: int) -> None:
        self.source_rows = source_rows
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-rows // self.batch_size) for rows in self.source_rows)

    def __iter__(self) -> Iterator[list[Slot]]:
        first = 0
        for source, rows in enumerate(self.source_rows):
            end = first + rows
            for start in range(first, end, self.batch_size):
                yield [
                    Slot(
                        position,
                        row=position if position < end else None,
                        source=source,
                        spare_row=start,
                    )
                    for position in range(start, start + self.batch_size)
                ]
            first = end
