"""Group unpacked rows by length, so that the rows of a micro-batch need little padding.

The rows of 50 global batches, a megabatch, are sorted by length. The sorted rows are cut into
global batches, and the batches are drawn in a random order. Megabatches follow each other through
an epoch, so every row is still drawn once per epoch. The last megabatch of an epoch may have fewer
batches.

The rows of a megabatch follow from (seed, epoch, megabatch), so any step can be looked up without
those before it.
"""

from typing import NamedTuple

import numpy as np

from llmtrain.data.shuffle import Mixture, permute
from llmtrain.seeds import key_of

# More batches in a megabatch make the lengths in a batch more alike, and the batches of a small
# data set more similar from epoch to epoch.
BATCHES_PER_MEGABATCH = 50


class _MegabatchKey(NamedTuple):
    """Everything that the batches of a megabatch follow from.

    Attributes:
        global_batch_size: the number of rows in a batch.
        seed: of the run.
        mixture: assigns positions of the run to sources. A run with a mixture has one epoch.
        epoch: the number of the epoch.
        megabatch: the number of the megabatch in the epoch.
    """

    global_batch_size: int
    seed: int
    mixture: Mixture | None
    epoch: int
    megabatch: int


class LengthGrouping:
    """Chooses the rows of each global batch, which have similar lengths.

    Args:
        lengths: int [rows], the number of tokens in each row. If rows hold pairs of answers, it is
            the number of tokens in the longer answer.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        # Consecutive steps are in the same megabatch, so the last megabatch is kept.
        self._last_key: _MegabatchKey | None = None
        self._last_batches: list[np.ndarray] = []

    def rows_of_step(
        self, step: int, global_batch_size: int, seed: int, mixture: Mixture | None = None
    ) -> np.ndarray:
        """Return the rows of a global batch, int64 [rows].

        The last batch of an epoch is the only one that may have fewer than ``global_batch_size``.

        Args:
            step: the number of the step, from 0.
            global_batch_size: the number of rows in a full batch.
            seed: chooses the order.
            mixture: assigns positions of the run to sources. There is then no end of an epoch.
        """
        if mixture is None:
            steps_per_epoch = -(-len(self.lengths) // global_batch_size)
            epoch, step_of_epoch = divmod(step, steps_per_epoch)
        else:
            epoch = 0
            step_of_epoch = step
        megabatch, batch = divmod(step_of_epoch, BATCHES_PER_MEGABATCH)

        key = _MegabatchKey(global_batch_size, seed, mixture, epoch, megabatch)
        if key != self._last_key:
            self._last_batches = self._batches_of(key)
            self._last_key = key
        return self._last_batches[batch]

    def _batches_of(self, key: _MegabatchKey) -> list[np.ndarray]:
        """Return the rows of each batch of a megabatch, in the order of the steps."""
        size = BATCHES_PER_MEGABATCH * key.global_batch_size
        start = key.megabatch * size
        if key.mixture is None:
            n = len(self.lengths)
            positions = np.arange(start, min(start + size, n))
            rows = permute(positions, n, key_of(key.seed, key.epoch))
        else:
            rows = key.mixture.rows_at(np.arange(start, start + size), key.seed)

        ascending = rows[np.argsort(self.lengths[rows], kind="stable")]
        count = -(-len(rows) // key.global_batch_size)
        # The key of four numbers differs from all keys of orders of rows, which have two or three.
        drawn = permute(np.arange(count), count, key_of(key.seed, key.epoch, key.megabatch, count))

        # The batch that is drawn last has the rest of the rows. It is a random one: if it were
        # always cut from an end of the sorted rows, the last step of every epoch would have the
        # shortest or the longest rows.
        sizes = np.full(count, key.global_batch_size)
        sizes[drawn[-1]] = len(rows) - (count - 1) * key.global_batch_size
        batches = np.split(ascending, np.cumsum(sizes)[:-1])

        # Every other batch is in descending order, so that no rank always has the longer rows.
        return [
            batches[number] if number % 2 == 0 else batches[number][::-1]
            for number in drawn.tolist()
        ]
