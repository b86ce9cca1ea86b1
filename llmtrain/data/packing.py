"""Rows of tokens: which examples share one, and the columns that they have in a shard.

Token sequences wait in a :class:`TokenStore` until it is decided which rows they go to. No example
is split. A packed row holds complete examples one after the other. Their ``position_ids`` restart
at each, which tells attention where a document ends. The first label of each is -100, because its
first token has no context.

A row of preference data holds complete pairs of answers. Its column ``answers`` has the code of the
answer that each position belongs to; see :mod:`llmtrain.interfaces.batches`.

An unpacked row holds one conversation, or a pair with each answer in half of the row. Its column
``lengths`` has the number of tokens in the row, or in each half. The rest is padding.

The second answer of a pair may share the prompt of the first. Then its ``position_ids`` continue
those of the prompt, and its first token is a copy of the last token of the prompt.
"""

import array
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.data.audit import Audit
from llmtrain.data.messages import BadRecord
from llmtrain.data.readers import shown
from llmtrain.data.shards import Column, create_shard, token_dtype
from llmtrain.interfaces.batches import IGNORED, PADDING_CODE, answer_code

# Unpacked rows have the column `lengths` instead of the last one.
TOKEN_COLUMNS = ["input_ids", "labels", "position_ids"]
PREFERENCE_COLUMNS = ["input_ids", "labels", "answers", "position_ids"]
LENGTHS = "lengths"
# The tokens that are written at a time: 16 MiB for each column.
TOKENS_PER_BATCH = 1 << 22


def columns_of(
    names: Iterable[str], width: int, vocabulary: int, extra: Mapping[str, np.dtype], parts: int = 1
) -> dict[str, Column]:
    """Return the columns of rows.

    Args:
        names: the names of the columns.
        width: the number of tokens in a row.
        vocabulary: the largest token, plus 1.
        extra: the dtype of a token's values in each extra column.
        parts: 2 if a row has two halves, otherwise 1.
    """
    columns = {}
    for name in names:
        dtype = token_dtype(width if name == "position_ids" else vocabulary)
        columns[name] = Column(dtype, [width])
    if "answers" in columns:
        columns["answers"] = Column("int32", [width])
    if LENGTHS in columns:
        columns[LENGTHS] = Column("int32", [parts])
    for name, values in extra.items():
        columns[name] = Column(values.base.name, [width, *values.shape])
    return columns


def column_values(name: str, value: object, dtype: np.dtype, length: int) -> np.ndarray:
    """Return the value of a record in an extra column, in the dtype of the column.

    Args:
        name: the name of the column.
        value: a number, which all tokens get, or a list with a number or k numbers for each token.
        dtype: of a token's values.
        length: the number of tokens.

    Raises:
        BadRecord: if the value has another form, if a number does not fit, or if a weight is
            negative.
    """
    numbers = np.array(None)
    with contextlib.suppress(ValueError):  # a list with gaps
        numbers = np.array(value)
    shape = (length, *dtype.shape)
    if numbers.dtype.kind not in "biuf" or numbers.shape not in ((), shape):
        raise BadRecord(f"{name} is {shown(value)}, not a number or a list of shape {list(shape)}")

    with np.errstate(over="ignore", invalid="ignore"):
        values: np.ndarray = numbers.astype(dtype.base)
    is_good = np.isfinite(values) & ((values == numbers) | (values.dtype.kind == "f"))
    is_good &= (values >= 0) | (name != "loss_weight")
    if not is_good.all():
        raise BadRecord(f"{name} holds {numbers[~is_good][0]}, no valid {name} in {dtype.base}")
    return values


class TokenStore:
    """Token sequences in a temporary file, until it is decided which rows they go to.

    A token that is not a target is stored as its bitwise complement, which is negative. So
    ``np.maximum(stored, ~stored)`` is the token in both cases.

    Args:
        path: the file.
        extra: the dtype of a token's values in each extra column.

    Attributes:
        dtype: of a stored token: the field ``token``, and one for each extra column.
    """

    def __init__(self, path: Path, extra: Mapping[str, np.dtype] = {}) -> None:
        self.extra = extra
        self.dtype = np.dtype([("token", np.int32), *extra.items()])
        self._path = path
        self._file = path.open("w+b")
        self._bounds = array.array("q", [0])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def add(
        self, ids: np.ndarray, loss_mask: np.ndarray, own: slice = slice(None), /, **extra: object
    ) -> None:
        """Add a sequence.

        Args:
            ids: int32 [n], the tokens.
            loss_mask: bool [n], whether each token is a target.
            own: the tokens that a list has values for. The others get 0.
            extra: the values of its record in the extra columns; see :func:`column_values`.

        Raises:
            BadRecord: if a value cannot be used. Then nothing is added.
        """
        stored = np.zeros(len(ids), self.dtype)
        stored["token"] = np.where(loss_mask, ids, ~ids)
        for name, value in extra.items():
            values = column_values(name, value, self.extra[name], len(ids[own]))
            stored[name][own if values.ndim else slice(None)] = values
        self._file.write(stored.tobytes())
        self._bounds.append(self._bounds[-1] + len(ids))

    def close(self) -> None:
        """Close the file, and delete it."""
        with contextlib.suppress(OSError):  # what is left to write may not fit on the disk
            self._file.close()
        self._path.unlink(missing_ok=True)

    @property
    def bounds(self) -> np.ndarray:
        """The index in the file before each sequence and after the last one, int64."""
        return np.array(self._bounds, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens with their values as they are stored, given their indices in the file."""
        self._file.flush()
        size = self.dtype.itemsize
        content = os.pread(self._file.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(content, self.dtype)


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


def write_rows(
    path: Path,
    store: TokenStore,
    examples: Examples,
    width: int,
    packing: bool,
    vocabulary: int,
    note: str = "",
) -> Audit:
    """Write examples of sequences in a store as rows.

    Args:
        path: the file to write.
        store: the store.
        examples: the tokens to write.
        width: the number of tokens in a row.
        packing: pack several examples into a row. Otherwise each conversation gets a row of its
            own, and each answer of a pair half a row.
        vocabulary: the largest token, plus 1.
        note: a further text that the hash depends on.
    """
    count, parts = examples.sequences.shape
    are_pairs = examples.is_first_desirable is not None
    names = PREFERENCE_COLUMNS if are_pairs else TOKEN_COLUMNS
    if packing:
        rows = best_fit((examples.stops - examples.starts).sum(axis=1), width)
    else:
        rows = [[example] for example in range(count)]
        names = [*names[:-1], LENGTHS]  # a row with one document needs no position ids
    columns = columns_of(names, width, vocabulary, store.extra, parts)

    first_in_store = store.bounds[examples.sequences]
    starts = first_in_store + examples.starts
    stops = first_in_store + examples.stops

    def tokens_of(example: int, part: int) -> np.ndarray:
        return store.read(int(starts[example, part]), int(stops[example, part]))

    targets = 0
    rows_per_batch = max(TOKENS_PER_BATCH // width, 1)
    with create_shard(path, columns, len(rows)) as write:
        for start in range(0, len(rows), rows_per_batch):
            batch = rows[start : start + rows_per_batch]
            values = _values_of(batch, examples, tokens_of, width, packing, store.dtype)
            targets += int((values["labels"] != IGNORED).sum())
            write(values)

    digest = hashlib.sha256()
    for example in range(count):
        tokens_of_parts = [tokens_of(example, part) for part in range(parts)]
        stored = np.concatenate(tokens_of_parts)
        tokens = stored["token"]
        digest.update(np.maximum(tokens, ~tokens).astype("<i4").tobytes())
        digest.update(np.packbits(tokens >= 0).tobytes())
        digest.update(b"".join(stored[name].tobytes() for name in store.extra))
        if examples.is_first_desirable is not None:
            shared = examples.starts[example, 1]
            is_desirable = bool(examples.is_first_desirable[example])
            digest.update(f"{len(tokens_of_parts[0])} {shared} {is_desirable}".encode())
    digest.update(f"{width} {packing}{note}{' '.join(store.extra)}".encode())
    return Audit(
        kept=count,
        tokens=int(examples.stops.sum()),
        targets=targets,
        shared_tokens=int(examples.starts.sum()),
        rows=len(rows),
        positions=len(rows) * width,
        pairs=max(map(len, rows), default=0) if are_pairs else 0,
        sha256=digest.hexdigest(),
    )


def _values_of(
    rows: list[list[int]],
    examples: Examples,
    tokens_of: Callable[[int, int], np.ndarray],
    width: int,
    packing: bool,
    dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """Lay out some rows.

    Args:
        rows: the numbers of each row's examples.
        examples: all examples.
        tokens_of: returns the tokens of an example's part, as they are stored.
        width: the number of tokens in a row.
        packing: whether the parts of an example follow each other.
        dtype: the dtype of stored tokens.

    Returns:
        Columns, each int32 [rows, width]; ``lengths`` is int32 [rows, parts], and only right if
        rows are not packed; extra columns are [rows, width, ...].
    """
    parts = examples.sequences.shape[1]
    shape = (len(rows), width)
    columns = np.zeros(shape, dtype)
    ids = columns["token"]
    labels = np.full(shape, IGNORED, np.int32)
    positions = np.zeros(shape, np.int32)
    answers = np.full(shape, PADDING_CODE, np.int32)
    lengths = np.zeros((len(rows), parts), np.int32)

    longest = width // parts  # of a part
    for i, row in enumerate(rows):
        end = 0  # of the tokens in the row so far
        for number_in_row, example in enumerate(row):
            for part in range(parts):
                stored = tokens_of(example, part)
                tokens = stored["token"]
                start = end if packing else part * longest
                end = start + len(tokens)
                columns[i, start:end] = stored
                ids[i, start:end] = np.maximum(tokens, ~tokens)
                labels[i, start + 1 : end] = np.where(tokens < 0, IGNORED, tokens)[1:]
                first_position = examples.starts[example, part]
                positions[i, start:end] = first_position + np.arange(len(tokens))
                if examples.is_first_desirable is not None:
                    answers[i, start:end] = answer_code(
                        pair=number_in_row,
                        is_second=part == 1,
                        is_undesirable=not examples.is_first_desirable[example],
                    )
                lengths[i, part] = len(tokens)

        # Padding is a document of its own, or several if it is longer than any example may be.
        positions[i, end:] = np.arange(width - end) % longest

    return {
        **{name: columns[name] for name in dtype.names or ()},
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "answers": answers,
        LENGTHS: lengths,
    }
