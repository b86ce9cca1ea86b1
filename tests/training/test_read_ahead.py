"""The loop reads one step ahead on another thread, and leaves nothing of that behind."""

import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from torch import nn

from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.training import loop
from llmtrain.training.read_ahead import read_ahead, read_batches
from recipes import gpt
from tests.engines import engine_of
from tests.launching import TINY

ROWS = Dataset.from_dict({"input_ids": [[row] * 5 for row in range(12)]})
STEPS = 3


def prepared_loader(accelerator: Accelerator, first_step: int = 0) -> DataLoaderShard:
    return accelerator.prepare(train_loader(ROWS, 4, 2, range(first_step, STEPS), seed=None))


def reading_ahead(accelerator: Accelerator, loader: DataLoaderShard) -> Generator[LocalBatch]:
    """Read a loader as the loop does."""
    return read_batches(loader, engine_of(accelerator, nn.Linear(1, 1)))


def rows_of(batches: Iterable[LocalBatch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_items_come_in_their_order_and_the_last_one_is_known(count: int) -> None:
    items = list(read_ahead(iter(range(count))))
    assert items == [(item, item == count - 1) for item in range(count)]
    assert not prefetching_threads()


def test_batches_are_those_of_the_loader_in_its_order(accelerator: Accelerator) -> None:
    expected = rows_of(prepared_loader(accelerator))
    assert rows_of(reading_ahead(accelerator, prepared_loader(accelerator))) == expected
    assert len(expected) == STEPS

    none_left = prepared_loader(accelerator, first_step=STEPS)
    assert rows_of(reading_ahead(accelerator, none_left)) == []


def test_batches_are_on_the_device_that_prepare_chose(accelerator: Accelerator) -> None:
    loader = prepared_loader(accelerator)
    loader.device = torch.device("meta")  # stands for a GPU
    for batch in reading_ahead(accelerator, loader):
        assert batch.columns["input_ids"].is_meta


def test_only_the_main_thread_changes_the_gradient_state_of_accelerate(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations change it too, and it is not safe to use from several threads."""
    changed_by: list[str] = []

    def noting_the_thread(change: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: object) -> None:
            changed_by.append(threading.current_thread().name)
            change(*args)

        return noted

    for name in ("_add_dataloader", "_remove_dataloader"):
        change = getattr(GradientState, name)
        monkeypatch.setattr(GradientState, name, noting_the_thread(change))

    for _ in reading_ahead(accelerator, prepared_loader(accelerator)):
        pass

    assert changed_by == [threading.main_thread().name] * 2


def test_the_gradient_state_is_that_of_the_current_batch(accelerator: Accelerator) -> None:
    state = accelerator.gradient_state
    loader = prepared_loader(accelerator)
    eval_batches = accelerator.prepare(eval_loader(ROWS, 1, 4))
    ends: list[bool] = []
    for _ in reading_ahead(accelerator, loader):
        assert state.active_dataloader is loader
        ends.append(state.end_of_dataloader)
        for _ in eval_batches:  # an evaluation
            assert state.active_dataloader is eval_batches
    assert ends == [False, False, True]
    assert not state.in_dataloader


def test_reading_that_is_closed_early_leaves_no_thread_and_no_loader_behind(
    accelerator: Accelerator,
) -> None:
    batches = reading_ahead(accelerator, prepared_loader(accelerator))
    next(batches)
    assert prefetching_threads()
    batches.close()
    assert not prefetching_threads()
    assert not accelerator.gradient_state.in_dataloader


def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_wanted(
    accelerator: Accelerator,
) -> None:
    class BrokenDiskError(Exception):
        """Stands for a disk that fails."""

    def break_at_the_last_step(batch: LocalBatch) -> LocalBatch:
        if 8 in batch.rows:
            raise BrokenDiskError
        return batch

    loader = prepared_loader(accelerator)
    collate = loader.base_dataloader.collate_fn
    loader.base_dataloader.collate_fn = lambda read: break_at_the_last_step(collate(read))
    with pytest.raises(BrokenDiskError):
        rows_of(reading_ahead(accelerator, loader))
    assert not prefetching_threads()
    assert not accelerator.gradient_state.in_dataloader


def test_a_run_that_fails_leaves_no_thread_that_reads_ahead(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PlantedError(Exception):
        """Stands for any error in a step."""

    def fail(*_: object, **__: object) -> None:
        raise PlantedError

    monkeypatch.setattr(loop, "train_step", fail)
    flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    try:
        with pytest.raises(PlantedError) as failure:
            gpt.main(flags)
        assert failure.tb is not None  # whose frames are alive
        assert not prefetching_threads()
        assert not GradientState().in_dataloader
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
