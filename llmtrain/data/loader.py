"""Token rows -> windows of micro-batches.

Slot ``j`` of the global batch of step ``s`` is fixed by (seed, s, j) alone. The sampler yields whole global batches and
knows neither ranks nor micro-batches; Accelerate gives each process its slice, and ``collate`` splits that slice into
the process's window. So the layout decides who computes a row, never which rows a step holds.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from llmtrain.contract import IGNORED, Batch, Window
from llmtrain.data.order import Mixture, key_of, mix, permute
from llmtrain.data.table import Rows, as_matrices

_POSITIONS_AT_ONCE = 4096


class Slot(NamedTuple):
    """One place of one global batch."""

    position: int  # counted over the whole run: step * global_batch_size + j
    row: int | None  # None: past the end of the epoch, a row of weight zero


class Read(NamedTuple):
    """The rows of some slots, one below the other."""

    slots: list[Slot]
    columns: dict[str, np.ndarray]  # [slots, block_size + 1]


def slots_of(
    step: int, n: int, global_batch_size: int, seed: int | None, mixture: Mixture | None = None
) -> list[Slot]:
    """Return the global batch of ``step`` over ``n`` rows; ``seed=None`` keeps the stored order.

    An epoch is ``ceil(n / global_batch_size)`` steps; its last batch is filled up with empty slots. With a ``mixture``
    each source has epochs of its own, which end where they end: no slot is empty.
    """
    first = step * global_batch_size
    if mixture is not None and seed is not None:
        rows = mixture.rows_at(np.arange(first, first + global_batch_size), seed)
    else:
        epoch, k = divmod(step, -(-n // global_batch_size))
        steps = max(_POSITIONS_AT_ONCE // global_batch_size, 1)
        block, place = divmod(k, steps)
        rows = _order(n, steps * global_batch_size, seed, epoch, block)[
            place * global_batch_size :
        ][:global_batch_size]
    padded: list[int | None] = [*rows.tolist(), *[None] * (global_batch_size - len(rows))]
    return [Slot(first + j, row) for j, row in enumerate(padded)]


@functools.lru_cache(maxsize=4)
def _order(n: int, size: int, seed: int | None, epoch: int, block: int) -> np.ndarray:
    """Return the rows at so many positions of an epoch; for several steps at once, which takes numpy no longer."""
    positions = np.arange(block * size, min((block + 1) * size, n))
    return positions if seed is None else permute(positions, n, key_of(seed, epoch))


class GlobalBatchSampler(Sampler[list[Slot]]):
    """Yields the global batch of every step in ``steps``."""

    drop_last = False  # Accelerate asks

    def __init__(
        self,
        n: int,
        global_batch_size: int,
        steps: range,
        seed: int | None,
        mixture: Mixture | None = None,
    ) -> None:
        self.n, self.batch_size, self.steps, self.seed, self.mixture = (
            n,
            global_batch_size,
            steps,
            seed,
            mixture,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[Slot]]:
        return (
            slots_of(step, self.n, self.batch_size, self.seed, self.mixture) for step in self.steps
        )


class HeldOutSampler(Sampler[list[Slot]]):
    """Yields every row once, in the stored order; no batch has rows of two sources, whose numbers ``parts`` has."""

    drop_last = False  # Accelerate asks

    def __init__(self, parts: Sequence[int], batch_size: int) -> None:
        self.parts, self.batch_size = parts, batch_size

    def __len__(self) -> int:
        return sum(-(-rows // self.batch_size) for rows in self.parts)

    def __iter__(self) -> Iterator[list[Slot]]:
        for first, rows in zip(
            itertools.accumulate(self.parts, initial=0), self.parts, strict=False
        ):
            for start in range(first, first + rows, self.batch_size):
                places = range(start, start + self.batch_size)
                yield [Slot(place, place if place < first + rows else None) for place in places]


class SlotRows(Dataset[Read]):
    """Token rows, read by slot.

    They come straight from memory-mapped columns: a ``datasets.Dataset`` takes ten times as long for a few rows.
    """

    def __init__(self, rows: Rows) -> None:
        assert getattr(rows, "_indices", None) is None, "a selection of rows is no table"
        self.columns = {name: as_matrices(rows.data.column(name)) for name in rows.column_names}
        lengths = [len(matrix) for matrix in next(iter(self.columns.values()))]
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths

    def __getitems__(self, slots: list[Slot]) -> Read:
        """Return the rows of slots, with ``labels``; an empty slot has no label."""
        rows = np.array([slot.row or 0 for slot in slots])
        chunks = np.searchsorted(self.ends, rows, side="right")
        places = list(zip(chunks.tolist(), (rows - self.starts[chunks]).tolist(), strict=True))
        columns = {
            name: np.stack([parts[chunk][row] for chunk, row in places])
            for name, parts in self.columns.items()
        }
        labels = columns.setdefault(
            "labels", columns["input_ids"]
        )  # a text's places are -100 where it has ended
        labels[[slot.row is None for slot in slots]] = IGNORED
        return Read(slots, columns)


class Collate:
    """Split a process's slice of the global batch into micro-batches.

    Each is ``input_ids`` and ``labels``, both int64 [micro_batch, block_size + 1]; labels are not shifted. Packed rows
    also have ``position_ids`` of that shape, which restart at each document. With ``dropout_seed`` each row carries its
    ``dropout_keys`` (int64 [micro_batch]). ``prepare`` is called with each, on the host.
    """

    def __init__(
        self,
        micro_batch: int,
        dropout_seed: int | None = None,
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.micro_batch, self.dropout_seed, self.prepare = micro_batch, dropout_seed, prepare

    def __call__(self, read: Read) -> Window:
        found = {
            name: one.astype(np.int64) if one.dtype.kind == "i" else one
            for name, one in read.columns.items()
        }
        rows = np.array([-1 if slot.row is None else slot.row for slot in read.slots])
        found["input_ids"] = np.maximum(found["input_ids"], 0)
        content = [fingerprint(found[name][rows >= 0]) for name in ("input_ids", "labels")]
        targets = (found["labels"][:, 1:] != IGNORED).sum(axis=1)
        columns = {name: torch.from_numpy(column) for name, column in found.items()}
        if self.dropout_seed is not None:
            keys = [
                key_of(self.dropout_seed, slot.position) >> 1 for slot in read.slots
            ]  # 63 bits fit in int64
            columns["dropout_keys"] = torch.tensor(keys, dtype=torch.int64)
        about = torch.from_numpy(rows), torch.from_numpy(targets), torch.tensor(content)
        window = Window(columns, self.micro_batch, *about)
        prepare = self.prepare
        return (
            window
            if prepare is None
            else replace(window, prepared=tuple(map(prepare, window.batches)))
        )


def fingerprint(rows: np.ndarray) -> int:
    """Return the fingerprint of tokens [rows, length]: the sum of a number below 2**31 for each row.

    Another token changes it. Rows have it in whatever order and on however many processes they come.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        places = mix(np.arange(1, rows.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
        sums = ((rows + 1).astype(np.uint64) * places).sum(axis=1, dtype=np.uint64)
        return int((mix(sums) >> np.uint64(33)).sum())


def train_loader(
    rows: Rows,
    global_batch_size: int,
    micro_batch: int,
    steps: range,
    seed: int | None,
    dropout_seed: int | None = None,
    mixture: Mixture | None = None,
    prepare: Callable[[Batch], Batch] | None = None,
    pinned: bool = False,
) -> DataLoader[Read]:
    """Return the windows of the given steps, for ``accelerator.prepare``; ``seed=None`` keeps the stored order.

    To start at any step costs nothing. From ``pinned`` memory a GPU copies while it computes.
    """
    sampler = GlobalBatchSampler(len(rows), global_batch_size, steps, seed, mixture)
    collate: Callable[..., Window] = Collate(micro_batch, dropout_seed, prepare)
    return DataLoader(SlotRows(rows), batch_sampler=sampler, collate_fn=collate, pin_memory=pinned)


def eval_loader(
    rows: Rows,
    processes: int,
    micro_batch: int,
    prepare: Callable[[Batch], Batch] | None = None,
    pinned: bool = False,
    parts: Sequence[int] = (),
) -> DataLoader[Read]:
    """Return every row once, in the stored order; the last batch of each source is filled up with rows of weight zero.

    ``parts`` are the rows of each source, where there are several. Micro-batches have up to a quarter fewer rows than
    ``micro_batch``, where fewer rows of weight zero are then computed.
    """
    parts = parts or [len(rows)]
    sizes = range(processes * micro_batch, processes * (micro_batch * 3 // 4), -processes)
    sampler = HeldOutSampler(
        parts, min(sizes, key=lambda size: sum(-count % size for count in parts))
    )
    collate: Callable[..., Window] = Collate(micro_batch, prepare=prepare)
    return DataLoader(SlotRows(rows), batch_sampler=sampler, collate_fn=collate, pin_memory=pinned)
