"""Batches of rows: the columns of a micro-batch, and a rank's share of a global batch."""

from __future__ import annotations  # so that annotations do not import torch

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

# A label that is not trained on, the default of cross_entropy. In a stored row, padding.
IGNORED = -100
# The columns of a micro-batch: tensors, and what the model's `prepare_batch` has returned.
Batch: TypeAlias = dict[str, Any]


class Trimming(NamedTuple):
    """How much of their rows micro-batches keep. An unpacked row ends in padding.

    A row of preference data has two halves, one for each answer, and each half ends in padding.

    Attributes:
        columns: the names of the columns with values for each token, which are trimmed:
            [rows, length] or [rows, length, k].
        parts: 2 if rows have two halves, otherwise 1.
        widths: for each micro-batch, the number of tokens that it keeps of each part.
    """

    columns: tuple[str, ...]
    parts: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's share of a global batch, as micro-batches.

    Attributes:
        columns: the columns of all rows, one micro-batch after the other. They go to the device.
            Rows are not trimmed here.
        micro_batch: rows of a micro-batch.
        rows: int64 [rows], the number of each row in the data set; -1 if the row is padding.
        targets: int64 [rows], the number of target tokens of each row.
        token_fingerprint: a hash of the tokens. Those of all ranks add up to the hash of the
            global batch.
        label_fingerprint: the same for the labels.
        prepared: what the model's ``prepare_batch`` returned for each micro-batch.
        trimming: how much of their rows the micro-batches keep; ``None`` if they keep everything.
        source: in an evaluation, the number of the source whose rows this batch has.
    """

    columns: dict[str, torch.Tensor]
    micro_batch: int
    rows: torch.Tensor
    targets: torch.Tensor
    token_fingerprint: int
    label_fingerprint: int
    prepared: tuple[Batch, ...] = ()
    trimming: Trimming | None = None
    source: int = 0

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        batches: list[Batch] = []
        for start in range(0, len(self.columns["labels"]), self.micro_batch):
            end = start + self.micro_batch
            batch = {name: column[start:end] for name, column in self.columns.items()}
            index = len(batches)
            if self.trimming is not None:
                width = self.trimming.widths[index]
                for name in self.trimming.columns:
                    column = batch[name]
                    parts = column.reshape(len(column), self.trimming.parts, -1, *column.shape[2:])
                    batch[name] = parts[:, :, :width].flatten(1, 2).contiguous()
            if self.prepared:
                batch |= self.prepared[index]
            batches.append(batch)
        return batches

    @property
    def positions(self) -> int:
        """Number of positions that the model computes, with or without a loss."""
        labels = self.columns["labels"]
        if self.trimming is None:
            return labels[:, 1:].numel()

        positions = 0
        for index, width in enumerate(self.trimming.widths):
            rows = min(self.micro_batch, len(labels) - index * self.micro_batch)
            # Each part is a row of the model, whose last token has no target.
            positions += rows * self.trimming.parts * (width - 1)
        return positions

    def to(self, device: torch.device, non_blocking: bool = False) -> LocalBatch:
        """Return the batch on a device; Accelerate calls this."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LocalBatch:
        """Return the batch in pinned memory, for asynchronous copies; torch calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, move: Callable[[Any], Any]) -> LocalBatch:
        """Return the batch with ``move`` applied to all columns and prepared values."""
        prepared = []
        for batch in self.prepared:
            prepared.append({name: move(value) for name, value in batch.items()})
        columns = {name: move(column) for name, column in self.columns.items()}
        return replace(self, columns=columns, prepared=tuple(prepared))


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of target tokens in labels [B, T], after the shift; an int64 scalar."""
    return (labels[:, 1:] != IGNORED).sum()


def target_weights(batch: Batch) -> torch.Tensor:
    """Return the weights of the targets of a micro-batch, float32 [B, T - 1].

    They come from its column ``loss_weight`` [B, T], which is aligned with the labels. An ignored
    target weighs 0.
    """
    is_ignored = batch["labels"][:, 1:] == IGNORED
    weights: torch.Tensor = batch["loss_weight"][:, 1:].float()
    return weights.masked_fill(is_ignored, 0)


# --- the codes in the column `answers` of preference data
#
# The code of a position says to which answer it belongs. Its lowest bit is 1 for the second answer
# of a pair. The next bit is 1 if the first answer of the pair is undesirable. The bits above are
# the number of the pair in its row. A row with two pairs may have
#
#     code    0 0 0   1 1   6 6   7 7 7   -1 -1
#     pair    0 0 0   0 0   1 1   1 1 1
#
# The first answer of pair 1 is undesirable.

# The code of padding.
PADDING_CODE = -1
# The functions below take one code, or an array of codes of any shape.
Codes = TypeVar("Codes", int, "np.ndarray", "torch.Tensor")


def answer_code(pair: int, is_second: bool, is_undesirable: bool) -> int:
    """Return the code of an answer.

    Args:
        pair: the number of its pair in the row.
        is_second: whether it is the second answer of the pair.
        is_undesirable: whether the first answer of the pair is undesirable.
    """
    return 4 * pair + 2 * is_undesirable + is_second


def pair_of(codes: Codes) -> Codes:
    """Return the number of the pair in its row; -1 for padding."""
    return codes >> 2


def is_second(codes: Codes) -> Codes:
    """Return whether codes, which are not padding, belong to the second answer of a pair."""
    return codes & 1 > 0


def is_undesirable(codes: Codes) -> Codes:
    """Return whether codes, which are not padding, belong to a pair with an undesirable answer."""
    return codes & 2 > 0


def answer_of(codes: Codes) -> Codes:
    """Return the number of the answer in its row, as pairs have two; -1 for padding."""
    answers: Codes = 2 * pair_of(codes) + (codes & 1)
    return answers


def padded_size(count: int, smallest: int = 64) -> int:
    """Return the smallest of a few sizes that holds ``count`` entries.

    Between two powers of two there are eight sizes: 64, 72, 80, ..., 128, 144, 160, ...

    Args:
        count: the number of entries.
        smallest: the smallest size, a power of two from 8 on.
    """
    step = max(1 << max(count - 1, 0).bit_length() >> 4, smallest // 8)
    return max(-(-count // step) * step, smallest)
