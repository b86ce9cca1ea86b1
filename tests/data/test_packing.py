"""Packing: every document once and whole, in few rows, and none of them taught what stands in another."""

import itertools

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data import packing
from llmtrain.data.loader import IGNORED, train_loader
from llmtrain.data.packing import Examples, best_fit, write_rows
from llmtrain.data.store import TokenStore

RANDOM = [
    (capacity, count, seed)
    for capacity in (1, 7, 64, 1000)
    for count in (1, 40, 400)
    for seed in range(3)
]


def packed(lengths: list[int], capacity: int) -> list[list[int]]:
    return best_fit(np.array(lengths, np.int64), capacity)


def some_lengths(capacity: int, count: int, seed: int) -> list[int]:
    """Many short ones and a few long ones, as conversations are."""
    return (
        np.ceil(capacity * np.random.default_rng(seed).random(count) ** 2)
        .clip(1)
        .astype(int)
        .tolist()
    )


@st.composite
def bins(draw: st.DrawFn, count: int = 60, smallest: float = 0.0) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 50))
    length = st.integers(max(1, int(np.ceil(capacity * smallest))), capacity)
    return draw(st.lists(length, max_size=count)), capacity


def greedy(lengths: list[int], capacity: int, best: bool) -> list[int]:
    """The room that is left in each row, longest first: where it fits best, or where it first fits."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room if best else 0, i) for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def fewest(lengths: list[int], capacity: int) -> int:
    """The fewest rows there can be, by trying everything."""

    def tried(waiting: list[int], rooms: list[int], best: int) -> int:
        if len(rooms) >= best or not waiting:
            return min(best, len(rooms))
        length, *rest = waiting
        for i, room in enumerate(rooms):
            if room >= length and room not in rooms[:i]:
                best = tried(rest, [*rooms[:i], room - length, *rooms[i + 1 :]], best)
        return tried(rest, [*rooms, capacity - length], best)

    return tried(sorted(lengths, reverse=True), [], len(lengths))


def rooms_of(rows: list[list[int]], lengths: list[int], capacity: int) -> list[int]:
    return sorted(capacity - sum(lengths[document] for document in row) for row in rows)


@settings(deadline=None)
@given(bins())
def test_no_document_is_cut_or_lost_and_no_row_is_too_long(given_bins):
    lengths, capacity = given_bins
    rows = packed(lengths, capacity)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(row == sorted(row) and row for row in rows)
    assert min(rooms_of(rows, lengths, capacity), default=0) >= 0


@settings(deadline=None)
@given(bins())
def test_each_document_goes_where_the_least_room_is_left(given_bins):
    lengths, capacity = given_bins
    assert rooms_of(packed(lengths, capacity), lengths, capacity) == greedy(
        lengths, capacity, best=True
    )


@pytest.mark.parametrize(("capacity", "count", "seed"), RANDOM)
def test_random_documents_fill_no_more_rows_than_where_they_first_fit(capacity, count, seed):
    lengths = some_lengths(capacity, count, seed)
    rows = packed(lengths, capacity)
    assert len(rows) <= len(greedy(lengths, capacity, best=False))
    assert 9 * (len(rows) - 1) <= 11 * -(-sum(lengths) // capacity)


# Among shorter documents there are some, rare ones, of which first fit makes fewer rows (Johnson et al. 1974).
@settings(deadline=None)
@given(bins(smallest=1 / 6))
def test_no_documents_of_a_sixth_of_a_row_or_more_fill_more_rows_than_where_they_first_fit(
    given_bins,
):
    assert len(packed(*given_bins)) <= len(greedy(*given_bins, best=False))


@settings(max_examples=50, deadline=None)
@given(bins(count=9))
def test_rows_are_close_to_the_fewest_there_can_be(given_bins):
    rows, optimum = packed(*given_bins), fewest(*given_bins)
    assert optimum <= len(rows)
    assert 9 * (len(rows) - 1) <= 11 * optimum


def test_a_document_as_long_as_a_row_has_one_to_itself():
    assert packed([8, 3, 8, 5, 8], 8) == [[0], [2], [4], [1, 3]]
    assert packed([8] * 5, 8) == [[i] for i in range(5)]
    assert packed([1, 1], 1) == [[0], [1]]


def test_no_documents_fill_no_rows():
    assert packed([], 8) == []


def test_documents_share_the_same_rows_in_every_version():
    assert packed([3, 7, 1, 5, 2, 2, 4, 9, 1, 6], 10) == [[7, 8], [0, 1], [6, 9], [2, 3, 4, 5]]


# --- rows on the disk ---

WIDTH = 16
LENGTHS = [5, 16, 1, 9, 3, 16, 7, 2, 11, 4, 1, 15]


def document(number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that tell where they come from; two of three are trained, first ones too."""
    return number * 100 + 1 + np.arange(length), (np.arange(length) + number) % 3 > 0


DOCUMENTS = [document(number, length) for number, length in enumerate(LENGTHS)]


def rows_of(folder, documents=DOCUMENTS, packing=True, width=WIDTH) -> datasets.Dataset:
    store = TokenStore(folder / "rows.tokens")
    for ids, trained in documents:
        store.add(ids, trained)
    examples = Examples.of_sequences(np.arange(len(store)), store.lengths)
    written = write_rows(folder / "rows.arrow", store, examples, width, packing)
    store.close()
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    assert len(rows) == written.rows
    return rows


def segments(row: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of a row between one restart of its positions and the next."""
    if "position_ids" not in row:  # a document alone, and padding, which has the token 0
        length = len([token for token in row["input_ids"] if token])
        row = row | {"position_ids": [*range(length), *range(len(row["input_ids"]) - length)]}
    starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
    ends = [*starts[1:], WIDTH]
    assert starts[0] == 0
    assert row["position_ids"] == [
        i for a, b in zip(starts, ends, strict=True) for i in range(b - a)
    ]
    return [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("rows_per_batch", [1, 3, 1024])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_hold_every_document_once_with_its_labels_and_positions(
    tmp_path, monkeypatch, packed, rows_per_batch
):
    monkeypatch.setattr(packing, "TOKENS_PER_BATCH", rows_per_batch * WIDTH)
    found, padding = {}, 0
    for row in rows_of(tmp_path, packing=packed):
        *whole, last = segments(row)
        if last[0][0] == 0:
            assert last == ([0] * len(last[0]), [IGNORED] * len(last[0]))
            padding += len(last[0])
        else:
            whole.append(last)
        assert len(whole) == 1 or packed
        for ids, labels in whole:
            assert ids[0] not in found
            found[ids[0]] = ids, labels
    assert [found[number * 100 + 1][0] for number in range(len(LENGTHS))] == [
        ids.tolist() for ids, _ in DOCUMENTS
    ]
    for number, (ids, trained) in enumerate(DOCUMENTS):
        expected = [
            int(token) if is_trained else IGNORED
            for token, is_trained in zip(ids, trained, strict=True)
        ]
        assert found[number * 100 + 1][1] == [IGNORED, *expected[1:]]
    assert len(found) == len(LENGTHS)
    rows = 6 if packed else len(LENGTHS)  # 90 tokens do not go into 5 rows
    assert padding == rows * WIDTH - sum(LENGTHS)


def test_without_packing_rows_stand_in_the_order_of_the_documents(tmp_path):
    firsts = [row[0] for row in rows_of(tmp_path, packing=False)["input_ids"]]
    assert firsts == [number * 100 + 1 for number in range(len(LENGTHS))]


def test_a_full_row_has_no_padding_and_a_first_token_alone_no_target(tmp_path):
    (full,) = rows_of(tmp_path, [document(0, WIDTH)])
    assert full["position_ids"] == list(range(WIDTH))
    (short,) = rows_of(tmp_path, [(np.array([7]), np.array([True]))])
    assert short["labels"] == [IGNORED] * WIDTH
    assert short["position_ids"] == [0, *range(WIDTH - 1)]


def test_nothing_is_left_beside_the_rows(tmp_path):
    rows_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]


@pytest.mark.parametrize("documents", [DOCUMENTS, []], ids=["some", "none"])
def test_columns_are_int32_of_one_width_whether_there_are_rows_or_not(tmp_path, documents):
    rows = rows_of(tmp_path, documents)
    column = datasets.Sequence(datasets.Value("int32"), length=WIDTH)
    assert rows.features == datasets.Features(
        dict.fromkeys(["input_ids", "labels", "position_ids"], column)
    )
    assert len(rows) == (6 if documents else 0)


def test_two_stores_side_by_side_do_not_mix(tmp_path):
    stores = [TokenStore(tmp_path / f"{side}-0.tokens") for side in ("train", "eval")]
    for number, (ids, trained) in enumerate(DOCUMENTS):
        stores[number % 2].add(ids, trained)
    for side, store in enumerate(stores):
        examples = Examples.of_sequences(np.arange(len(store)), store.lengths)
        write_rows(tmp_path / "rows.arrow", store, examples, WIDTH, packing=True)
        ids = itertools.chain(
            *datasets.Dataset.from_file(str(tmp_path / "rows.arrow"))["input_ids"]
        )
        expected = sorted(token for ids, _ in DOCUMENTS[side::2] for token in ids.tolist())
        assert sorted(token for token in ids if token) == expected


def test_a_batch_has_the_columns_of_its_rows(tmp_path):
    rows = rows_of(tmp_path)
    (local_batch,) = train_loader(rows, global_batch_size=8, micro_batch=8, steps=range(1), seed=0)
    (batch,) = local_batch.batches
    assert sorted(local_batch.rows.tolist()) == [-1, -1, *range(6)]
    for place, row in enumerate(local_batch.rows.tolist()):
        for name in ("input_ids", "labels", "position_ids"):
            expected = (
                rows[max(row, 0)][name] if row >= 0 or name != "labels" else [IGNORED] * WIDTH
            )
            assert batch[name][place].tolist() == expected
        labels = rows[row]["labels"] if row >= 0 else []
        assert local_batch.targets[place] == sum(label != IGNORED for label in labels)
