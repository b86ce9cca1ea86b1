"""Packing puts every document once and uncut into few rows, where none is trained on another."""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data import packing
from llmtrain.data.loader import IGNORED, train_loader
from llmtrain.data.packing import Examples, TokenStore, best_fit, write_rows
from llmtrain.data.shards import Shard, TokenRows, facts_of

VOCABULARY = 2000

# --- which documents share a row


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    return best_fit(np.array(lengths, np.int64), capacity)


def rooms_of(rows: list[list[int]], lengths: list[int], capacity: int) -> list[int]:
    """Return the room that is left in each row, in ascending order."""
    return sorted(capacity - sum(lengths[document] for document in row) for row in rows)


class Documents(NamedTuple):
    lengths: list[int]
    capacity: int  # of a row


@st.composite
def random_documents(draw: st.DrawFn) -> Documents:
    capacity = draw(st.integers(1, 50))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    return Documents(lengths, capacity)


def best_fit_rooms(lengths: list[int], capacity: int) -> list[int]:
    """Return the room in each row after best-fit decreasing, which tries all rows."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@settings(deadline=None)
@given(random_documents())
def test_every_document_is_in_one_row_and_no_row_is_too_long(documents):
    rows = pack(*documents)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(documents.lengths)))
    assert all(row and row == sorted(row) for row in rows)
    assert min(rooms_of(rows, *documents), default=0) >= 0


@settings(deadline=None)
@given(random_documents())
def test_each_document_goes_into_the_row_with_the_least_room(documents):
    assert rooms_of(pack(*documents), *documents) == best_fit_rooms(*documents)


def test_a_document_as_long_as_a_row_fills_it():
    assert pack([8, 3, 8, 5, 8], 8) == [[0], [2], [4], [1, 3]]
    assert pack([1, 1], 1) == [[0], [1]]
    assert pack([], 8) == []


def test_the_rows_of_documents_never_change_between_versions():
    assert pack([3, 7, 1, 5, 2, 2, 4, 9, 1, 6], 10) == [[7, 8], [0, 1], [6, 9], [2, 3, 4, 5]]


# --- rows on disk

WIDTH = 16


class Document(NamedTuple):
    ids: list[int]
    is_target: list[bool]

    @property
    def labels(self) -> list[int]:
        """The labels in a row: nothing predicts the first token."""
        labels = [IGNORED]
        for token, is_target in zip(self.ids[1:], self.is_target[1:], strict=True):
            labels.append(token if is_target else IGNORED)
        return labels


def document(number: int, length: int) -> Document:
    """Document n has the tokens 100 n + 1, 100 n + 2, ...; two of three are targets."""
    ids = [100 * number + 1 + i for i in range(length)]
    return Document(ids, is_target=[(i + number) % 3 > 0 for i in range(length)])


LENGTHS = [5, 16, 1, 9, 3, 16, 7, 2, 11, 4, 1, 15]
DOCUMENTS = [document(number, length) for number, length in enumerate(LENGTHS)]
PACKED_ROWS = 6  # 90 tokens do not fit into 5 rows


def write(folder: Path, documents: list[Document], packing: bool = True) -> TokenRows:
    store = TokenStore(folder / "rows.tokens")
    for ids, is_target in documents:
        store.add(np.array(ids), np.array(is_target))
    stops = np.diff(store.bounds)[:, None]
    examples = Examples(np.arange(len(store))[:, None], starts=np.zeros_like(stops), stops=stops)
    path = folder / "rows.safetensors"
    written = write_rows(path, store, examples, width=WIDTH, packing=packing, vocabulary=VOCABULARY)
    store.close()

    rows = TokenRows([Shard(folder, facts_of(path))])
    assert len(rows) == written.rows
    return rows


def segments_of(row: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and labels between the restarts of the position ids."""
    starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
    assert starts[0] == 0
    segments = []
    for start, end in zip(starts, [*starts[1:], WIDTH], strict=True):
        assert row["position_ids"][start:end] == list(range(end - start))
        segments.append((row["input_ids"][start:end], row["labels"][start:end]))
    return segments


@pytest.mark.parametrize("rows_per_batch", [1, 3, 1024])
def test_packed_rows_hold_every_document_with_its_labels(tmp_path, monkeypatch, rows_per_batch):
    monkeypatch.setattr(packing, "TOKENS_PER_BATCH", rows_per_batch * WIDTH)
    rows = write(tmp_path, DOCUMENTS)
    assert len(rows) == PACKED_ROWS

    documents = []
    padding = 0
    for row in rows:
        segments = segments_of(row)
        last_ids, last_labels = segments[-1]
        if last_ids[0] == 0:
            assert last_ids == [0] * len(last_ids)
            assert last_labels == [IGNORED] * len(last_ids)
            padding += len(last_ids)
            del segments[-1]
        documents += segments
    assert sorted(documents) == [(document.ids, document.labels) for document in DOCUMENTS]
    assert padding == PACKED_ROWS * WIDTH - sum(LENGTHS)


@pytest.mark.parametrize("rows_per_batch", [3, 1024])
def test_unpacked_rows_hold_one_document_each_in_order(tmp_path, monkeypatch, rows_per_batch):
    monkeypatch.setattr(packing, "TOKENS_PER_BATCH", rows_per_batch * WIDTH)
    rows = write(tmp_path, DOCUMENTS, packing=False)
    for row, document in zip(rows, DOCUMENTS, strict=True):
        padding = WIDTH - len(document.ids)
        assert row["input_ids"] == document.ids + [0] * padding
        assert row["labels"] == document.labels + [IGNORED] * padding
        assert row["lengths"] == [len(document.ids)]
        assert "position_ids" not in row


def test_a_full_row_has_no_padding(tmp_path):
    (row,) = write(tmp_path, [document(0, WIDTH)])
    assert row["position_ids"] == list(range(WIDTH))


def test_a_document_of_one_token_has_no_target(tmp_path):
    (row,) = write(tmp_path, [Document(ids=[7], is_target=[True])])
    assert row["labels"] == [IGNORED] * WIDTH
    assert row["position_ids"] == [0, *range(WIDTH - 1)]


def test_columns_have_one_width_also_without_rows(tmp_path):
    for documents in (DOCUMENTS, []):
        [shard] = write(tmp_path, documents).shards
        columns = shard.read(np.arange(len(shard)))
        assert [*columns] == ["input_ids", "labels", "position_ids"]
        assert {column.shape for column in columns.values()} == {(len(shard), WIDTH)}


def test_a_batch_has_the_columns_of_its_rows(tmp_path):
    rows = write(tmp_path, DOCUMENTS)
    (local_batch,) = train_loader(rows, 8, micro_batch=8, steps=range(1), seed=0)
    (batch,) = local_batch.batches
    order = local_batch.rows.tolist()
    assert sorted(order) == [-1, -1, *range(PACKED_ROWS)]

    for i, row in enumerate(order):
        if row == -1:  # an empty slot has the tokens of row 0, without labels
            assert batch["input_ids"][i].tolist() == rows[0]["input_ids"]
            assert batch["position_ids"][i].tolist() == rows[0]["position_ids"]
            assert batch["labels"][i].tolist() == [IGNORED] * WIDTH
            assert local_batch.targets[i] == 0
        else:
            for name in ("input_ids", "labels", "position_ids"):
                assert batch[name][i].tolist() == rows[row][name]
            assert local_batch.targets[i] == sum(label >= 0 for label in rows[row]["labels"])
