"""Documents of any length -> rows of one length, with as little padding as can be and no document split.

A packed row holds whole documents one after the other. ``position_ids`` restart at each, which is how attention knows
where one ends; the first label of each is -100, since nothing before it belongs to it.
"""

from pathlib import Path

import numpy as np

from llmtrain.contract import IGNORED
from llmtrain.data.table import TOKENS_PER_BATCH, row_table

COLUMNS = ["input_ids", "labels", "position_ids"]


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return which documents share a row, by best-fit decreasing (Johnson 1973).

    The longest document that waits goes where the least room is left that holds it. For language models: Ding et al.
    2024, arXiv:2404.10830.

    Args:
        lengths: int [documents], each from 1 to ``capacity``.
    Returns:
        A list of document numbers a row, in their own order.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows with so many places left
    rooms = 0  # bit r is set where by_room[r] is not empty
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            rooms &= ~(int(not by_room[room]) << room)
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        left = room - length
        by_room[left].append(row)
        rooms |= 1 << left
    return [sorted(row) for row in rows]


class TokenStore:
    """Documents of tokens, each with which of them are trained: kept in two files while it is not known who shares a
    row with whom."""

    def __init__(self, path: Path) -> None:
        self._paths = path.with_suffix(".tokens"), path.with_suffix(".trained")
        self._files = [p.open("wb") for p in self._paths]
        self.lengths: list[int] = []

    def add(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """Add a document: its tokens, and of each whether it is trained."""
        self._files[0].write(ids.astype(np.int32).tobytes())
        self._files[1].write(trained.astype(np.bool_).tobytes())
        self.lengths.append(len(ids))

    def write_rows(self, path: Path, width: int, packing: bool) -> int:
        """Write all documents as rows of ``width`` tokens and drop the two files; returns the number of rows."""
        for file in self._files:
            file.close()
        rows = best_fit(np.array(self.lengths, np.int64), width) if packing else [[i] for i in range(len(self.lengths))]
        columns = COLUMNS if packing else COLUMNS[:2]  # alone in its row a document needs no position_ids
        with row_table(path, columns, width) as write:
            count = max(TOKENS_PER_BATCH // width, 1)
            for start in range(0, len(rows), count):
                write(*self._filled(rows[start : start + count], width)[: len(columns)])
        for file_path in self._paths:
            file_path.unlink()
        return len(rows)

    def _filled(self, rows: list[list[int]], width: int) -> tuple[np.ndarray, ...]:
        tokens, trained = np.memmap(self._paths[0], np.int32, "r"), np.memmap(self._paths[1], np.bool_, "r")
        ends = np.cumsum(self.lengths)
        ids = np.zeros((len(rows), width), np.int32)
        labels = np.full((len(rows), width), IGNORED, np.int32)
        positions = np.zeros((len(rows), width), np.int32)
        for i, documents in enumerate(rows):
            at = 0
            for document in documents:
                length, end = self.lengths[document], ends[document]
                here, there = slice(at, at + length), slice(end - length, end)
                ids[i, here] = tokens[there]
                labels[i, here] = np.where(trained[there], tokens[there], IGNORED)
                labels[i, at] = IGNORED
                positions[i, here] = np.arange(length)
                at += length
            positions[i, at:] = np.arange(width - at)  # padding is a document of its own
        return ids, labels, positions
