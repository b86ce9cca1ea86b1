"""Load the rows of each step, and divide them into micro-batches.

Samplers yield the slots of complete global batches. Accelerate gives each rank its slice of them,
and :class:`LocalBatches` splits that slice into micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llmtrain.data.order import WINDOW, EvalSampler, GlobalBatchSampler, Mixture, Slot
from llmtrain.data.packing import LENGTHS, PREFERENCE_COLUMNS
from llmtrain.data.shard_cache import ReadAhead
from llmtrain.data.shards import TokenRows
from llmtrain.interfaces.batches import IGNORED, Batch, LocalBatch, Trimming, padded_size
from llmtrain.seeds import mix, seed_of

_MIN_POSITIONS = 8  # that the model computes of a trimmed row


def row_lengths(rows: TokenRows) -> np.ndarray | None:
    """Return the number of tokens in each unpacked row, int [rows]; ``None`` if rows are packed.

    If rows hold pairs of answers, it is the number of tokens in the longer answer.
    """
    if LENGTHS not in rows.column_names:
        return None
    lengths: np.ndarray = rows.column(LENGTHS).max(axis=1)
    return lengths


def trimmed_width(longest: int, full_width: int) -> int:
    """Return the number of tokens that a micro-batch of unpacked rows keeps of each row.

    The model computes all positions but the last, and their number is one of a few sizes. So
    compiled code meets few shapes.

    Args:
        longest: the number of tokens in the longest row.
        full_width: the number of tokens in a row with its padding.
    """
    return min(padded_size(longest - 1, smallest=_MIN_POSITIONS) + 1, full_width)


def count_shapes(rows: TokenRows) -> int:
    """Return how many shapes full micro-batches of some rows can have; 1 if rows are packed."""
    lengths = row_lengths(rows)
    if lengths is None:
        return 1
    longest = int(lengths.max())
    return len({trimmed_width(length, longest) for length in np.unique(lengths).tolist()})


class LocalBatches(Dataset[LocalBatch]):
    """The rows of slots, as micro-batches, so that nothing is left to collate.

    Each has ``input_ids`` and ``labels``, both int64 [micro_batch, block_size + 1]. Labels are not
    shifted. Packed rows also have ``position_ids`` of that shape, which restart at each document.

    Unpacked rows are trimmed to the longest of their micro-batch, up to one of a few sizes.

    Args:
        rows: the rows.
        micro_batch: the number of rows in a micro-batch.
        dropout_seed: from it, each row gets a key in the column ``dropout_keys``, int64
            [micro_batch]. ``None``: there is no such column.
        prepare: is called with each micro-batch, on the host.
    """

    def __init__(
        self,
        rows: TokenRows,
        micro_batch: int,
        dropout_seed: int | None = None,
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.micro_batch = micro_batch
        self.dropout_seed = dropout_seed
        self.prepare = prepare
        self.rows = rows

    def __getitems__(self, slots: list[Slot]) -> LocalBatch:
        """Return the micro-batches of slots."""
        arrays = self.read(slots)
        lengths = arrays.pop(LENGTHS, None)
        input_ids = arrays["input_ids"]
        labels = arrays["labels"]
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.dropout_seed is not None:
            keys = [seed_of(self.dropout_seed, slot.position) for slot in slots]
            columns["dropout_keys"] = torch.tensor(keys, dtype=torch.int64)

        rows = np.array([-1 if slot.row is None else slot.row for slot in slots])
        local_batch = LocalBatch(
            columns,
            self.micro_batch,
            rows=torch.from_numpy(rows),
            targets=torch.from_numpy((labels[:, 1:] != IGNORED).sum(axis=1)),
            token_fingerprint=fingerprint(input_ids[rows >= 0]),
            label_fingerprint=fingerprint(labels[rows >= 0]),
            trimming=None if lengths is None else self._trimming(lengths, labels.shape[1]),
            source=slots[0].source,
        )
        if self.prepare is None:
            return local_batch
        prepared = tuple(self.prepare(batch) for batch in local_batch.batches)
        return replace(local_batch, prepared=prepared)

    def read(self, slots: list[Slot]) -> dict[str, np.ndarray]:
        """Return the rows of slots by column, [slots, length]. An empty slot has no label."""
        # An empty slot reads another row of the batch. Its labels are removed below.
        is_empty = [slot.row is None for slot in slots]
        rows = [slot.spare_row if slot.row is None else slot.row for slot in slots]
        columns = self.rows.read(np.array(rows))
        for name, column in columns.items():
            if column.dtype.kind == "i":
                columns[name] = column.astype(np.int64)
            if name not in (*PREFERENCE_COLUMNS, "reference"):
                columns[name][is_empty] = 0
        # Rows of plain text have no column of labels: their tokens are the labels, too.
        labels = columns.setdefault("labels", columns["input_ids"])
        labels[is_empty] = IGNORED
        # Tokens of text are -100 after its end. Any token may replace them, if the labels do not.
        columns["input_ids"] = np.maximum(columns["input_ids"], 0)
        return columns

    def _trimming(self, lengths: np.ndarray, width: int) -> Trimming:
        """Return how much of their rows the micro-batches keep.

        Args:
            lengths: int [slots, parts], the number of tokens of unpacked rows, or of the halves of
                such rows.
            width: the number of tokens in a row with its padding.
        """
        slots, parts = lengths.shape
        widths = []
        for start in range(0, slots, self.micro_batch):
            longest = int(lengths[start : start + self.micro_batch].max())
            widths.append(trimmed_width(longest, width // parts))
        token_columns = sorted({*self.rows.column_names} - {LENGTHS, "reference"})
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
    rows: TokenRows,
    global_batch_size: int,
    micro_batch: int,
    steps: range,
    seed: int | None,
    dropout_seed: int | None = None,
    mixture: Mixture | None = None,
    prepare: Callable[[Batch], Batch] | None = None,
    pinned: bool = False,
    window: int = WINDOW,
) -> DataLoader[LocalBatch]:
    """Return a loader of training batches, for ``accelerator.prepare``.

    Starting at a late step costs nothing. Unpacked rows are grouped by length, unless they keep the
    stored order.

    Args:
        rows: the training rows.
        global_batch_size: the number of rows in a step, over all ranks.
        micro_batch: the largest number of rows in a micro-batch.
        steps: the numbers of the steps, from 0.
        seed: chooses the order of the rows; ``None`` keeps the stored order.
        dropout_seed: see :class:`LocalBatches`.
        mixture: assigns positions of the run to sources. It needs a seed.
        prepare: see :class:`LocalBatches`.
        pinned: use memory from which a GPU can copy while it computes.
        window: the largest number of shards whose rows are mixed.
    """
    sampler = GlobalBatchSampler(
        len(rows),
        global_batch_size,
        steps,
        seed,
        mixture=mixture,
        lengths=row_lengths(rows),
        shard_rows=rows.shard_rows,
        window=window,
        on_step=ReadAhead(rows.shards).begin_step,
    )
    return DataLoader(
        LocalBatches(rows, micro_batch, dropout_seed, prepare),
        batch_sampler=sampler,
        collate_fn=lambda local_batch: local_batch,
        pin_memory=pinned,
    )


def eval_loader(
    rows: TokenRows,
    processes: int,
    micro_batch: int,
    prepare: Callable[[Batch], Batch] | None = None,
    pinned: bool = False,
    source_rows: Sequence[int] = (),
    bitwise: bool = False,
) -> DataLoader[LocalBatch]:
    """Return a loader of every row once, in the stored order, for ``accelerator.prepare``.

    The last batch of each source is filled up with rows of weight zero. Micro-batches have up to a
    quarter fewer rows than ``micro_batch`` if that leaves fewer such rows to compute.

    Args:
        rows: the eval rows.
        processes: the number of ranks that divide a batch.
        micro_batch: the largest number of rows in a micro-batch.
        prepare: see :class:`LocalBatches`.
        pinned: use memory from which a GPU can copy while it computes.
        source_rows: the number of rows of each source, if there are several.
        bitwise: keep the size of micro-batches, which affects rounding, whatever ``processes`` is.
    """
    source_rows = source_rows or [len(rows)]
    batch_size = processes * micro_batch
    if not bitwise:
        # A smaller batch makes worse use of the device, so it has more than three quarters of the
        # rows. If several sizes leave equally few rows empty, the largest is chosen.
        batch_sizes = range(batch_size, processes * (micro_batch * 3 // 4), -processes)
        batch_size = min(batch_sizes, key=lambda size: sum(-count % size for count in source_rows))
    return DataLoader(
        LocalBatches(rows, micro_batch, prepare=prepare),
        batch_sampler=EvalSampler(source_rows, batch_size),
        collate_fn=lambda local_batch: local_batch,
        pin_memory=pinned,
    )
