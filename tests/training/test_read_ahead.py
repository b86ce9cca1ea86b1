"""The loop reads one step ahead on another thread, which is gone after the loop."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState
from torch import nn

from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.errors import DamagedRowsError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.training.read_ahead import read_ahead, read_batches
from tests.engines import engine_of

ROWS = TokenRows([ArrayRows({"input_ids": np.array([[row] * 5 for row in range(12)])})])
STEPS = 3


def prepared_loader(accelerator: Accelerator) -> DataLoaderShard:
    """Return a loader with the rows in their stored order."""
    loader = train_loader(ROWS, global_batch_size=4, micro_batch=2, steps=range(STEPS), seed=None)
    return accelerator.prepare(loader)


def read_as_the_loop(accelerator: Accelerator, loader: DataLoaderShard) -> Generator[LocalBatch]:
    return read_batches(loader, engine_of(accelerator, nn.Linear(1, 1)), never)


def never(error: Exception, good_items: int) -> None:
    raise AssertionError


def rows_of(batches: Iterable[LocalBatch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_items_come_in_their_order_and_the_last_one_is_known(count: int) -> None:
    for known in (1, 2):
        items = list(read_ahead(iter(range(count)), never, known))

        assert items == [(item, item == count - 1) for item in range(count)]
        assert not reading_threads()


def test_batches_are_those_of_the_loader_while_each_is_the_current_one(
    accelerator: Accelerator,
) -> None:
    state = accelerator.gradient_state
    loader = prepared_loader(accelerator)
    eval_batches = accelerator.prepare(eval_loader(ROWS, processes=1, micro_batch=4))
    expected = rows_of(prepared_loader(accelerator))
    assert len(expected) == STEPS
    loader.device = torch.device("meta")  # stands for a GPU

    for step, batch in enumerate(read_as_the_loop(accelerator, loader), start=1):
        assert batch.columns["input_ids"].is_meta
        assert state.active_dataloader is loader
        assert state.end_of_dataloader == (step == STEPS)
        for _ in eval_batches:  # an evaluation
            assert state.active_dataloader is eval_batches

    assert not state.in_dataloader
    assert rows_of(read_as_the_loop(accelerator, prepared_loader(accelerator))) == expected


# --- the gradient state of Accelerate


def test_only_the_main_thread_changes_the_gradient_state(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations change it too, and it is not safe to use from several threads."""
    changing_threads: list[str] = []

    def recorded(method: Callable[..., None]) -> Callable[..., None]:
        """Return a method that also records the thread that calls it."""

        def call(state: GradientState, loader: object) -> None:
            changing_threads.append(threading.current_thread().name)
            method(state, loader)

        return call

    for name in ("_add_dataloader", "_remove_dataloader"):
        method = getattr(GradientState, name)
        monkeypatch.setattr(GradientState, name, recorded(method))

    for _ in read_as_the_loop(accelerator, prepared_loader(accelerator)):
        pass

    main_thread = threading.main_thread().name
    assert changing_threads == [main_thread, main_thread]


# --- damaged items


@pytest.mark.parametrize(
    ("known", "damaged_item", "noticed_at"),
    [(1, 1, 1), (1, 2, 1), (1, 5, 4), (2, 2, 1), (2, 3, 1), (2, 5, 3)],
)
def test_damage_is_known_some_items_ahead_and_raised_after_the_last_good_item(
    known: int, damaged_item: int, noticed_at: int
) -> None:
    def damaged_items() -> Iterator[int]:
        yield from range(1, damaged_item)
        raise DamagedRowsError("a block differs")

    good_items: list[int] = []  # as they are noted
    read = read_ahead(damaged_items(), lambda _, good: good_items.append(good), known)

    for item in range(1, damaged_item):
        assert next(read) == (item, item == damaged_item - 1)
        assert bool(good_items) == (item >= noticed_at)
        assert set(good_items[-1:]) <= {damaged_item - item}
    with pytest.raises(DamagedRowsError):
        next(read)
    assert not reading_threads()


# --- the end of reading


def test_reading_that_is_closed_early_leaves_no_thread_and_no_loader_behind(
    accelerator: Accelerator,
) -> None:
    batches = read_as_the_loop(accelerator, prepared_loader(accelerator))
    next(batches)
    assert reading_threads()

    batches.close()

    assert not reading_threads()
    assert not accelerator.gradient_state.in_dataloader


def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_used(
    accelerator: Accelerator,
) -> None:
    class BrokenDiskError(Exception):
        """Stands for a disk that fails."""

    loader = prepared_loader(accelerator)
    collate = loader.base_dataloader.collate_fn

    def fail_in_the_last_step(rows: list[dict[str, object]]) -> LocalBatch:
        batch = collate(rows)
        if 8 in batch.rows:
            raise BrokenDiskError
        return batch

    loader.base_dataloader.collate_fn = fail_in_the_last_step

    with pytest.raises(BrokenDiskError):
        rows_of(read_as_the_loop(accelerator, loader))

    assert not reading_threads()
    assert not accelerator.gradient_state.in_dataloader
