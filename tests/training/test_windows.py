"""The loop reads one step ahead on another thread, and leaves nothing of that behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset

from llmtrain.contract import Window
from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.training import loop
from recipes import gpt
from tests.launching import TINY

ROWS = Dataset.from_dict({"input_ids": [[row] * 5 for row in range(12)]})
STEPS = 3


def prepared_loader(accelerator: Accelerator, first_step: int = 0) -> DataLoaderShard:
    return accelerator.prepare(train_loader(ROWS, 4, 2, range(first_step, STEPS), seed=None))


def rows_of(windows: Iterator[Window]) -> list[list[int]]:
    return [window.rows.tolist() for window in windows]


def no_phase(phase: str) -> None:
    """Take the name of a phase, as callbacks do."""


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("windows")]


def test_windows_are_those_of_the_loader_in_its_order(accelerator: Accelerator) -> None:
    expected = rows_of(iter(prepared_loader(accelerator)))
    assert rows_of(loop._windows(accelerator, prepared_loader(accelerator), no_phase)) == expected
    assert len(expected) == STEPS

    none_left = prepared_loader(accelerator, first_step=STEPS)
    assert rows_of(loop._windows(accelerator, none_left, no_phase)) == []


def test_windows_are_on_the_device_that_prepare_chose(accelerator: Accelerator) -> None:
    loader = prepared_loader(accelerator)
    loader.device = torch.device("meta")  # stands for a GPU
    for window in loop._windows(accelerator, loader, no_phase):
        assert window.columns["input_ids"].is_meta


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

    for _ in loop._windows(accelerator, prepared_loader(accelerator), no_phase):
        pass

    assert changed_by == [threading.main_thread().name] * 2


def test_the_gradient_state_is_that_of_the_window_at_hand(accelerator: Accelerator) -> None:
    state = accelerator.gradient_state
    loader = prepared_loader(accelerator)
    held_out = accelerator.prepare(eval_loader(ROWS, 1, 4))
    ends: list[bool] = []
    for _ in loop._windows(accelerator, loader, no_phase):
        assert state.active_dataloader is loader
        ends.append(state.end_of_dataloader)
        for _ in held_out:  # an evaluation
            assert state.active_dataloader is held_out
    assert ends == [False, False, True]
    assert not state.in_dataloader


def test_windows_that_are_closed_early_leave_no_thread_and_no_loader_behind(
    accelerator: Accelerator,
) -> None:
    windows = loop._windows(accelerator, prepared_loader(accelerator), no_phase)
    next(windows)
    assert prefetching_threads()
    windows.close()
    assert not prefetching_threads()
    assert not accelerator.gradient_state.in_dataloader


def test_an_error_while_reading_ahead_is_raised_where_the_window_is_wanted(
    accelerator: Accelerator,
) -> None:
    class BrokenDiskError(Exception):
        """Stands for a disk that fails."""

    def break_at_the_last_step(window: Window) -> Window:
        if 8 in window.rows:
            raise BrokenDiskError
        return window

    loader = prepared_loader(accelerator)
    collate = loader.base_dataloader.collate_fn
    loader.base_dataloader.collate_fn = lambda read: break_at_the_last_step(collate(read))
    with pytest.raises(BrokenDiskError):
        rows_of(loop._windows(accelerator, loader, no_phase))
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
