"""Load the rows of each step, and divide them into micro-batches.

Samplers yield the slots of complete global batches. Accelerate gives each rank its slice of them,
and :class:`Collate` splits that slice into micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llmtrain.data.grouping import LengthGrouping
from llmtrain.data.packing import LENGTHS, PREFERENCE_COLUMNS, Rows, as_matrices
from llmtrain.data.samplers import EvalSampler, GlobalBatchSampler, Slot, eval_batch_size
from llmtrain.data.shuffle import Mixture
from llmtrain.interfaces.batches import IGNORED, Batch, LocalBatch, Trimming
from llmtrain.padded_sizes import padded_size
from llmtrain.seeds import mix, seed_of

_MIN_POSITIONS = 8  # that the model computes of a trimmed row


class RowBatch(NamedTuple):
    """The rows of some slots, by column.

    Attributes:
        slots: the slots.
        columns: each [slots, block_size + 1], by name.
        lengths: int [slots, parts], the number of tokens of unpacked rows, or of the halves of such
            rows. It is 0 for an empty slot. ``None`` if rows are packed.
    """

    slots: list[Slot]
    columns: dict[str, np.ndarray]
    lengths: np.ndarray | None = None


class SlotRows(Dataset[RowBatch]):
    """Token rows, read by slot.

    They are read from memory-mapped columns. A ``datasets.Dataset`` takes ten times as long for a
    few rows.
    """

    def __init__(self, rows: Rows) -> None:
        # Dataset.select() keeps the table, and stores the selected rows as indices.
        assert getattr(rows, "_indices", None) is None, "rows must not be a selection of a table"
        # Arrow stores a column in chunks. So each column is a list of matrices [rows, length], one
        # for each chunk. All columns have the same chunks.
        self.columns = {name: as_matrices(rows.data.column(name)) for name in rows.column_names}
        first_column = next(iter(self.columns.values()))
        chunk_lengths = [len(matrix) for matrix in first_column]
        # Chunk i holds the rows from chunk_starts[i] to chunk_ends[i] - 1.
        self.chunk_ends = np.cumsum(chunk_lengths)
        self.chunk_starts = self.chunk_ends - chunk_lengths

    def __getitems__(self, slots: list[Slot]) -> RowBatch:
        """Return the rows of slots, with ``labels``; an empty slot has no label."""
        # An empty slot reads row 0. Its labels are removed below.
        rows = np.array([slot.row or 0 for slot in slots])
        chunks = np.searchsorted(self.chunk_ends, rows, side="right")
        rows_in_chunks = rows - self.chunk_starts[chunks]
        columns = {}
        for name, matrices in self.columns.items():
            indices = zip(chunks.tolist(), rows_in_chunks.tolist(), strict=True)
            columns[name] = np.stack([matrices[chunk][row] for chunk, row in indices])

        is_empty = [slot.row is None for slot in slots]
        lengths = columns.pop(LENGTHS, None)
        if lengths is not None:
            lengths[is_empty] = 0

        # Rows of plain text have no column of labels: their tokens are the labels, too, and are
        # -100 after the end of the text. Both names then stand for the same array, which is not
        # copied. So an empty slot gets -100 as its inputs, too; Collate replaces them.
        labels = columns.setdefault("labels", columns["input_ids"])
        labels[is_empty] = IGNORED
        return RowBatch(slots, columns, lengths)


def row_lengths(rows: Rows) -> np.ndarray | None:
    """Return the number of tokens in each unpacked row, int [rows]; ``None`` if rows are packed.

    If rows hold pairs of answers, it is the number of tokens in the longer answer.
    """
    if LENGTHS not in rows.column_names:
        return None
    matrices = as_matrices(rows.data.column(LENGTHS))
    return np.concatenate([matrix.max(axis=1) for matrix in matrices])


def trimmed_width(longest: int, full_width: int) -> int:
    """Return the number of tokens that a micro-batch of unpacked rows keeps of each row.

    The model computes all positions but the last, and their number is one of a few sizes. So
    compiled code meets few shapes.

    Args:
        longest: the number of tokens in the longest row.
        full_width: the number of tokens in a row with its padding.
    """
    return min(_padded_positions(longest) + 1, full_width)


def _padded_positions(length: int) -> int:
    """Return how many positions of a row with ``length`` tokens are computed: all but the last."""
    return padded_size(length - 1, smallest=_MIN_POSITIONS)


def count_shapes(rows: Rows) -> int:
    """Return how many shapes full micro-batches of some rows can have; 1 if rows are packed."""
    lengths = row_lengths(rows)
    if lengths is None:
        return 1
    return len({_padded_positions(length) for length in np.unique(lengths).tolist()})


class Collate:
    """Splits a rank's slice of the global batch into micro-batches.

    Each has ``input_ids`` and ``labels``, both int64 [micro_batch, block_size + 1]. Labels are not
    shifted. Packed rows also have ``position_ids`` of that shape, which restart at each document.

    Unpacked rows are trimmed to the longest of their micro-batch, up to one of a few sizes.

    Args:
        micro_batch: the number of rows in a micro-batch.
        dropout_seed: from it, each row gets a key in the column ``dropout_keys``, int64
            [micro_batch]. ``None``: there is no such column.
        prepare: is called with each micro-batch, on the host.
    """

    def __init__(
        self,
        micro_batch: int,
        dropout_seed: int | None = None,
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.micro_batch = micro_batch
        self.dropout_seed = dropout_seed
        self.prepare = prepare

    def __call__(self, row_batch: RowBatch) -> LocalBatch:
        arrays = {}
        for name, column in row_batch.columns.items():
            arrays[name] = column.astype(np.int64) if column.dtype.kind == "i" else column
        # Inputs of plain text are -100 in empty slots and after the end of the text: there they are
        # the labels (see SlotRows). Any token may replace them, because those labels stay -100.
        arrays["input_ids"] = np.maximum(arrays["input_ids"], 0)
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.dropout_seed is not None:
            keys = [seed_of(self.dropout_seed, slot.position) for slot in row_batch.slots]
            columns["dropout_keys"] = torch.tensor(keys, dtype=torch.int64)

        rows = np.array([-1 if slot.row is None else slot.row for slot in row_batch.slots])
        is_row = rows >= 0
        targets = (arrays["labels"][:, 1:] != IGNORED).sum(axis=1)
        local_batch = LocalBatch(
            columns,
            self.micro_batch,
            rows=torch.from_numpy(rows),
            targets=torch.from_numpy(targets),
            token_fingerprint=fingerprint(arrays["input_ids"][is_row]),
            label_fingerprint=fingerprint(arrays["labels"][is_row]),
            trimming=self._trimming(row_batch),
            source=row_batch.slots[0].source,
        )
        if self.prepare is None:
            return local_batch
        prepared = tuple(self.prepare(batch) for batch in local_batch.batches)
        return replace(local_batch, prepared=prepared)

    def _trimming(self, row_batch: RowBatch) -> Trimming | None:
        """Return how much of their rows the micro-batches keep; ``None`` if rows are packed."""
        if row_batch.lengths is None:
            return None
        rows, parts = row_batch.lengths.shape
        full_width = row_batch.columns["labels"].shape[1] // parts

        widths = []
        for start in range(0, rows, self.micro_batch):
            longest = int(row_batch.lengths[start : start + self.micro_batch].max())
            widths.append(trimmed_width(longest, full_width))

        token_columns = [name for name in PREFERENCE_COLUMNS if name in row_batch.columns]
        return Trimming(columns=tuple(token_columns), parts=parts, widths=tuple(widths))


def fingerprint(rows: np.ndarray) -> int:
    """Return the fingerprint of tokens [rows, length].

    It is a sum of a number below 2**31 for each row. It changes with any token. It does not depend
    on the order of the rows, or on how they are divided among ranks.
    """
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        # Each index in a row has its own factor, so the order of the tokens counts. The factors are
        # odd, because a product with an odd number changes whenever the token does.
        factors = mix(np.arange(1, rows.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
        # 1 is added so that token 0 counts, too. A label of -100 becomes a large number.
        sums = ((rows + 1).astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        # Each row adds the upper 31 bits of its mixed sum. Float64 holds a sum of 2**22 of these.
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
) -> DataLoader[RowBatch]:
    """Return a loader of training batches, for ``accelerator.prepare``.

    Starting at a late step costs nothing. Unpacked rows are grouped by length, unless they keep the
    stored order.

    Args:
        rows: the training rows.
        global_batch_size: the number of rows in a step, over all ranks.
        micro_batch: the largest number of rows in a micro-batch.
        steps: the numbers of the steps, from 0.
        seed: chooses the order of the rows; ``None`` keeps the stored order.
        dropout_seed: see :class:`Collate`.
        mixture: assigns positions of the run to sources. It needs a seed.
        prepare: see :class:`Collate`.
        pinned: use memory from which a GPU can copy while it computes.
    """
    lengths = row_lengths(rows)
    sampler = GlobalBatchSampler(
        len(rows),
        global_batch_size,
        steps,
        seed,
        mixture=mixture,
        grouping=None if lengths is None else LengthGrouping(lengths),
    )
    collate: Callable[..., LocalBatch] = Collate(micro_batch, dropout_seed, prepare)
    return DataLoader(SlotRows(rows), batch_sampler=sampler, collate_fn=collate, pin_memory=pinned)


def eval_loader(
    rows: Rows,
    processes: int,
    micro_batch: int,
    prepare: Callable[[Batch], Batch] | None = None,
    pinned: bool = False,
    source_rows: Sequence[int] = (),
    bitwise: bool = False,
) -> DataLoader[RowBatch]:
    """Return a loader of every row once, in the stored order, for ``accelerator.prepare``.

    The last batch of each source is filled up with rows of weight zero. Micro-batches have up to a
    quarter fewer rows than ``micro_batch`` if that leaves fewer such rows to compute.

    Args:
        rows: the eval rows.
        processes: the number of ranks that divide a batch.
        micro_batch: the largest number of rows in a micro-batch.
        prepare: see :class:`Collate`.
        pinned: use memory from which a GPU can copy while it computes.
        source_rows: the number of rows of each source, if there are several.
        bitwise: keep the size of micro-batches, which affects rounding, whatever ``processes`` is.
    """
    source_rows = source_rows or [len(rows)]
    if bitwise:
        batch_size = processes * micro_batch
    else:
        batch_size = eval_batch_size(source_rows, processes, micro_batch)
    sampler = EvalSampler(source_rows, batch_size)
    collate: Callable[..., LocalBatch] = Collate(micro_batch, prepare=prepare)
    return DataLoader(SlotRows(rows), batch_sampler=sampler, collate_fn=collate, pin_memory=pinned)
