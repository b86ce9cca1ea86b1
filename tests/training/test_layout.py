"""A layout divides the global batch among processes and micro-batches."""

import re

import pytest

from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError
from llmtrain.training.layout import Layout


def layout_of(rows: int, micro_batch: int, processes: int) -> Layout:
    """Return the layout if the user has set the size of a micro-batch."""
    config = DataConfig(global_batch_size=rows, per_device_train_batch_size=micro_batch)
    config.origins = {"per_device_train_batch_size": "command line"}
    return Layout.of(config, processes)


def error_of(rows: int, micro_batch: int, processes: int) -> str:
    with pytest.raises(UserError) as error:
        layout_of(rows, micro_batch, processes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("rows", "processes", "micro_batch"),
    [(24, 1, 12), (6, 1, 6), (7, 1, 7), (34, 2, 1), (60, 3, 10)],
)
def test_a_default_micro_batch_is_the_largest_that_divides_the_rows_of_a_rank(
    rows: int, processes: int, micro_batch: int
) -> None:
    config = DataConfig(global_batch_size=rows)
    assert config.per_device_train_batch_size == 16

    assert Layout.of(config, processes).micro_batch == micro_batch


def test_the_banner_shows_the_product() -> None:
    assert str(layout_of(64, 8, 2)) == "64 rows per step = 2 processes x 4 micro-batches x 8 rows"
    assert str(layout_of(1, 1, 1)) == "1 row per step = 1 process x 1 micro-batch x 1 row"


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 64])
def test_a_layout_computes_the_complete_batch_or_is_refused(
    processes: int, micro_batch: int
) -> None:
    rows_of_process = 24 // processes
    expected_micro_batch = min(micro_batch, rows_of_process)
    if rows_of_process % expected_micro_batch:
        error_of(24, micro_batch, processes)
        return

    layout = layout_of(24, micro_batch, processes)
    assert layout.micro_batch == expected_micro_batch
    assert layout.global_batch_size == 24
    assert layout.processes * layout.accumulation * layout.micro_batch == 24


@pytest.mark.parametrize(("rows", "processes"), [(64, 3), (7, 2), (2, 4), (100, 7)])
def test_the_error_for_rows_that_do_not_divide_names_values_that_work(
    rows: int, processes: int
) -> None:
    message = error_of(rows, 1, processes)

    assert f"--global_batch_size {rows}" in message
    remedy = re.search(r"use ([\d or]+), or --num_processes (\d+)\.", message)
    assert remedy
    for other_rows in remedy[1].split(" or "):
        assert layout_of(int(other_rows), 1, processes).global_batch_size == int(other_rows)
    assert layout_of(rows, 1, int(remedy[2])).processes <= processes


@pytest.mark.parametrize(
    ("rows", "micro_batch", "processes"), [(64, 7, 2), (10, 4, 1), (13, 6, 1), (62, 30, 2)]
)
def test_the_error_for_a_micro_batch_that_does_not_divide_names_values_that_work(
    rows: int, micro_batch: int, processes: int
) -> None:
    message = error_of(rows, micro_batch, processes)

    assert f"--per_device_train_batch_size {micro_batch}" in message
    remedy = re.search(r"use ([\d, or]+)\.", message)
    assert remedy
    for other_micro_batch in re.findall(r"\d+", remedy[1]):
        layout = layout_of(rows, int(other_micro_batch), processes)
        assert layout.micro_batch == int(other_micro_batch)
