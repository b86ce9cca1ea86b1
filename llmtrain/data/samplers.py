"""Choose the rows of each step.

A slot is a position in the global batch. The row in slot ``j`` of step ``s`` depends only on (seed,
s, j). A sampler yields complete global batches, and knows neither ranks nor micro-batches. So the
parallel layout decides which rank computes a row, but never which rows a step holds.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from llmtrain.data.grouping import LengthGrouping
from llmtrain.data.shuffle import Mixture, permute
from llmtrain.seeds import key_of

_POSITIONS_PER_CHUNK = 4096  # for which one call computes the order


class Slot(NamedTuple):
    """A position in a global batch.

    Attributes:
        position: its number in the run: ``step * global_batch_size + j``.
        row: the number of its row. ``None`` after the end of an epoch: the slot is then padding,
            which has weight zero.
        source: in an evaluation, the number of the source whose rows the batch has.
    """

    position: int
    row: int | None
    source: int = 0


def slots_of(
    step: int,
    n: int,
    global_batch_size: int,
    seed: int | None,
    mixture: Mixture | None = None,
    grouping: LengthGrouping | None = None,
) -> list[Slot]:
    """Return the global batch of a step.

    An epoch is ``ceil(n / global_batch_size)`` steps. Its last batch is filled up with empty slots.
    With a ``mixture`` each source has its own epochs, which may end inside a batch, and no slot is
    empty. Without a seed, rows follow in their stored order, and a grouping is not used.

    Args:
        step: the number of the step, from 0.
        n: the number of rows.
        global_batch_size: the number of slots.
        seed: chooses the order; ``None`` keeps the stored order.
        mixture: assigns positions of the run to sources. It needs a seed.
        grouping: gives each batch rows of similar length, if there is a seed.
    """
    assert mixture is None or seed is not None, "a mixture is drawn at random, by a seed"
    first_position = step * global_batch_size
    if grouping is not None and seed is not None:
        rows = grouping.rows_of_step(step, global_batch_size, seed, mixture)
    elif mixture is not None and seed is not None:
        positions = np.arange(first_position, first_position + global_batch_size)
        rows = mixture.rows_at(positions, seed)
    else:
        rows = _rows_of_epoch(step, n, global_batch_size, seed)

    padding = [None] * (global_batch_size - len(rows))
    padded: list[int | None] = [*rows.tolist(), *padding]
    return [Slot(first_position + j, row) for j, row in enumerate(padded)]


def _rows_of_epoch(step: int, n: int, global_batch_size: int, seed: int | None) -> np.ndarray:
    """Return the rows of a step; fewer than a batch at the end of an epoch."""
    steps_per_epoch = -(-n // global_batch_size)
    epoch, step_of_epoch = divmod(step, steps_per_epoch)

    # The order is computed for several steps at once, which takes numpy no longer than for one.
    steps_per_chunk = max(_POSITIONS_PER_CHUNK // global_batch_size, 1)
    chunk, step_of_chunk = divmod(step_of_epoch, steps_per_chunk)
    rows = _rows_of_chunk(n, steps_per_chunk * global_batch_size, seed, epoch, chunk)
    start = step_of_chunk * global_batch_size
    return rows[start : start + global_batch_size]


@functools.lru_cache(maxsize=4)
def _rows_of_chunk(n: int, size: int, seed: int | None, epoch: int, chunk: int) -> np.ndarray:
    """Return the rows of a chunk of an epoch. The last chunk may have fewer than ``size``."""
    positions = np.arange(chunk * size, min((chunk + 1) * size, n))
    return positions if seed is None else permute(positions, n, key_of(seed, epoch))


class GlobalBatchSampler(Sampler[list[Slot]]):
    """Yields the global batch of every step in ``steps``."""

    drop_last = False  # Accelerate reads it

    def __init__(
        self,
        n: int,
        global_batch_size: int,
        steps: range,
        seed: int | None,
        mixture: Mixture | None = None,
        grouping: LengthGrouping | None = None,
    ) -> None:
        self.n = n
        self.batch_size = global_batch_size
        self.steps = steps
        self.seed = seed
        self.mixture = mixture
        self.grouping = grouping

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[Slot]]:
        for step in self.steps:
            yield slots_of(
                step,
                self.n,
                self.batch_size,
                self.seed,
                mixture=self.mixture,
                grouping=self.grouping,
            )


class EvalSampler(Sampler[list[Slot]]):
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
                    Slot(position, row=position if position < end else None, source=source)
                    for position in range(start, start + self.batch_size)
                ]
            first = end


def eval_batch_size(source_rows: Sequence[int], processes: int, micro_batch: int) -> int:
    """Return the number of slots in an eval batch that leaves the fewest empty rows to compute.

    A smaller batch may leave fewer empty rows, but makes worse use of the device. So the result is
    more than three quarters of the largest size, ``processes * micro_batch``. If several sizes
    leave equally few empty rows, the largest is chosen.

    Args:
        source_rows: the number of rows of each source.
        processes: the number of ranks that divide a batch; the result is a multiple of it.
        micro_batch: the largest number of rows in a micro-batch.
    """

    def empty_rows(batch_size: int) -> int:
        return sum(-count % batch_size for count in source_rows)

    largest = processes * micro_batch
    below_smallest = processes * (micro_batch * 3 // 4)
    return min(range(largest, below_smallest, -processes), key=empty_rows)
