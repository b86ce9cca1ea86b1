"""Fit examples into rows of one length, with as little padding as possible.

No example is split. A packed row holds complete examples one after the other. Their
``position_ids`` restart at each, which tells attention where a document ends. The first label of
each is -100, because its first token has no context.

A row of preference data holds complete pairs of answers. Its column ``answers`` has the code of the
answer that each position belongs to; see :mod:`llmtrain.interfaces.answer_codes`.

An unpacked row holds one conversation, or a pair with each answer in half of the row. Its column
``lengths`` has the number of tokens in the row, or in each half. The rest is padding.

The second answer of a pair may share the prompt of the first. Then its ``position_ids`` continue
those of the prompt, and its first token is a copy of the last token of the prompt.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.data.store import (
    LENGTHS,
    PREFERENCE_COLUMNS,
    TOKEN_COLUMNS,
    TOKENS_PER_BATCH,
    TokenStore,
    create_row_file,
    decoded_ids,
)
from llmtrain.interfaces.answer_codes import PADDING, answer_code
from llmtrain.interfaces.batches import IGNORED


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Choose which examples share a row, by best-fit decreasing (Johnson 1973).

    The examples are placed from the longest to the shortest. Each goes into the row with the least
    room that holds it. For language models see Ding et al. 2024, arXiv:2404.10830.

    Args:
        lengths: int [examples], each from 1 to ``capacity``.
        capacity: the number of tokens in a row.

    Returns:
        The numbers of each row's examples, in ascending order.
    """
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if there is a row with room for exactly r more tokens

    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        fitting = rooms >> length
        if fitting:
            lowest_bit = (fitting & -fitting).bit_length() - 1
            room = length + lowest_bit
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(example)
        else:
            room = capacity
            row = len(rows)
            rows.append([example])

        room_left = room - length
        rows_by_room[room_left].append(row)
        rooms |= 1 << room_left
    return [sorted(row) for row in rows]


class _Part(NamedTuple):
    """Tokens of one sequence that are contiguous in a row.

    Attributes:
        tokens: int32 [n], as they are stored.
        first_position: the position id of the first token.
        answer: the code of the answer; 0 for a conversation.
    """

    tokens: np.ndarray
    first_position: int
    answer: int


@dataclass
class Examples:
    """The tokens of a :class:`TokenStore` that go to the rows, example by example.

    A conversation is an example with one part, a pair of answers one with two. Each part is a
    stretch of a stored sequence, and its position ids begin at ``starts``.

    Attributes:
        sequences: int64 [examples, parts], the number of the sequence of each part.
        starts: int64 [examples, parts], its first token that is written.
        stops: int64 [examples, parts], the token after the last one.
        is_first_desirable: bool [examples], whether the first answer of each pair is desirable;
            ``None`` for conversations.
    """

    sequences: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    is_first_desirable: np.ndarray | None = None

    @classmethod
    def of_sequences(cls, sequences: np.ndarray, lengths: np.ndarray) -> "Examples":
        """Return examples that have one part each.

        Args:
            sequences: int64 [examples], the number of each sequence in the store.
            lengths: int64 [examples], how many of its tokens are written.
        """
        return cls(
            sequences=sequences[:, None],
            starts=np.zeros((len(sequences), 1), np.int64),
            stops=lengths[:, None],
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def are_pairs(self) -> bool:
        """Whether the examples are pairs of answers."""
        return self.is_first_desirable is not None

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example, int64 [examples]."""
        lengths: np.ndarray = (self.stops - self.starts).sum(axis=1)
        return lengths


class WrittenRows(NamedTuple):
    """Rows that were written.

    Attributes:
        rows: how many there are.
        pairs: the largest number of pairs in a row; 0 for conversations.
        sha256: a hex digest of the tokens, of their loss mask and of how they became rows.
    """

    rows: int
    pairs: int
    sha256: str


def write_rows(
    path: Path,
    store: TokenStore,
    examples: Examples,
    width: int,
    packing: bool,
    note: str = "",
) -> WrittenRows:
    """Write examples as rows.

    Args:
        path: the file to write.
        store: holds the sequences.
        examples: the tokens to write.
        width: the number of tokens in a row.
        packing: pack several examples into a row. Otherwise each conversation gets a row of its
            own, and each answer of a pair half a row.
        note: a further text that the hash depends on.
    """
    return _ExampleWriter(store, examples, width, packing).write(path, note)


class _ExampleWriter:
    """Writes examples as rows; see :func:`write_rows`."""

    def __init__(self, store: TokenStore, examples: Examples, width: int, packing: bool) -> None:
        self.store = store
        # Sequence i is stored from borders[i] to borders[i + 1].
        self.borders = [0, *store.stops.tolist()]
        self.examples = examples
        self.width = width
        self.packing = packing

    def write(self, path: Path, note: str) -> WrittenRows:
        """Write all rows."""
        if self.packing:
            rows = best_fit(self.examples.lengths, self.width)
        else:
            rows = [[number] for number in range(len(self.examples))]

        columns = PREFERENCE_COLUMNS if self.examples.are_pairs else TOKEN_COLUMNS
        widths = dict.fromkeys(columns, self.width)
        if not self.packing:
            widths.pop("position_ids")  # a row with one document needs none
            widths[LENGTHS] = 2 if self.examples.are_pairs else 1

        with create_row_file(path, widths) as write:
            count = max(TOKENS_PER_BATCH // self.width, 1)
            for start in range(0, len(rows), count):
                write(self._columns(rows[start : start + count]))

        pairs = max(map(len, rows), default=0) if self.examples.are_pairs else 0
        return WrittenRows(rows=len(rows), pairs=pairs, sha256=self._digest(note))

    def _digest(self, note: str) -> str:
        """Hash the tokens of all examples, in their order, and how they become rows."""
        digest = hashlib.sha256()
        for number in range(len(self.examples)):
            parts = self._parts(number, number_in_row=0)
            tokens = np.concatenate([part.tokens for part in parts])
            digest.update(decoded_ids(tokens).astype("<i4").tobytes())
            digest.update(np.packbits(tokens >= 0).tobytes())
            if self.examples.is_first_desirable is not None:
                first, second = parts
                is_desirable = bool(self.examples.is_first_desirable[number])
                digest.update(
                    f"{len(first.tokens)} {second.first_position} {is_desirable}".encode()
                )
        digest.update(f"{self.width} {self.packing}{note}".encode())
        return digest.hexdigest()

    def _columns(self, rows: list[list[int]]) -> dict[str, np.ndarray]:
        """Return the columns of some rows, each int32 [rows, width].

        The column ``lengths`` is int32 [rows, 1 or 2]. It is only right if rows are not packed.

        Args:
            rows: the numbers of each row's examples.
        """
        shape = (len(rows), self.width)
        columns = {
            "input_ids": np.full(shape, 0, np.int32),
            "labels": np.full(shape, IGNORED, np.int32),
            "position_ids": np.full(shape, 0, np.int32),
            "answers": np.full(shape, PADDING, np.int32),
            LENGTHS: np.zeros((len(rows), 2 if self.examples.are_pairs else 1), np.int32),
        }
        for i, row in enumerate(rows):
            self._fill_row(row, {name: column[i] for name, column in columns.items()})
        return columns

    def _fill_row(self, row: list[int], columns: dict[str, np.ndarray]) -> None:
        """Lay out the examples of a row, and number the positions of its padding.

        Args:
            row: the numbers of its examples.
            columns: the values of the row in each column, as they are if it is all padding.
        """
        half = self.width // 2
        end = 0  # of the tokens in the row so far
        for number_in_row, example in enumerate(row):
            for part_number, part in enumerate(self._parts(example, number_in_row)):
                is_second_half = part_number == 1 and not self.packing
                start = half if is_second_half else end
                end = start + len(part.tokens)
                columns[LENGTHS][part_number] = len(part.tokens)
                _fill_part(part, {name: column[start:end] for name, column in columns.items()})

        # Padding is a document of its own, or several if it is longer than any example may be.
        longest = half if self.examples.are_pairs else self.width
        columns["position_ids"][end:] = np.arange(self.width - end) % longest

    def _parts(self, example: int, number_in_row: int) -> list[_Part]:
        """Return the parts of an example: the two answers of a pair, or one conversation."""
        parts = []
        sequences = self.examples.sequences[example].tolist()
        starts = self.examples.starts[example].tolist()
        stops = self.examples.stops[example].tolist()
        for i, sequence in enumerate(sequences):
            begin = self.borders[sequence]
            tokens = self.store.read_encoded(begin + starts[i], begin + stops[i])
            code = 0
            if self.examples.is_first_desirable is not None:
                code = answer_code(
                    pair=number_in_row,
                    is_second=i == 1,
                    is_undesirable=not self.examples.is_first_desirable[example],
                )
            parts.append(_Part(tokens, first_position=starts[i], answer=code))
        return parts


def _fill_part(part: _Part, columns: dict[str, np.ndarray]) -> None:
    """Write the tokens of a part to its stretch of a row, by column."""
    columns["input_ids"][:] = decoded_ids(part.tokens)
    columns["labels"][:] = np.where(part.tokens < 0, IGNORED, part.tokens)
    columns["labels"][:1] = IGNORED  # nothing in the part predicts its first token
    columns["position_ids"][:] = part.first_position + np.arange(len(part.tokens))
    columns["answers"][:] = part.answer
